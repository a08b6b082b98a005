"""Submissions: something handed to a conversation that can be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import attrs
import trio

from pidurable.agent._inbox import withdraw
from pidurable.errors import UnansweredError, WaitTimeoutError
from pidurable.records._checks import check_timeout
from pidurable.records._codec import Codec
from pidurable.records._entries import Entry, kept_messages
from pidurable.records._messages import AssistantMessage
from pidurable.records._submissions import SubmissionRecord, SubmissionStatus
from pidurable.session._rows import stored_entry
from pidurable.session._stubs import unknown_submission
from pidurable.storage import Storage, SubmissionRow

if TYPE_CHECKING:
    from pidurable.harness._open import Harness


@final
@attrs.frozen(kw_only=True)
class Settled:
    """How a submission ended."""

    id: int
    status: SubmissionStatus
    reason: str | None
    """For an unanswered one: one of the stable codes."""
    detail: str | None
    entry: int | None
    """The entry that holds the input, if it was placed."""
    answer: int | None
    """The entry that holds the answer."""
    run: int | None
    _text: str = attrs.field(alias="answer_text", repr=False)

    @property
    def text(self) -> str:
        """The text of the answer.

        Raises:
            UnansweredError: There is none; `reason` and `detail` say why. So no failure is taken
                for an answer.
        """
        if self.status != "done":
            raise UnansweredError(self.id, self.reason or self.status, self.detail or "")
        return self._text


@final
class Submission:
    """A handle of one submission. It is durable: another process can wait for it by its id."""

    __slots__ = ("_harness", "id")

    def __init__(self, harness: Harness, id: int) -> None:
        self._harness = harness
        self.id = id

    def __repr__(self) -> str:
        return f"Submission({self.id})"

    async def status(self) -> SubmissionRecord:
        """The record as committed."""
        await trio.lowlevel.checkpoint()
        self._harness.check_serving()
        return self._record()

    def _record(self) -> SubmissionRecord:
        record = self._harness.session.submission(self.id)
        if record is None:
            raise unknown_submission(self._harness.session.storage, self.id)
        return record

    def _row(self) -> SubmissionRow:
        """As stored: who waits for the end needs nothing of what was handed in."""
        row = self._harness.session.submission_row(self.id)
        if row is None:
            raise unknown_submission(self._harness.session.storage, self.id)
        return row

    async def withdraw(self) -> SubmissionRecord | None:
        """Take it back while it is still queued, so that it never reaches the model.

        Returns:
            Its record with the content, `unanswered` (`withdrawn`), also when this was asked
            before; None if it was too late: it is placed, or has ended, as `status` says, and
            nothing was changed.
        """
        self._harness.check_serving()
        record = await self._harness._runtime.commit(lambda tx: withdraw(tx, self.id))
        return record if record.reason == "withdrawn" else None

    async def wait(self, *, timeout: float | None = None) -> Settled:  # noqa: ASYNC109
        """Wait until it is answered, or will not be. Leaving the wait changes nothing durable.

        Args:
            timeout: Most seconds to wait; None waits for ever, 0 only looks.

        Raises:
            WaitTimeoutError: The time ran out; waiting again is fine.
            InvalidArgumentError: The timeout is negative, or no number.
            WaitCycleError: The code of a task waits, without a timeout, for an answer that needs
                the end of that task.
            SessionClosedError: The harness was closed meanwhile; open it and wait again.
            SessionPoisonedError: The storage failed meanwhile; reopen it and wait again.
        """
        harness, most = self._harness, check_timeout(timeout)
        harness.check_serving()
        harness.start()
        held = harness._runtime.waits.holding(
            self.id, others=(self.id,), bounded=timeout is not None
        )
        with held:
            if timeout is None:
                return await self._settled()
            with trio.move_on_after(most):
                return await self._settled()
        raise WaitTimeoutError(f"the answer to submission {self.id}", timeout)

    async def _settled(self) -> Settled:
        harness, session = self._harness, self._harness.session
        waited = False
        while True:
            # Looked at before anything can cancel: with a timeout of 0 too.
            row = self._row()
            if row.status in ("done", "unanswered"):
                answer = None
                if row.answer is not None:
                    answer = session.kept_entry(row.conversation, row.answer)
                settled = settled_of(row, session.storage, session.codec, answer=answer)
                if not waited:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                return settled
            await harness.submission_changed(self.id)
            waited = True
            harness.check_serving()


def settled_of(
    record: SubmissionRecord | SubmissionRow,
    storage: Storage,
    codec: Codec,
    *,
    answer: Entry | None = None,
) -> Settled:
    """How a submission that has ended did so, with the text of its answer.

    Args:
        record: The submission, or the row of one.
        storage: Has the answer.
        codec: Reads it.
        answer: The entry that holds it, where it is at hand.
    """
    text = ""
    if answer is None and record.answer is not None:
        row = storage.entry(record.answer)
        answer = None if row is None else stored_entry(row, codec, storage)
    if answer is not None:
        for message in kept_messages(answer):
            if isinstance(message, AssistantMessage):
                text = message.text
    return Settled(
        id=record.id,
        status=record.status,  # type: ignore[arg-type]
        reason=record.reason,
        detail=record.detail,
        entry=record.entry,
        answer=record.answer,
        run=record.run,
        answer_text=text,
    )
