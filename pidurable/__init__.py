"""pidurable: durable, structured agent work on trio and SQLite.

A process that runs agents dies; the work does not. Everything that happens is a task, a state
machine whose every step is one atomic commit; tasks own other tasks and conversations and form one
tree. Start with `open_harness`; errors are in `pidurable.errors`, storage backends in
`pidurable.storage`, tools for tests in `pidurable.testing`.
"""

from pidurable.agent._catalogue import (
    Model as Model,
    ModelInfo as ModelInfo,
    Prices as Prices,
)
from pidurable.agent._default_models import default_models as default_models
from pidurable.agent._documents import (
    AgentDocument as AgentDocument,
    InboxDocument as InboxDocument,
    LiveDocument as LiveDocument,
    UsageDocument as UsageDocument,
)
from pidurable.agent._models import (
    Done as Done,
    ModelRequest as ModelRequest,
    Models as Models,
    Provider as Provider,
    RequestMessage as RequestMessage,
    StreamEvent as StreamEvent,
    TextDelta as TextDelta,
    ThinkingDelta as ThinkingDelta,
    ToolCallDelta as ToolCallDelta,
    ToolCallStart as ToolCallStart,
)
from pidurable.agent._provider_ai import AiProvider as AiProvider
from pidurable.agent._services import AgentChange as AgentChange
from pidurable.harness._conversation import Conversation as Conversation
from pidurable.harness._events import (
    EntryAdded as EntryAdded,
    Event as Event,
    MessageEnd as MessageEnd,
    MessageStart as MessageStart,
    MessageUpdate as MessageUpdate,
    RetryEnd as RetryEnd,
    RetryStart as RetryStart,
    RunEnd as RunEnd,
    RunStart as RunStart,
    Snapshot as Snapshot,
    SubmissionChanged as SubmissionChanged,
    ToolExecutionEnd as ToolExecutionEnd,
    ToolExecutionStart as ToolExecutionStart,
    ToolExecutionUpdate as ToolExecutionUpdate,
    TurnStart as TurnStart,
)
from pidurable.harness._open import Harness as Harness, open_harness as open_harness
from pidurable.harness._reader import (
    HolderView as HolderView,
    Reader as Reader,
    TreeRow as TreeRow,
    open_reader as open_reader,
)
from pidurable.harness._submission import Settled as Settled, Submission as Submission
from pidurable.records._entries import (
    ConversationRecord as ConversationRecord,
    Edit as Edit,
    Entry as Entry,
    entry as entry,
)
from pidurable.records._ids import TaskId as TaskId
from pidurable.records._limits import Settings as Settings
from pidurable.records._messages import (
    AssistantMessage as AssistantMessage,
    Block as Block,
    ImageBlock as ImageBlock,
    Message as Message,
    SystemMessage as SystemMessage,
    TextBlock as TextBlock,
    ThinkingBlock as ThinkingBlock,
    ToolCallBlock as ToolCallBlock,
    ToolDeclaration as ToolDeclaration,
    ToolResultMessage as ToolResultMessage,
    Usage as Usage,
    UserMessage as UserMessage,
)
from pidurable.records._submissions import SubmissionRecord as SubmissionRecord
from pidurable.records._tasks import (
    ErrorInfo as ErrorInfo,
    Outcome as Outcome,
    OutcomeRecord as OutcomeRecord,
    Status as Status,
    TaskRecord as TaskRecord,
    Wait as Wait,
)
from pidurable.registry import (
    Env as Env,
    ExitStatus as ExitStatus,
    Extension as Extension,
    ExtensionLoader as ExtensionLoader,
    FileInfo as FileInfo,
    LocalEnv as LocalEnv,
    Registry as Registry,
    SectionInput as SectionInput,
    Tool as Tool,
    ToolCall as ToolCall,
    ToolResult as ToolResult,
    display_path as display_path,
    hook as hook,
    nearest_name as nearest_name,
    schema_tool as schema_tool,
    section as section,
    tool as tool,
    wrap_section as wrap_section,
    wrap_tool as wrap_tool,
)
from pidurable.session._documents import document as document
from pidurable.tasks._context import TaskContext as TaskContext
from pidurable.tasks._definition import (
    Retry as Retry,
    Task as Task,
    backoff as backoff,
    nothing_to_undo as nothing_to_undo,
    phase as phase,
)
from pidurable.tasks._transaction import (
    TaskTransaction as TaskTransaction,
    TreeTransaction as TreeTransaction,
)

__version__ = "0.1.0"
