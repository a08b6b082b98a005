"""Bodies that run as an `async with` block, and the watch over those that take long.

Such a body may await cold reads, so it holds the line across turns of the loop. It is reported
once when it takes more than `body_report_seconds`, with its place in the code; cancelled after
`body_seconds_max`; and reported again every `STOP_REPORT_SECONDS` if it shields itself.
"""

from __future__ import annotations

import contextvars
import os
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from pidurable.errors import CommitBodyTimeoutError
from pidurable.records._limits import STOP_REPORT_SECONDS
from pidurable.session._batch import Draft, Member, body_of_task
from pidurable.session._seams import logger

if TYPE_CHECKING:
    from pidurable.session._line import CommitLine

TxT = TypeVar("TxT", bound=Draft)

_TRIO_FOLDER = os.path.dirname(trio.__file__)


class AsyncBody(Generic[TxT]):
    """`async with AsyncBody(line, draft) as tx`: takes the line, runs the block, ends the commit.

    Cancelled while it waits for the line or inside the block, the commit is not stored. Once the
    block has ended the commit is awaited under a shield.
    """

    __slots__ = ("_line", "_member", "_place", "_scope", "_token", "draft", "reported_at", "since")

    def __init__(self, line: CommitLine, draft: TxT, *, place: str = "") -> None:
        self.draft = draft
        self.since = 0.0
        """trio time at which the block began."""
        self.reported_at: float | None = None
        """trio time of the last report."""
        self._line = line
        self._place = place
        self._member: Member | None = None
        self._scope: trio.CancelScope | None = None
        self._token: contextvars.Token[Draft | None] | None = None

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> TxT:
        line = self._line
        line.check_not_nested()
        self._member = Member(trio.lowlevel.current_task(), self.draft, None)
        await line.take(self._member)
        self._token = body_of_task.set(self.draft)
        self.since = trio.current_time()
        line.async_body = self
        line.on_async_body()
        self._scope = trio.CancelScope(deadline=self.since + line.settings.body_seconds_max)
        self._scope.__enter__()
        return self.draft

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        assert self._scope is not None
        try:
            timed_out = self._scope.__exit__(kind, error, trace)
        except BaseException:  # what is left of a group that held the cancellation
            await self._end(sealed=False)  # noqa: ASYNC102 - the wait is shielded in _end
            raise
        if error is not None:
            await self._end(sealed=False)  # noqa: ASYNC102 - the wait is shielded in _end
            if timed_out:
                seconds = self._line.settings.body_seconds_max
                raise CommitBodyTimeoutError(seconds, self._place) from None
            return False
        try:
            await self.draft.prepare()  # noqa: ASYNC102 - part of the body, and cancelled like it
            self.draft.seal()
        except BaseException:
            await self._end(sealed=False)  # noqa: ASYNC102 - the wait is shielded in _end
            raise
        await self._end(sealed=True)  # noqa: ASYNC102 - the wait is shielded in _end
        return False

    async def _end(self, *, sealed: bool) -> None:
        """Leave the line and wait for the batch, whose error is raised if it failed."""
        line, member = self._line, self._member
        assert member is not None
        assert self._token is not None
        body_of_task.reset(self._token)
        if not sealed:
            self.draft.discard()
        line.async_body = None
        seconds = trio.current_time() - self.since
        if seconds > line.settings.body_report_seconds and self.reported_at is None:
            logger.warning("a commit body took %.2f s (%s)", seconds, self._place)
        # Its time was mostly waiting: that the batch closes after it is right all the same.
        waits = line.end(member, self.draft if sealed else None, seconds)
        if waits:
            line.free()
            await line.wait_for_batch(member)
            return
        line.free()
        await trio.lowlevel.cancel_shielded_checkpoint()
        if member.error is not None:
            raise member.error

    def where(self) -> str:
        """The place in the code where the body is at this moment."""
        assert self._member is not None
        place = self._place or "?"
        for frame, line_number in self._member.task.iter_await_frames():
            code = frame.f_code
            if code.co_filename.startswith(_TRIO_FOLDER):
                break
            place = f"{code.co_filename}:{line_number} in {code.co_qualname}"
        return place


@trio.lowlevel.enable_ki_protection
async def watch_bodies(line: CommitLine) -> None:
    """Report `async with` bodies that hold the line for long, until cancelled.

    It sleeps for ever while there are none, so that a virtual clock has nothing to wake for.
    """
    wake = trio.Event()
    began = False

    def body_began() -> None:
        nonlocal began
        if not began:
            began = True
            wake.set()

    line.on_async_body = body_began
    while True:
        await wake.wait()
        wake = trio.Event()
        while began:
            began = False
            await trio.sleep(line.settings.body_report_seconds)
            body: AsyncBody[Draft] | None = line.async_body
            if body is None:
                continue
            began = True
            now = trio.current_time()
            held = now - body.since
            if body.reported_at is None:
                due = held >= line.settings.body_report_seconds
            else:
                due = now - body.reported_at >= STOP_REPORT_SECONDS
            if due:
                body.reported_at = now
                logger.warning(
                    "a commit body has held the line for %.2f s (%s)", held, body.where()
                )
