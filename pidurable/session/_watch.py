"""Watches: the value of one thing, and then one frame for each commit that changes it.

A hub stands for one watched thing. It is made with the first watcher and dropped with the last, so
what nobody watches costs a commit one look into a dict. Whoever publishes gives the hub the new
value, which shares what did not change with the one before, and a way to make the patch; the patch
is made when somebody first asks for it. Holds at all times:

* one frame object per commit and hub, whoever takes it;
* a watcher holds at most `WATCH_FRAMES_MAX` undelivered frames, which have brought at most
  `WATCH_BYTES_MAX` together (a single one may have more). The next one replaces them all by
  nothing: the watcher has fallen behind, costs the commits that follow nothing at all, and is given
  the newest whole value when it comes for it. All who fall behind share that frame too;
* the first value and all patches, in order, give the last value;
* what a watcher was given the right to before the end (a retirement, the end of the session) is
  still delivered; then the iteration stops, or raises what ended it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import trio

from pidurable.errors import InvalidArgumentError, PidurableError, check
from pidurable.records._limits import WATCH_BYTES_MAX, WATCH_FRAMES_MAX
from pidurable.records._patch import PatchOp
from pidurable.session._batch import again

if TYPE_CHECKING:
    from pidurable.session._document_watch import DocumentView

V = TypeVar("V")
DocT = TypeVar("DocT")


@final
class Frame(Generic[V]):
    """The state of a watched thing after one commit. Shared by all who watch it; never changes."""

    __slots__ = ("_made", "_make_patch", "_seq", "_to_json", "_value", "_whole", "bytes_brought")

    def __init__(
        self,
        seq: int,
        value: V,
        *,
        whole: bool,
        to_json: Callable[[V], Any],
        make_patch: Callable[[], list[PatchOp]] | None = None,
        bytes_brought: int = 0,
    ) -> None:
        self.bytes_brought = bytes_brought
        """What the commit has added to what the frames before it share, about."""
        self._seq = seq
        self._value = value
        self._whole = whole
        self._to_json = to_json
        self._make_patch = make_patch
        self._made: list[PatchOp] | None = None

    @property
    def seq(self) -> int:
        """The number of the commit."""
        return self._seq

    @property
    def value(self) -> V:
        """The value after it. None once a document is retired."""
        return self._value

    @property
    def whole(self) -> bool:
        """Whether frames were left out before this one, because the consumer had fallen behind."""
        return self._whole

    def __repr__(self) -> str:
        return f"<Frame {self.seq}{' whole' if self.whole else ''}>"

    @property
    def patch(self) -> list[PatchOp]:
        """JSON Patch operations (RFC 6902 and `append`) from the value before to this one.

        Made when it is first asked for, copied out of what is stored, and kept for everybody who
        watches: send it, and do not change it. A `whole` frame has one operation, which replaces
        everything.

        Raises:
            MigrationError: An older class has written the document, and `migrate` could not read
                it; so does `json()`.
            StorageCorruptError: A large part of an entry lies apart, and is missing or damaged.
        """
        if self._made is None:
            make = self._make_patch
            if make is None:
                self._made = [{"op": "replace", "path": "", "value": self._to_json(self.value)}]
            else:
                self._made = make()
                # It holds the value before, which nobody needs any more.
                self._make_patch = None
        return self._made

    def json(self) -> Any:
        """Return the value as plain JSON, a copy of your own. Costs its size."""
        return self._to_json(self.value)

    def read(self: Frame[DocumentView[DocT] | None]) -> DocT | None:
        """Decode the value of a document into its class; None where there is none.

        Raises:
            NotJsonError: What is stored does not fit the class; the path says where.
            MigrationError: `migrate` could not read what is stored.
        """
        return None if self.value is None else self.value.read()


@final
class Watch(Generic[V]):
    """The value of one thing, and an iterator of what becomes of it. For one task at a time.

    `value` and `seq` are those of the frame that was taken last, or of the moment at which the
    watch began. A consumer that falls behind by more than 100 frames, or by frames that have
    brought more than 16 MiB, gets one frame with the newest value, marked `whole`, instead of them.
    It never slows a commit.

    The iteration stops after a retirement (whose frame has the value None), when the harness
    closes, and when the watch's own block is left. It may be left and taken up again: it goes on
    where it stood.
    """

    __slots__ = (
        "_asleep",
        "_behind",
        "_bytes",
        "_ended",
        "_error",
        "_frames",
        "_hub",
        "_taken",
        "seq",
        "value",
    )

    value: V
    """The newest value that this watch has delivered."""
    seq: int
    """The number of a commit after which it stood."""

    def __init__(self, hub: Hub[V], seq: int) -> None:
        self._hub = hub
        self.value = hub.value
        self.seq = seq
        self._frames: deque[Frame[V]] = deque()
        self._bytes = 0
        """What the undelivered frames have brought."""
        self._behind = False
        self._ended = False
        self._error: PidurableError | None = None
        self._asleep: trio.lowlevel.Task | None = None
        self._taken = False

    def __repr__(self) -> str:
        return f"<Watch at {self.seq}>"

    def json(self) -> Any:
        """Return the value as plain JSON, a copy of your own. Costs its size."""
        return self._hub.to_json(self.value)

    def read(self: Watch[DocumentView[DocT] | None]) -> DocT | None:
        """Decode the value of a document into its class; None where there is none.

        Raises:
            NotJsonError: What is stored does not fit the class; the path says where.
            MigrationError: `migrate` could not read what is stored.
        """
        return None if self.value is None else self.value.read()

    def __aiter__(self) -> Watch[V]:
        return self

    async def __anext__(self) -> Frame[V]:
        """Wait for the next frame.

        Raises:
            SessionPoisonedError: The session failed; reopen it and watch again.
            DocumentTooNewError: A newer version of the class has written the document.
            InvalidArgumentError: Another task waits for a frame of this watch; open one for each.
        """
        if self._taken:
            raise InvalidArgumentError(
                "watch",
                "is being iterated by another task; open a watch for each, they share their frames",
            )
        self._taken = True
        try:
            # Before a frame is taken, so that a cancellation here loses none.
            await trio.lowlevel.checkpoint()
            while True:
                frame = self._take_nowait()
                if frame is not None:
                    self.value, self.seq = frame.value, frame.seq
                    return frame
                if self._error is not None:
                    raise again(self._error)
                if self._ended:
                    raise StopAsyncIteration
                await self._sleep()
        finally:
            self._taken = False

    def _take_nowait(self) -> Frame[V] | None:
        if self._behind:
            self._behind = False
            return self._hub.caught_up(self)
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._bytes -= frame.bytes_brought
        return frame

    async def _sleep(self) -> None:
        self._asleep = trio.lowlevel.current_task()

        def abort(_: Any) -> trio.lowlevel.Abort:
            self._asleep = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        if self._asleep is not None:
            task, self._asleep = self._asleep, None
            trio.lowlevel.reschedule(task)

    # --- called by the hub ---------------------------------------------------------------

    def _push(self, frame: Frame[V]) -> bool:
        """Keep a frame until it is taken; False if that would be one too many."""
        held = self._bytes + frame.bytes_brought
        if len(self._frames) >= WATCH_FRAMES_MAX or (self._frames and held > WATCH_BYTES_MAX):
            self._frames.clear()
            self._bytes = 0
            self._behind = True
            return False
        self._frames.append(frame)
        self._bytes = held
        self._wake()
        return True

    def _end(self, error: PidurableError | None) -> None:
        """Let the iteration stop, or raise, after what is still to be delivered."""
        if not self._ended:
            self._ended, self._error = True, error
        self._wake()

    def _leave(self) -> None:
        """The block of the watch is left: deliver nothing more."""
        self._frames.clear()
        self._bytes = 0
        self._behind = False
        self._hub.drop(self)
        self._end(None)


@final
class Hub(Generic[V]):
    """One watched thing: its newest value, and who watches it."""

    __slots__ = ("_active", "_make", "_on_empty", "_value", "_watching", "_whole", "seq", "to_json")

    def __init__(
        self,
        value: V,
        *,
        seq: int,
        to_json: Callable[[V], Any],
        on_empty: Callable[[Hub[V]], None],
    ) -> None:
        """Stand for something whose value is known as of a published commit.

        Args:
            value: Immutable, as every later one.
            seq: The number of a commit after which it stood.
            to_json: Gives a plain copy of a value.
            on_empty: Called with the hub when its last watcher has left, to forget it.
        """
        self._value = value
        self._make: Callable[[], tuple[int, V]] | None = None
        """Gives `seq` and `value`, where nobody has asked for them since they changed."""
        self.seq = seq
        self.to_json = to_json
        self._on_empty = on_empty
        self._watching: dict[Watch[V], None] = {}
        self._active: dict[Watch[V], None] = {}
        """Who gets the next frame: all but those who have fallen behind."""
        self._whole: Frame[V] | None = None
        """The whole frame of the newest value, for everybody who has fallen behind."""

    @property
    def value(self) -> V:
        """The newest value."""
        make = self._make
        if make is not None:
            (self.seq, self._value), self._make = make(), None
        return self._value

    @property
    def postponed(self) -> bool:
        """Whether the newest value is made when somebody comes for it."""
        return self._make is not None

    @property
    def size(self) -> int:
        """How many watch."""
        return len(self._watching)

    @property
    def active(self) -> bool:
        """Whether anybody gets the next frame. Where nobody does, `postpone` is enough."""
        return bool(self._active)

    def postpone(self, make: Callable[[], tuple[int, V]]) -> None:
        """Let the newest value be made when somebody comes for it. Nobody takes frames now.

        Until then nothing has to be told of further changes.

        Args:
            make: Gives the newest value, and the number of its commit, when it is called.
        """
        check(not self._active, "a value that somebody waits for was postponed")
        self._make, self._whole = make, None

    def join(self, seq: int) -> Watch[V]:
        """Begin to watch, with everything that is published after commit `seq`."""
        watch = Watch(self, seq)
        self._watching[watch] = self._active[watch] = None
        return watch

    def drop(self, watch: Watch[V]) -> None:
        """A watcher leaves. It may say so twice."""
        self._active.pop(watch, None)
        if self._watching.pop(watch, watch) is None and not self._watching:
            self._on_empty(self)

    def publish(
        self,
        seq: int,
        value: V,
        make_patch: Callable[[], list[PatchOp]] | None,
        *,
        bytes_brought: int = 0,
    ) -> None:
        """Give a new value to all who watch. Called when its commit is durable; never waits.

        Args:
            seq: The number of the commit.
            value: What it made; immutable.
            make_patch: Makes the operations that lead from the value before to this one, in
                structures of their own; called at most once, later. None replaces everything.
            bytes_brought: What is new in the value, about.
        """
        self._value, self._make, self.seq, self._whole = value, None, seq, None
        if not self._active:
            return
        frame = Frame(
            seq,
            value,
            whole=False,
            to_json=self.to_json,
            make_patch=make_patch,
            bytes_brought=bytes_brought,
        )
        behind = [watch for watch in self._active if not watch._push(frame)]
        for watch in behind:
            del self._active[watch]

    def caught_up(self, watch: Watch[V]) -> Frame[V]:
        """A watcher that had fallen behind takes the newest value, and frames from here on."""
        self._active[watch] = None
        value = self.value
        if self._whole is None:
            self._whole = Frame(self.seq, value, whole=True, to_json=self.to_json)
        return self._whole

    def end(self, error: PidurableError | None = None) -> None:
        """Stop every iteration after what is still to be delivered, or let it raise `error`."""
        for watch in self._watching:
            watch._end(error)
