"""What a running call puts out: output, details and diagnostics, shown as they come.

Bounded by the tool's limits and by what its place can hold; it is committed with the other progress
of the session, so that a call that a crash or an abort cuts short has it still.
"""

from __future__ import annotations

import codecs
from typing import Any

from pidurable.agent._documents import LiveDocument, find_call, patch_live, read_doc
from pidurable.agent._output import Keep, OutputCollector, clean_output
from pidurable.agent._progress import Progress
from pidurable.records import _json
from pidurable.session._transaction import Transaction
from pidurable.tasks._errors import bounded

DIAGNOSTICS_MAX = 16
DIAGNOSTIC_BYTES_MAX = 1024


class CallOutput:
    """The output, details and diagnostics of a running tool call, in `pi.live`."""

    def __init__(
        self,
        progress: Progress,
        conversation_id: int,
        task_id: int,
        *,
        bytes_max: int,
        lines_max: int,
        keep: Keep,
    ) -> None:
        self._progress = progress
        self.conversation = conversation_id
        self._task = task_id
        self._closed = False
        self._diagnostics_dropped = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.value_bytes_max = progress.value_bytes_max
        self.collector = OutputCollector(bytes_max=bytes_max, lines_max=lines_max, keep=keep)
        self.details: Any = None
        self.diagnostics: list[dict[str, str]] = []

    def add(self, text: str) -> None:
        """More output."""
        self.collector.add(text)
        self._progress.mark(self)

    def add_bytes(self, data: bytes) -> None:
        """More output, as UTF-8; the beginning of a character waits for the rest of it."""
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
        live = read_doc(tx, LiveDocument, self.conversation)
        place = find_call(live, self._task)
        if place is None:
            return
        call = live["calls"][place]
        path = f"/calls/{place}"
        ops: list[Any] = []
        text, details, diagnostics = self._shown(len(live["calls"]))
        shown = call["output_tail"]
        if text != shown:
            if text.startswith(shown):
                value = text[len(shown) :]
                ops.append({"op": "append", "path": f"{path}/output_tail", "value": value})
            else:
                ops.append({"op": "replace", "path": f"{path}/output_tail", "value": text})
        if call["details"] != details:
            ops.append({"op": "replace", "path": f"{path}/details", "value": details})
        if call["diagnostics"] != diagnostics:
            ops.append({"op": "replace", "path": f"{path}/diagnostics", "value": diagnostics})
        if ops:
            patch_live(tx, self.conversation, ops)

    def _shown(self, calls: int) -> tuple[str, Any, list[dict[str, str]]]:
        """Output, details and diagnostics, as much of them as one of so many calls may show."""
        share = self._progress.document_bytes_max // calls
        # A character that JSON escapes takes two bytes: half of the document at most.
        text = self.collector.text_within(share // 4)
        details = self.details
        if details is not None and len(_json.dumps(details).encode()) > share // 4:
            details = None
        diagnostics = list(self.diagnostics)
        while diagnostics and len(_json.dumps(diagnostics).encode()) > share // 8:
            diagnostics.pop()
        return text, details, diagnostics

    def lost(self) -> None:
        """Nothing to do: `write` compares with what is stored."""

    def close(self) -> None:
        """Show nothing more."""
        self._closed = True
        self._progress.forget(self)
