"""Retention: ended trees go whole, in small commits, while work goes on.

What may go is found in a thread (`_gc_trees`), a slice at a time, and goes in commits of the line:

* a group of trees that fits one commit goes in one. Any number of small groups share a commit;
* a larger one is marked first. From then on nothing may be added to it, and it goes piece by piece,
  from the bottom up, the roots last and their marks with them. What a crash, a refusal or a
  cancellation leaves marked is finished by the next collection, or by the next opening.

What was read may have changed by the time of the commit. So whatever a commit of the line touches
while trees are looked at is noted, and its body, on the line, leaves out the trees that were: they
stay for the next collection. The same holds for blobs: a text that is written while they are looked
for is looked through when it is staged.

Each slice and each commit is kept to a few milliseconds while others commit, and is followed by a
pause of nine times what it costs (`_gc_pace`): a collection takes about a tenth of the line. Alone
it makes no pauses. Its commits are not flushed, but for those that mark: what a loss of power
undoes of them is found again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from pidurable.errors import (
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records._limits import PASS_RECORDS_MAX
from pidurable.session._removals import Removal
from pidurable.session._seams import logger
from pidurable.storage import Op, RemovalRow
from pidurable.tasks._gc_answers import answers_before_us, old_answers
from pidurable.tasks._gc_blobs import blob_windows, keep_referenced
from pidurable.tasks._gc_pace import Pace
from pidurable.tasks._gc_report import GcReport, cutoff, make_report, to_us
from pidurable.tasks._gc_rows import Piece, Rows, Tally, retired_documents, stored_size
from pidurable.tasks._gc_survey import Survey
from pidurable.tasks._gc_touched import Touched
from pidurable.tasks._gc_trees import CHANGED, Group, Tree, TreeWalk, read_awaited, tree_below
from pidurable.tasks._tree_transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.tasks._runtime import Runtime

T = TypeVar("T")

_STEPS_MIN, _STEPS_MAX = 64, 8_192
_RECORDS_MIN = 32
_PAGES_MIN, _PAGES_MAX = 16, 256


class Collector:
    """Collects in one session. One collection at a time; the next one waits."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._session = runtime.session
        self._raw = runtime.session.raw_storage
        self._rows = self._new_rows()
        self._turn = trio.Lock()
        self._touched = Touched(runtime.session)
        self._steps = Pace(least=_STEPS_MIN, most=_STEPS_MAX)
        self._records = Pace(least=_RECORDS_MIN, most=PASS_RECORDS_MAX)
        self._pages = Pace(least=_PAGES_MIN, most=_PAGES_MAX)
        self.take_in: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint
        """Set by the harness: applies what waits outside of the store. What has been handed in by
        now is looked at before bytes go that it may refer to, or answers that it may have had."""
        self.in_hand: Callable[[], Iterable[str]] = tuple
        """Set by the harness: the keys of what it has taken in that has no answer yet."""

    # --- what is called ------------------------------------------------------------------

    async def collect(self, older_than: timedelta, *, keep: bool, dry_run: bool) -> GcReport:
        """Remove what is old enough, or say what would be; see `Harness.gc`."""
        before = cutoff(self._session.clock.now_us(), older_than)
        before_us = to_us(before)
        async with self._turn:
            if dry_run:
                now_us = self._session.clock.now_us()
                survey = Survey(
                    self._raw,
                    now_us=now_us,
                    before_us=before_us,
                    keep=keep,
                    in_hand=self.in_hand(),
                )
                await self._drive(survey.steps(), lambda _: None)
                return make_report(survey.tally, dry_run=True, before=before, kept=survey.kept)
            # Where what waits cannot be looked at, nothing is begun. What has no room in the store
            # has to wait for what goes, and is taken in before anything goes that it may need.
            with contextlib.suppress(StorageRefusedError):
                await self.take_in()
            tally, kept = Tally(), dict[str, int]()
            self._rows = self._new_rows()
            with self._touched.followed():
                await self._barrier()
                await self._finish_marked(tally)
                # What ended before the cutoff has no other documents left from here on.
                await self._remove_retired(tally)
                await self._remove_trees(tally, kept, before_us=before_us, keep=keep)
                await self._remove_answers(tally, before_us=before_us)
                await self._sweep(tally)
            pages = await self._reclaim()
            return make_report(tally, dry_run=False, before=before, kept=kept, pages=pages)

    async def finish(self) -> None:
        """Go on with what an earlier process has marked, if anything. For the opening.

        What fails here is logged: the next collection, or opening, goes on with it.
        """
        if not self._session.removals.published:
            return
        tally = Tally()
        try:
            async with self._turn:
                self._rows = self._new_rows()
                with self._touched.followed():
                    await self._finish_marked(tally)
        except (SessionPoisonedError, SessionClosedError):
            # Whoever waits on the session is told by the session itself.
            return
        except PidurableError as error:
            logger.warning("the removal of trees that was begun earlier stopped: %s", error)
            return
        logger.info("finished the removal of %d trees that was begun earlier", tally.trees)

    def _new_rows(self) -> Rows:
        # In the loop: some clocks can be read nowhere else, and rows are made in a thread.
        now_us = self._session.clock.now_us()
        return Rows(self._raw, now_us=lambda: now_us)

    # --- the parts -----------------------------------------------------------------------

    async def _barrier(self) -> None:
        """Wait until all that was staged before this moment is stored or has failed."""
        await self._runtime.commit(lambda _: None)

    async def _remove_trees(
        self, tally: Tally, kept: dict[str, int], *, before_us: int, keep: bool
    ) -> None:
        awaited = self._touched.awaited

        def add(ids: Any) -> None:
            awaited.update(ids)

        await self._drive(read_awaited(self._raw), add)
        walk = TreeWalk(
            self._raw,
            before_us=before_us,
            upto=self._session.line.next_id - 1,
            awaited=awaited,
            keep=keep,
        )
        ready: list[tuple[Group, list[Piece]]] = []
        dropped = 0

        def read() -> Iterator[tuple[Group, list[Piece] | None] | None]:
            for group in walk.groups():
                if group is None:
                    yield None
                else:
                    yield from self._read_group(group, keep=keep)

        groups = read()
        more = True
        while more:
            if walk.is_between:
                self._touched.forget()
            found, more = await self._slice(groups)
            for group, pieces in found:
                if pieces is not None:
                    ready.append((group, pieces))
                    continue
                # What stands on it goes before it.
                dropped += await self._remove_small(ready, tally)
                dropped += await self._remove_large(group, tally, keep=keep)
            dropped += await self._remove_small(ready, tally)
        kept.update(walk.kept)
        if dropped:
            kept[CHANGED] = kept.get(CHANGED, 0) + dropped

    def _read_group(
        self, group: Group, *, keep: bool
    ) -> Iterator[tuple[Group, list[Piece] | None] | None]:
        """Read what goes of a group, if it fits one commit."""
        kept = {tree.root.id for tree in group.trees} if keep else frozenset[int]()
        pieces: list[Piece] = []
        size = 0
        for piece in self._rows.of_group(group, kept=kept, marked=False, swept=True):
            size += len(piece.writes)
            if size > PASS_RECORDS_MAX:
                yield group, None
                return
            pieces.append(piece)
            yield None
        yield group, pieces

    async def _remove_small(self, ready: list[tuple[Group, list[Piece]]], tally: Tally) -> int:
        """Remove groups that were read whole; return how many trees have changed since."""
        dropped = 0
        place = 0
        while place < len(ready):
            some: list[tuple[Group, list[Piece]]] = []
            size = 0
            while place < len(ready) and (not some or size < self._records.size):
                some.append(ready[place])
                size += sum(len(piece.writes) for piece in ready[place][1])
                place += 1

            def body(tx: TreeTransaction, some: Any = some) -> tuple[Tally, int]:
                going, stale = Tally(), 0
                tx.removal = Removal()
                for group, pieces in some:
                    if self._is_stale(group, tx.removal):
                        stale += len(group.trees)
                    else:
                        _stage(tx, pieces, going)
                return going, stale

            going, stale = await self._commit(body, size)
            tally.add(going)
            dropped += stale
        ready.clear()
        return dropped

    def _is_stale(self, group: Group, removal: Removal) -> bool:
        """On the line: whether something came to a group since it was read."""
        if any(self._touched.has_any_of(tree) for tree in group.trees):
            return True
        storage = self._session.storage
        return any(
            id not in removal.conversations and storage.conversation(id) is not None
            for id in group.forks
        )

    async def _remove_large(self, group: Group, tally: Tally, *, keep: bool) -> int:
        """Mark a group and remove it; return how many trees have changed since it was read."""
        roots = [tree.root.id for tree in group.trees]

        def mark(tx: TreeTransaction) -> bool:
            tx.removal = Removal()
            if self._is_stale(group, tx.removal):
                return False
            now = tx.now_us()
            for root in roots:
                tx.writes.append((Op.REMOVAL, RemovalRow(root, now)))
                if keep:
                    # The sign, also after a crash, that the root is to stay.
                    tally.bytes += stored_size(self._raw.task_input(root))
                    tx.writes.append((Op.INPUT_DELETE, (root,)))
            tx.removal.marked += roots
            return True

        if not await self._commit(mark, len(roots), flush=True):
            return len(roots)
        await self._remove_marked(group, set(roots) if keep else set(), tally, swept=True)
        return 0

    async def _finish_marked(self, tally: Tally) -> None:
        """Remove what is left of all marked trees, as one group: each may stand on another."""
        marked = sorted(self._session.removals.published)
        trees: list[Tree] = []
        kept: set[int] = set()
        empty: list[Piece] = []

        def read() -> Iterator[None]:
            for id in marked:
                root = self._raw.task(id)
                if root is None:
                    # Of a file from elsewhere: a tree goes with its mark.
                    empty.append(Piece([(Op.REMOVAL_DELETE, (id,))], "", 0, 0))
                    continue
                if self._raw.task_input(id) is None:
                    kept.add(id)
                for tree in tree_below(self._raw, root):
                    if tree is not None:
                        trees.append(tree)
                    yield None

        if marked:
            await self._drive(read(), lambda _: None)
            await self._remove_pieces(iter(empty), tally)
        if trees:
            await self._remove_marked(Group(trees, []), kept, tally, swept=False)

    async def _remove_marked(
        self, group: Group, kept: set[int], tally: Tally, *, swept: bool
    ) -> None:
        pieces = self._rows.of_group(group, kept=kept, marked=True, swept=swept)
        await self._remove_pieces(pieces, tally)

    async def _remove_retired(self, tally: Tally) -> None:
        """Remove retired documents, which nobody can read any more."""

        def read() -> Iterator[Piece | None]:
            for row in retired_documents(self._raw):
                if row is None:
                    yield None
                else:
                    yield from self._rows.of_document(row)

        await self._remove_pieces(read(), tally)

    async def _remove_pieces(self, pieces: Iterator[Piece | None], tally: Tally) -> None:
        """Remove what nobody can change any more, as much at a time as a commit may take."""
        more = True
        while more:
            found, more = await self._slice(pieces)
            place = 0
            while place < len(found):
                some: list[Piece] = []
                size = 0
                while place < len(found) and (not some or size < self._records.size):
                    some.append(found[place])
                    size += len(found[place].writes)
                    place += 1

                def body(tx: TreeTransaction, some: list[Piece] = some) -> Tally:
                    going = Tally()
                    tx.removal = Removal()
                    _stage(tx, some, going)
                    return going

                tally.add(await self._commit(body, size))

    async def _remove_answers(self, tally: Tally, *, before_us: int) -> None:
        # First what waits: it may have waited for longer than its answer would have been kept.
        await self.take_in()
        now_us = self._session.clock.now_us()
        last_us = answers_before_us(now_us, before_us, self.in_hand())
        old = old_answers(self._raw, before_us=last_us)
        await self._remove_pieces(old, tally)

    # --- blobs ---------------------------------------------------------------------------

    async def _sweep(self, tally: Tally) -> None:
        """Remove the blobs that no stored text refers to."""
        windows = blob_windows(self._raw)
        more = True
        while more:
            found, more = await self._slice(windows, most=1)
            for window in found:
                with self._touched.looking_for(window):
                    # What was staged before it is looked for is stored, and found by looking.
                    await self._barrier()
                    await self._drive(keep_referenced(self._raw, window), lambda _: None)
                    await self._remove_blobs(window, tally)

    async def _remove_blobs(self, window: dict[str, int], tally: Tally) -> None:
        names = sorted(window)
        while names:
            await self.take_in()
            some, names = names[: self._records.size], names[self._records.size :]

            def body(tx: TreeTransaction, some: list[str] = some) -> Tally:
                going = Tally()
                tx.removal = Removal()
                for name in some:
                    # Whoever put it lately, or wrote its name meanwhile, counts on it.
                    if name in window and name not in self._session.blobs_put:
                        tx.writes.append((Op.BLOB_DELETE, (name,)))
                        tx.removal.blobs.append(name)
                        going.blobs += 1
                        going.bytes += window[name]
                return going

            tally.add(await self._commit(body, len(some)))

    async def _reclaim(self) -> tuple[int, int]:
        """Give free pages back to the file system; return how many, and how many are left."""
        session = self._session
        freed = 0
        left = await session.worker.run(session.storage.reclaim, 0)
        while left:
            started, pages = trio.current_time(), self._pages.size
            now = await session.writer.run_locking(session.storage.reclaim, pages)
            await self._rest(self._pages, pages, trio.current_time() - started)
            if now >= left:
                # A store that cannot give any back, or others use them faster.
                break
            freed += left - now
            left = now
        return freed, left

    # --- slices, commits and pauses ------------------------------------------------------

    async def _drive(self, steps: Iterator[T | None], take: Callable[[T], None]) -> None:
        """Take all that a walk gives, slice by slice."""
        more = True
        while more:
            found, more = await self._slice(steps)
            for each in found:
                take(each)

    async def _slice(
        self, steps: Iterator[T | None], *, most: int = PASS_RECORDS_MAX
    ) -> tuple[list[T], bool]:
        """Walk some steps in a thread; return what they gave, and whether there are more."""
        count = self._steps.size

        def walk() -> tuple[list[T], bool]:
            found: list[T] = []
            for _ in range(count):
                try:
                    given = next(steps)
                except StopIteration:
                    return found, False
                if given is not None:
                    found.append(given)
                    if len(found) >= most:
                        break
            return found, True

        started = trio.current_time()
        # Not to be left: a walk that is in the middle of a step could not be gone on with.
        answer = await self._session.blocking.run(walk)
        await self._rest(self._steps, count, trio.current_time() - started)
        return answer

    async def _commit(
        self, body: Callable[[TreeTransaction], T], size: int, *, flush: bool = False
    ) -> T:
        """Store one commit, and pause."""
        started = trio.current_time()

        def timed(tx: TreeTransaction) -> T:
            # Its turn in the line has come: what it waited for was not its own.
            nonlocal started
            started = trio.current_time()
            return body(tx)

        found = await self._runtime.commit(timed, flush=flush)
        await self._rest(self._records, size, trio.current_time() - started)
        return found

    async def _rest(self, pace: Pace, done: int, seconds: float) -> None:
        """Leave everything to others for a while, if there are any."""
        pause = pace.took(done, seconds, busy=self._touched.others())
        if pause:
            await trio.sleep(pause)
        else:
            await trio.lowlevel.checkpoint()


def _stage(tx: TreeTransaction, pieces: list[Piece], going: Tally) -> None:
    assert tx.removal is not None
    for piece in pieces:
        tx.writes += piece.writes
        piece.note(going, tx.removal)
        for op, row in piece.writes:
            if op is Op.REMOVAL_DELETE:
                tx.removal.finished.append(row[0])
