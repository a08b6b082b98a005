"""Progress: what is streamed, shown as it comes, without a commit for each word.

Buffers collect deltas in memory and mark themselves dirty; one flusher per session puts all dirty
buffers into one commit per tick, or into a few if they are many, and stretches the tick so that
progress takes at most a tenth of the loop. Such a commit carries nothing but progress: it is shown
once it survives the death of the process, and the next flushed commit makes it safe from a loss of
power too. Holds at all times:

* a closed buffer writes nothing more, also if a flush that took it is still waiting for the line;
* what a buffer shows is bounded, whatever is streamed into it, and what the calls of a round show
  fits their document together;
* a progress commit that fails loses progress, and nothing else; one conversation's does not lose
  another's.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from pidurable.agent._documents import (
    LiveDocument,
    patch_live,
    read_doc,
    update_doc,
)
from pidurable.errors import (
    DocumentTooLargeError,
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
)
from pidurable.session._seams import logger
from pidurable.session._transaction import Transaction
from pidurable.tasks._runtime import Runtime
from pidurable.tasks._transaction import TreeTransaction

_SHARE = 20
"""A tick lasts at least this many times what the bodies of a flush take. A body is half of what
progress costs the loop: after it the rows are made, and the documents published."""

COMMIT_BUFFERS_MAX = 128
"""Of more dirty buffers the rest goes into further commits: a thousand at once would keep the loop
from everybody else for 40 ms."""

PARTIAL_CHARACTERS_MAX = 256 * 1024
"""Of an answer that is being streamed, more than this is not shown before it is complete."""

_BLOCK_CHARACTERS = 64
"""What each further block of a partial answer counts, besides its text."""


class Buffer(Protocol):
    """Something that is streamed into a document."""

    conversation: int

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
        self._took = 0.0
        """Seconds that the bodies of the flush that is being made have taken so far."""

    @property
    def value_bytes_max(self) -> int:
        """Most bytes of one stored value."""
        return self._runtime.session.settings.value_bytes_max

    @property
    def document_bytes_max(self) -> int:
        """Most bytes of one document."""
        return self._runtime.session.settings.document_bytes_max

    def mark(self, buffer: Buffer) -> None:
        """The buffer has something to show. Cheap; call it for every delta."""
        self._dirty[id(buffer)] = buffer
        self._wake.set()

    def forget(self, buffer: Buffer) -> None:
        """What the buffer holds is committed otherwise."""
        self._dirty.pop(id(buffer), None)

    async def serve(self) -> None:
        """Flush for as long as the session serves."""
        usual = before = 0.0
        while True:
            await self._wake.wait()
            await trio.sleep(max(self._runtime.session.settings.progress_seconds, usual * _SHARE))
            self._wake = trio.Event()
            self._took = 0.0
            try:
                await self.flush()
            except (SessionPoisonedError, SessionClosedError):
                # Whoever waits on the session is told by the session itself.
                return
            # What happens to a process now and then, a collection of its garbage for one, is not
            # what a flush costs, and would stop all progress for seconds.
            usual, before = min(before, self._took), self._took

    async def flush(self) -> None:
        """Put everything dirty into one commit, or into a few.

        Raises:
            SessionPoisonedError, SessionClosedError: Nothing can be stored any more.
        """
        dirty = list(self._dirty.values())
        self._dirty.clear()
        for first in range(0, len(dirty), COMMIT_BUFFERS_MAX):
            await self._flush_some(dirty[first : first + COMMIT_BUFFERS_MAX])

    async def _flush_some(self, buffers: list[Buffer]) -> None:
        try:
            await self._commit(buffers)
        except DocumentTooLargeError:
            # One conversation shows too much; the others are not to suffer.
            apart: dict[int, list[Buffer]] = {}
            for buffer in buffers:
                apart.setdefault(buffer.conversation, []).append(buffer)
            for of_one in apart.values():
                try:
                    await self._commit(of_one)
                except DocumentTooLargeError as too_large:
                    _report_lost(of_one, too_large)

    async def _commit(self, buffers: list[Buffer]) -> None:
        def body(tx: TreeTransaction) -> None:
            # Only this is timed: while a flush waits for its turn and for the disk, others have
            # the loop.
            began = trio.current_time()
            for buffer in buffers:
                buffer.write(tx)
            self._took += trio.current_time() - began

        try:
            await self._runtime.commit(body, flush=False)
        except (SessionPoisonedError, SessionClosedError, DocumentTooLargeError):
            raise
        except PidurableError as refused:
            _report_lost(buffers, refused)


def _report_lost(buffers: list[Buffer], refused: PidurableError) -> None:
    """Progress may be lost; the commit that ends the stream carries the whole."""
    logger.warning("progress was not stored: %s", refused)
    for buffer in buffers:
        buffer.lost()


class PartialAnswer:
    """The answer that a generation streams, as blocks of `pi.live`."""

    def __init__(self, progress: Progress, conversation_id: int, generation: int) -> None:
        self._progress = progress
        self.conversation = conversation_id
        self._generation = generation
        self._texts: list[tuple[str, list[str]]] = []
        self._written: list[int] = []
        """By block, how many pieces are staged already."""
        self._whole = True
        self._closed = False
        self._kept = 0
        # A character may take six bytes in JSON; the entry that keeps it must fit one value.
        self._most = min(PARTIAL_CHARACTERS_MAX, progress.value_bytes_max // 8)
        self.characters = 0
        """How many were streamed, shown or not."""

    def add(self, kind: str, text: str) -> None:
        """More of a text or thinking block; another kind begins the next block."""
        self.characters += len(text)
        begins = not self._texts or self._texts[-1][0] != kind
        cost = len(text) + (_BLOCK_CHARACTERS if begins else 0)
        if self._kept + cost > self._most:
            # Nothing after a gap is shown either.
            self._kept = self._most
            return
        self._kept += cost
        if begins:
            self._texts.append((kind, []))
        self._texts[-1][1].append(text)
        self._progress.mark(self)

    def blocks(self) -> list[dict[str, str]]:
        """The blocks as `pi.live` shows them."""
        return [{"type": kind, "text": "".join(pieces)} for kind, pieces in self._texts]

    def write(self, tx: Transaction) -> None:
        live = read_doc(tx, LiveDocument, self.conversation)
        if self._closed or live["generation"] != self._generation or not self._texts:
            return
        if self._whole or live["partial"] is None:
            update_doc(tx, LiveDocument, self.conversation, partial={"blocks": self.blocks()})
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
            patch_live(tx, self.conversation, ops)
        self._whole = False
        self._written = [len(pieces) for _, pieces in self._texts]

    def lost(self) -> None:
        self._whole = True

    def close(self) -> None:
        """Show nothing more: what follows is committed by the generation itself."""
        self._closed = True
        self._progress.forget(self)
