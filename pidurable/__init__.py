"""pidurable: durable, structured agent work on trio and SQLite.

A process that runs agents dies; the work does not. Everything that happens is a task, a state
machine whose every step is one atomic commit; tasks own other tasks and conversations and form one
tree. Start with `open_harness`; errors are in `pidurable.errors`, storage backends in
`pidurable.storage`, tools for tests in `pidurable.testing`.

Names are loaded when they are first used: a command that only looks, or only explains itself, does
not pay for the agent. Type checkers read the imports below; a test holds both lists together.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pidurable.agent._catalogue import (
        Model as Model,
        ModelInfo as ModelInfo,
        Prices as Prices,
    )
    from pidurable.agent._compaction import Compaction as Compaction
    from pidurable.agent._compaction_records import CompactionResult as CompactionResult
    from pidurable.agent._decisions import (
        Decision as Decision,
        Deny as Deny,
        Happened as Happened,
        Interrupted as Interrupted,
        Once as Once,
        Pattern as Pattern,
        Rerun as Rerun,
    )
    from pidurable.agent._default_models import default_models as default_models
    from pidurable.agent._documents import (
        AgentDocument as AgentDocument,
        CompactionDocument as CompactionDocument,
        InboxDocument as InboxDocument,
        LiveDocument as LiveDocument,
        UsageDocument as UsageDocument,
    )
    from pidurable.agent._generation import Generation as Generation
    from pidurable.agent._grants import Grant as Grant, GrantsDocument as GrantsDocument
    from pidurable.agent._hooks import (
        AfterResponse as AfterResponse,
        AfterTool as AfterTool,
        AfterTools as AfterTools,
        Ask as Ask,
        BeforeCompact as BeforeCompact,
        BeforeRequest as BeforeRequest,
        BeforeTool as BeforeTool,
        BlockCall as BlockCall,
        CompactionHooks as CompactionHooks,
        Continue as Continue,
        Decline as Decline,
        GenerationHooks as GenerationHooks,
        OnAbort as OnAbort,
        OnYield as OnYield,
        Rewrite as Rewrite,
        Staged as Staged,
        Stop as Stop,
        Summary as Summary,
        ToolHooks as ToolHooks,
    )
    from pidurable.agent._models import (
        Deferred as Deferred,
        DefersAnswers as DefersAnswers,
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
    from pidurable.agent._permissions import (
        PermissionDocument as PermissionDocument,
        PermissionRequest as PermissionRequest,
    )
    from pidurable.agent._provider_ai import AiProvider as AiProvider
    from pidurable.agent._selection import Selection as Selection
    from pidurable.agent._services import AgentChange as AgentChange
    from pidurable.agent._tool_call import ToolTask as ToolTask
    from pidurable.harness._client import Client as Client, open_client as open_client
    from pidurable.harness._conversation import Conversation as Conversation
    from pidurable.harness._event_json import event_json as event_json
    from pidurable.harness._events import (
        AgentChanged as AgentChanged,
        CompactionEnd as CompactionEnd,
        CompactionStart as CompactionStart,
        CompactionUpdate as CompactionUpdate,
        EntryAdded as EntryAdded,
        Event as Event,
        InboxUpdate as InboxUpdate,
        MessageEnd as MessageEnd,
        MessageStart as MessageStart,
        MessageUpdate as MessageUpdate,
        PermissionAsked as PermissionAsked,
        PermissionDecided as PermissionDecided,
        RetryEnd as RetryEnd,
        RetryStart as RetryStart,
        RunEnd as RunEnd,
        RunStart as RunStart,
        Snapshot as Snapshot,
        SubmissionChanged as SubmissionChanged,
        TaskFailed as TaskFailed,
        ToolExecutionEnd as ToolExecutionEnd,
        ToolExecutionStart as ToolExecutionStart,
        ToolExecutionUpdate as ToolExecutionUpdate,
        TurnEnd as TurnEnd,
        TurnStart as TurnStart,
        UsageUpdate as UsageUpdate,
    )
    from pidurable.harness._listing import (
        ConversationState as ConversationState,
        ListedConversation as ListedConversation,
    )
    from pidurable.harness._move import (
        export_session as export_session,
        import_session as import_session,
    )
    from pidurable.harness._open import Harness as Harness, open_harness as open_harness
    from pidurable.harness._reader import (
        HolderView as HolderView,
        Reader as Reader,
        TreeRow as TreeRow,
        open_reader as open_reader,
    )
    from pidurable.harness._submission import Settled as Settled, Submission as Submission
    from pidurable.harness._views import (
        ConversationView as ConversationView,
        HeadPlace as HeadPlace,
        HistoryPage as HistoryPage,
    )
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
    from pidurable.records._readonly import JsonArray as JsonArray, JsonObject as JsonObject
    from pidurable.records._submissions import SubmissionRecord as SubmissionRecord
    from pidurable.records._tasks import (
        ErrorInfo as ErrorInfo,
        JoinPolicy as JoinPolicy,
        OnRestart as OnRestart,
        Outcome as Outcome,
        OutcomeRecord as OutcomeRecord,
        OutcomeStatus as OutcomeStatus,
        Status as Status,
        TaskRecord as TaskRecord,
        Wait as Wait,
        WokenBy as WokenBy,
    )
    from pidurable.registry import (
        CallResult as CallResult,
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
    from pidurable.session._context import ModelContext as ModelContext
    from pidurable.session._document_watch import DocumentView as DocumentView
    from pidurable.session._documents import document as document
    from pidurable.session._notes import note_in_place as note_in_place
    from pidurable.session._transcript import ContextMessage as ContextMessage
    from pidurable.session._watch import Frame as Frame, Watch as Watch
    from pidurable.storage._export import (
        ExportReport as ExportReport,
        MoveProgress as MoveProgress,
    )
    from pidurable.storage._import import ImportReport as ImportReport
    from pidurable.tasks._committed import CommittedState as CommittedState
    from pidurable.tasks._context import TaskContext as TaskContext
    from pidurable.tasks._definition import (
        Retry as Retry,
        Task as Task,
        backoff as backoff,
        nothing_to_undo as nothing_to_undo,
        phase as phase,
    )
    from pidurable.tasks._explain import Explanation as Explanation
    from pidurable.tasks._gc_report import GcReport as GcReport
    from pidurable.tasks._graph import (
        GraphConversation as GraphConversation,
        GraphTask as GraphTask,
        TaskGraph as TaskGraph,
    )
    from pidurable.tasks._inspect import InspectedTask as InspectedTask
    from pidurable.tasks._transaction import (
        TaskTransaction as TaskTransaction,
        TreeTransaction as TreeTransaction,
    )

__version__ = "0.1.0"

_HOMES = {
    "pidurable.agent._catalogue": (
        "Model",
        "ModelInfo",
        "Prices",
    ),
    "pidurable.agent._decisions": (
        "Decision",
        "Deny",
        "Happened",
        "Interrupted",
        "Once",
        "Pattern",
        "Rerun",
    ),
    "pidurable.agent._default_models": ("default_models",),
    "pidurable.agent._documents": (
        "AgentDocument",
        "CompactionDocument",
        "InboxDocument",
        "LiveDocument",
        "UsageDocument",
    ),
    "pidurable.agent._grants": ("Grant", "GrantsDocument"),
    "pidurable.agent._compaction": ("Compaction",),
    "pidurable.agent._compaction_records": ("CompactionResult",),
    "pidurable.agent._generation": ("Generation",),
    "pidurable.agent._hooks": (
        "AfterResponse",
        "AfterTool",
        "AfterTools",
        "Ask",
        "BeforeCompact",
        "BeforeRequest",
        "BeforeTool",
        "BlockCall",
        "CompactionHooks",
        "Continue",
        "Decline",
        "GenerationHooks",
        "OnAbort",
        "OnYield",
        "Rewrite",
        "Staged",
        "Stop",
        "Summary",
        "ToolHooks",
    ),
    "pidurable.agent._models": (
        "Deferred",
        "DefersAnswers",
        "Done",
        "ModelRequest",
        "Models",
        "Provider",
        "RequestMessage",
        "StreamEvent",
        "TextDelta",
        "ThinkingDelta",
        "ToolCallDelta",
        "ToolCallStart",
    ),
    "pidurable.agent._permissions": ("PermissionDocument", "PermissionRequest"),
    "pidurable.agent._provider_ai": ("AiProvider",),
    "pidurable.agent._selection": ("Selection",),
    "pidurable.agent._services": ("AgentChange",),
    "pidurable.agent._tool_call": ("ToolTask",),
    "pidurable.harness._client": ("Client", "open_client"),
    "pidurable.harness._conversation": ("Conversation",),
    "pidurable.harness._event_json": ("event_json",),
    "pidurable.harness._events": (
        "AgentChanged",
        "CompactionEnd",
        "CompactionStart",
        "CompactionUpdate",
        "EntryAdded",
        "Event",
        "InboxUpdate",
        "MessageEnd",
        "MessageStart",
        "MessageUpdate",
        "PermissionAsked",
        "PermissionDecided",
        "RetryEnd",
        "RetryStart",
        "RunEnd",
        "RunStart",
        "Snapshot",
        "SubmissionChanged",
        "TaskFailed",
        "ToolExecutionEnd",
        "ToolExecutionStart",
        "ToolExecutionUpdate",
        "TurnEnd",
        "TurnStart",
        "UsageUpdate",
    ),
    "pidurable.harness._listing": (
        "ConversationState",
        "ListedConversation",
    ),
    "pidurable.harness._move": (
        "export_session",
        "import_session",
    ),
    "pidurable.harness._open": (
        "Harness",
        "open_harness",
    ),
    "pidurable.harness._reader": (
        "HolderView",
        "Reader",
        "TreeRow",
        "open_reader",
    ),
    "pidurable.harness._submission": (
        "Settled",
        "Submission",
    ),
    "pidurable.harness._views": (
        "ConversationView",
        "HeadPlace",
        "HistoryPage",
    ),
    "pidurable.records._entries": (
        "ConversationRecord",
        "Edit",
        "Entry",
        "entry",
    ),
    "pidurable.records._ids": ("TaskId",),
    "pidurable.records._limits": ("Settings",),
    "pidurable.records._messages": (
        "AssistantMessage",
        "Block",
        "ImageBlock",
        "Message",
        "SystemMessage",
        "TextBlock",
        "ThinkingBlock",
        "ToolCallBlock",
        "ToolDeclaration",
        "ToolResultMessage",
        "Usage",
        "UserMessage",
    ),
    "pidurable.records._readonly": (
        "JsonArray",
        "JsonObject",
    ),
    "pidurable.records._submissions": ("SubmissionRecord",),
    "pidurable.records._tasks": (
        "ErrorInfo",
        "JoinPolicy",
        "OnRestart",
        "Outcome",
        "OutcomeRecord",
        "OutcomeStatus",
        "Status",
        "TaskRecord",
        "Wait",
        "WokenBy",
    ),
    "pidurable.registry": (
        "CallResult",
        "Env",
        "ExitStatus",
        "Extension",
        "ExtensionLoader",
        "FileInfo",
        "LocalEnv",
        "Registry",
        "SectionInput",
        "Tool",
        "ToolCall",
        "ToolResult",
        "display_path",
        "hook",
        "nearest_name",
        "schema_tool",
        "section",
        "tool",
        "wrap_section",
        "wrap_tool",
    ),
    "pidurable.session._context": ("ModelContext",),
    "pidurable.session._documents": ("document",),
    "pidurable.session._notes": ("note_in_place",),
    "pidurable.session._transcript": ("ContextMessage",),
    "pidurable.session._document_watch": ("DocumentView",),
    "pidurable.session._watch": (
        "Frame",
        "Watch",
    ),
    "pidurable.storage._export": (
        "ExportReport",
        "MoveProgress",
    ),
    "pidurable.storage._import": ("ImportReport",),
    "pidurable.tasks._committed": ("CommittedState",),
    "pidurable.tasks._context": ("TaskContext",),
    "pidurable.tasks._definition": (
        "Retry",
        "Task",
        "backoff",
        "nothing_to_undo",
        "phase",
    ),
    "pidurable.tasks._explain": ("Explanation",),
    "pidurable.tasks._gc_report": ("GcReport",),
    "pidurable.tasks._graph": (
        "GraphConversation",
        "GraphTask",
        "TaskGraph",
    ),
    "pidurable.tasks._inspect": ("InspectedTask",),
    "pidurable.tasks._transaction": (
        "TaskTransaction",
        "TreeTransaction",
    ),
}
"""Where each public name comes from."""

_ORIGINS = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from where it is defined."""
    if name == "__all__":
        # For `from pidurable import *`, which asks for it; a list in the module would load nothing.
        return sorted(_ORIGINS)
    origin = _ORIGINS.get(name)
    if origin is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(origin), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORIGINS})
