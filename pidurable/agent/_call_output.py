"""What a running call puts out: output, details and diagnostics, shown as they come.

Bounded by the tool's limits and by what its place can hold; it is committed with the other progress
of the session, so that a call that a crash or an abort cuts short has it still. A call of the model
has its slot in `pi.live`. A nested one, which has none, gets a document of its own task when there
is something to keep, which ends with the task: one that is soon over never has one.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._documents import (
    LiveDocument,
    address_of,
    find_call,
    patch_live,
    read_doc,
)
from pidurable.agent._output import Keep, OutputCollector, clean_output
from pidurable.agent._progress import Progress
from pidurable.records import _json
from pidurable.session._documents import Address, address, definition_of, document
from pidurable.session._transaction import Transaction
from pidurable.tasks._errors import bounded

if TYPE_CHECKING:
    from pidurable.agent._call_records import ToolInput
    from pidurable.session._session import Session
    from pidurable.tasks._context import TaskContext

DIAGNOSTICS_MAX = 16
DIAGNOSTIC_BYTES_MAX = 1024


@document("pi.output", scope="task")
@attrs.define(kw_only=True)
class OutputDocument:
    """What a nested call has put out so far. Its fields are those of a slot in `pi.live`."""

    output_tail: str = ""
    details: Any = None
    diagnostics: list[Any] = attrs.Factory(list)


def _own_address(task_id: int) -> Address:
    return address(definition_of(OutputDocument), int(task_id))


def committed_output(
    session: Session, ctx: TaskContext[ToolInput, Any, Any]
) -> dict[str, Any] | None:
    """What is committed of a call's output, details and diagnostics; None: nothing was shown."""
    if ctx.input.caller is not None:
        own: dict[str, Any] | None = session.doc_value(_own_address(ctx.task_id))
        return own
    live = session.doc_value(address_of(LiveDocument, ctx.conversation_id))
    place = None if live is None else find_call(live, ctx.task_id)
    return None if live is None or place is None else live["calls"][place]


async def clear_output(session: Session, ctx: TaskContext[ToolInput, Any, Any]) -> None:
    """Show nothing more of what a call had put out: the run that follows puts it out again."""
    before = committed_output(session, ctx)
    nothing: dict[str, Any] = attrs.asdict(OutputDocument())
    if before is None or all(before[name] == value for name, value in nothing.items()):
        return
    async with ctx.commit() as tx:
        nested = ctx.input.caller is not None
        _show(tx, ctx.conversation_id, int(ctx.task_id), nothing, nested=nested)


def _show(
    tx: Transaction, conversation_id: int, task_id: int, shown: dict[str, Any], *, nested: bool
) -> None:
    """Stage what a call shows from now on; only what differs is written."""
    if nested:
        own = _own_address(task_id)
        before = tx.doc_value(own)
        if before is None:
            if any(shown.values()):
                tx.put_doc(definition_of(OutputDocument), own, shown)
            return
        tx.patch_doc(definition_of(OutputDocument), own, _changes("", before, shown))
        return
    live = read_doc(tx, LiveDocument, conversation_id)
    place = find_call(live, task_id)
    if place is not None:
        ops = _changes(f"/calls/{place}", live["calls"][place], shown)
        if ops:
            patch_live(tx, conversation_id, ops)


def _changes(path: str, before: dict[str, Any], shown: dict[str, Any]) -> list[Any]:
    """Operations that make one state of an output of another; what was added is appended."""
    ops: list[Any] = []
    for name, value in shown.items():
        at, was = f"{path}/{name}", before[name]
        if value == was:
            continue
        if name == "output_tail" and value.startswith(was):
            ops.append({"op": "append", "path": at, "value": value[len(was) :]})
        else:
            ops.append({"op": "replace", "path": at, "value": value})
    return ops


class CallOutput:
    """The output, details and diagnostics of a call while it runs, and where they are shown."""

    def __init__(
        self,
        progress: Progress,
        conversation_id: int,
        task_id: int,
        *,
        nested: bool,
        bytes_max: int,
        lines_max: int,
        keep: Keep,
    ) -> None:
        self._progress = progress
        self.conversation = conversation_id
        self._task = int(task_id)
        self._nested = nested
        self._closed = False
        self._diagnostics_dropped = 0
        self._decoder: codecs.IncrementalDecoder | None = None
        """Made for the first bytes: most calls put none out."""
        self.collector = OutputCollector(bytes_max=bytes_max, lines_max=lines_max, keep=keep)
        self.details: Any = None
        self.diagnostics: list[dict[str, str]] = []

    def add(self, text: str) -> None:
        """More output."""
        self.collector.add(text)
        self._progress.mark(self)

    def add_bytes(self, data: bytes) -> None:
        """More output, as UTF-8; the beginning of a character waits for the rest of it."""
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(self._decoder.decode(data))

    def show(self, details: Any) -> None:
        """Replace the details."""
        self.details = details
        self._progress.mark(self)

    def diagnose(self, severity: str, text: str) -> None:
        """Add a remark; of more than 16 the rest is counted."""
        if len(self.diagnostics) >= DIAGNOSTICS_MAX:
            self._diagnostics_dropped += 1
            text = f"{self._diagnostics_dropped} more diagnostics were dropped"
            self.diagnostics = self.diagnostics[:DIAGNOSTICS_MAX]
            severity = "warning"
        text = bounded(clean_output(text), DIAGNOSTIC_BYTES_MAX)
        self.diagnostics.append({"severity": severity, "text": text})
        self._progress.mark(self)

    def resume(self, slot: dict[str, Any]) -> None:
        """Go on behind what `pi.live` has of the call already."""
        self.collector.add(slot["output_tail"])
        self.details = slot["details"]
        self.diagnostics = list(slot["diagnostics"])

    def write(self, tx: Transaction) -> None:
        if self._closed:
            return
        sharing = 1
        if not self._nested:
            sharing = len(read_doc(tx, LiveDocument, self.conversation)["calls"])
        if sharing:
            shown = self._shown(sharing)
            _show(tx, self.conversation, self._task, shown, nested=self._nested)

    def _shown(self, sharing: int) -> dict[str, Any]:
        """As much of it as one of so many calls that share a document may show."""
        share = self._progress.document_bytes_max // sharing
        # A character that JSON escapes takes two bytes: half of the document at most.
        text = self.collector.text_within(share // 4)
        details = self.details
        if details is not None and len(_json.dumps(details).encode()) > share // 4:
            details = None
        diagnostics = list(self.diagnostics)
        while diagnostics and len(_json.dumps(diagnostics).encode()) > share // 8:
            diagnostics.pop()
        return {"output_tail": text, "details": details, "diagnostics": diagnostics}

    def lost(self) -> None:
        """Nothing to do: `write` compares with what is stored."""

    def close(self) -> None:
        """Show nothing more."""
        self._closed = True
        self._progress.forget(self)
