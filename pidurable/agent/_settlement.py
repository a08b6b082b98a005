"""Settlement: what the agent adds to commits in which the tree ends or aborts its tasks.

When the scheduler ends a run task itself, its conversation stays usable.

`faulted` and `orphaned` are outcomes that no code of the task decides, and a task that was aborted
before it ever ran has no handler either. In that same commit the run is settled: the partial answer
kept, the inputs unanswered with the reason, `pi.live` cleared. A tool's slot is closed without an
entry; the end of its round writes the error result. A compaction is shown no more.

When a task is to be aborted, what is queued in the conversations below it is taken back in the same
commit (unanswered, `aborted`): nothing may start there any more. Queued writes stay.
"""

from __future__ import annotations

from pidurable.agent._attempts import settle_generation
from pidurable.agent._compaction_start import show_ended
from pidurable.agent._documents import LiveDocument, find_call, patch_live, read_doc
from pidurable.agent._inbox import withdraw_queued
from pidurable.agent._services import AgentServices
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._tasks import ErrorInfo
from pidurable.tasks._errors import bounded
from pidurable.tasks._transaction import TreeTransaction
from pidurable.tasks._tree import Node


def settle_by(services: AgentServices) -> None:
    """Let the runtime call the settlement for the built-in tasks."""
    session = services.runtime.session

    def settle(tx: TreeTransaction, node: Node, status: str, error: ErrorInfo | None) -> None:
        if node.kind == "pi.generation":
            detail = node.abort_reason
            if error is not None:
                detail = bounded(f"{error.type}: {error.message}", ERROR_MESSAGE_BYTES_MAX)
            settle_generation(
                tx, session, services, node.conversation, node.id, reason=status, detail=detail
            )
        elif node.kind == "pi.tool":
            services.permissions.close_of(tx, node, "gone")
            place = find_call(read_doc(tx, LiveDocument, node.conversation), node.id)
            if place is not None:
                path = f"/calls/{place}/status"
                ops = [{"op": "replace", "path": path, "value": status}]
                patch_live(tx, node.conversation, ops)
        elif node.kind == "pi.compaction":
            show_ended(tx, node.conversation, node.id)

    def withdraw(tx: TreeTransaction, node: Node) -> None:
        for id in services.runtime.conversations_below(tx.view, node.id):
            withdraw_queued(tx, id, reason="aborted")

    services.runtime.settlement.append(settle)
    services.runtime.on_intent.append(withdraw)
