"""Progress: what is streamed, shown as it comes, without a commit for each word.

Buffers collect deltas in memory and mark themselves dirty; one flusher per session puts all dirty
buffers into one commit per tick, and stretches the tick so that progress takes at most a tenth of
the loop. Such a commit carries nothing but progress: it is shown once it survives the death of the
process, and the next flushed commit makes it safe from a loss of power too.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from pidurable.agent._documents import (
    LiveDocument,
    find_call,
    patch_live,
    read_doc,
    update_doc,
)
from pidurable.errors import (
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.session._transaction import Transaction
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._transaction import TreeTransaction

_SHARE = 10
"""A tick lasts at least this many times what the flush before it took."""


class Buffer(Protocol):
    """Something that is streamed into a document."""

    def write(self, tx: Transaction) -> None:
        """Stage what came since the last call."""
        ...

    def lost(self) -> None:
        """The commit with the last `write` was not stored."""
        ...


class Progress:
    """The flusher of one session."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._dirty: dict[int, Buffer] = {}
        self._wake = trio.Event()

    def mark(self, buffer: Buffer) -> None:
        """The buffer has something to show. Cheap; call it for every delta."""
        self._dirty[id(buffer)] = buffer
        self._wake.set()

    def forget(self, buffer: Buffer) -> None:
        """What the buffer holds is committed otherwise."""
        self._dirty.pop(id(buffer), None)

    async def serve(self) -> None:
        """Flush for as long as the harness is open."""
        took = 0.0
        while True:
            await self._wake.wait()
            await trio.sleep(max(self._runtime.session.settings.progress_seconds, took * _SHARE))
            self._wake = trio.Event()
            began = trio.current_time()
            await self.flush()
            took = trio.current_time() - began

    async def flush(self) -> None:
        """Put everything dirty into one commit."""
        buffers = list(self._dirty.values())
        self._dirty.clear()

        def body(tx: TreeTransaction) -> None:
            for buffer in buffers:
                buffer.write(tx)

        try:
            await self._runtime.commit(body, flush=False)
        except (StorageRefusedError, SessionPoisonedError, SessionClosedError):
            # Progress may be lost; the commit that ends the stream carries the whole.
            for buffer in buffers:
                buffer.lost()


class PartialAnswer:
    """The answer that a generation streams, as blocks of `pi.live`."""

    def __init__(self, progress: Progress, conversation_id: int, generation: int) -> None:
        self._progress = progress
        self._conversation = conversation_id
        self._generation = generation
        self._texts: list[tuple[str, list[str]]] = []
        self._written: list[int] = []
        """By block, how many pieces are staged already."""
        self._whole = True

    def add(self, kind: str, text: str) -> None:
        """More of a text or thinking block; another kind begins the next block."""
        if not self._texts or self._texts[-1][0] != kind:
            self._texts.append((kind, []))
        self._texts[-1][1].append(text)
        self._progress.mark(self)

    def blocks(self) -> list[dict[str, str]]:
        return [{"type": kind, "text": "".join(pieces)} for kind, pieces in self._texts]

    def characters(self) -> int:
        return sum(len(piece) for _, pieces in self._texts for piece in pieces)

    def write(self, tx: Transaction) -> None:
        live = read_doc(tx, LiveDocument, self._conversation)
        if live["generation"] != self._generation or not self._texts:
            return
        if self._whole or live["partial"] is None:
            update_doc(tx, LiveDocument, self._conversation, partial={"blocks": self.blocks()})
        else:
            ops: list[Any] = []
            for place, (kind, pieces) in enumerate(self._texts):
                if place >= len(self._written):
                    block = {"type": kind, "text": "".join(pieces)}
                    ops.append({"op": "add", "path": "/partial/blocks/-", "value": block})
                elif self._written[place] < len(pieces):
                    text = "".join(pieces[self._written[place] :])
                    path = f"/partial/blocks/{place}/text"
                    ops.append({"op": "append", "path": path, "value": text})
            patch_live(tx, self._conversation, ops)
        self._whole = False
        self._written = [len(pieces) for _, pieces in self._texts]

    def lost(self) -> None:
        self._whole = True

    def close(self) -> None:
        self._progress.forget(self)


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
        keep: str,
    ) -> None:
        self._progress = progress
        self._conversation = conversation_id
        self._task = task_id
        self.collector = OutputCollector(bytes_max=bytes_max, lines_max=lines_max, keep=keep)
        self.details: Any = None
        self.diagnostics: list[dict[str, str]] = []
        self._shown = ""

    def add(self, text: str) -> None:
        self.collector.add(text)
        self._progress.mark(self)

    def changed(self) -> None:
        self._progress.mark(self)

    def write(self, tx: Transaction) -> None:
        live = read_doc(tx, LiveDocument, self._conversation)
        place = find_call(live, self._task)
        if place is None:
            return
        call = live["calls"][place]
        path = f"/calls/{place}"
        ops: list[Any] = []
        text = self.collector.text()
        shown = call["output_tail"]
        if text != shown:
            if text.startswith(shown):
                value = text[len(shown) :]
                ops.append({"op": "append", "path": f"{path}/output_tail", "value": value})
            else:
                ops.append({"op": "replace", "path": f"{path}/output_tail", "value": text})
        if call["details"] != self.details:
            ops.append({"op": "replace", "path": f"{path}/details", "value": self.details})
        if call["diagnostics"] != self.diagnostics:
            made = list(self.diagnostics)
            ops.append({"op": "replace", "path": f"{path}/diagnostics", "value": made})
        if ops:
            patch_live(tx, self._conversation, ops)

    def lost(self) -> None:
        self._progress.mark(self)

    def close(self) -> None:
        self._progress.forget(self)


_KEPT_CONTROLS = {9, 10}
_REMOVED = {code: None for code in (*range(32), *range(127, 160)) if code not in _KEPT_CONTROLS}


def clean_output(text: str) -> str:
    """Text that can be stored and shown: no control characters, no lone surrogates."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n").translate(_REMOVED)
    try:
        plain.encode()
    except UnicodeEncodeError:
        return plain.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return plain


class OutputCollector:
    """Keeps the head or the tail of an output, bounded in bytes and lines, and counts the rest."""

    def __init__(self, *, bytes_max: int, lines_max: int, keep: str) -> None:
        self._bytes_max = bytes_max
        self._lines_max = lines_max
        self._head = keep == "head"
        self._text = ""
        self.dropped_bytes = 0

    def add(self, text: str) -> None:
        text = clean_output(text)
        if self._head and self.dropped_bytes:
            self.dropped_bytes += len(text.encode())
            return
        self._text += text
        if len(self._text) > self._bytes_max // 4 or self._text.count("\n") >= self._lines_max:
            self._cut()

    def _cut(self) -> None:
        lines = self._text.splitlines(keepends=True)
        if len(lines) > self._lines_max:
            kept = lines[: self._lines_max] if self._head else lines[-self._lines_max :]
            self._drop_to("".join(kept))
        raw = self._text.encode()
        if len(raw) > self._bytes_max:
            part = raw[: self._bytes_max] if self._head else raw[-self._bytes_max :]
            self._drop_to(part.decode(errors="ignore"))

    def _drop_to(self, kept: str) -> None:
        self.dropped_bytes += len(self._text.encode()) - len(kept.encode())
        self._text = kept

    def text(self) -> str:
        """What is kept, without a mark."""
        return self._text

    def marked(self) -> str:
        """What is kept, with a line that says how much is not."""
        if not self.dropped_bytes:
            return self._text
        note = f"[{self.dropped_bytes} bytes of output were dropped]"
        return f"{self._text}\n{note}" if self._head else f"{note}\n{self._text}"


def bounded_output(text: str, *, bytes_max: int, lines_max: int, keep: str) -> str:
    """A whole text, cleaned and cut to a tool's limits with a mark."""
    collector = OutputCollector(bytes_max=bytes_max, lines_max=lines_max, keep=keep)
    collector.add(text)
    return collector.marked()
