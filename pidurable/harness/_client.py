"""The client: handing in commands to whoever holds a session, and reading their answers.

It holds nothing and locks nothing. A command is left in the box beside the store, durable before
anybody is told so; the holder applies it once by its key and stores the answer, which is read from
the store here. So a client that is stopped or killed at any point blocks nobody, and what it had
handed in is done all the same. Without a live holder a command waits for the next one.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast, final

from pidurable.agent._decisions import Decision, check_decision, encode_decision
from pidurable.agent._grants import Grant
from pidurable.agent._inbox import Content, blocks_of
from pidurable.agent._permissions import PermissionRequest, request_of
from pidurable.errors import (
    NotFoundError,
    WaitTimeoutError,
    show,
)
from pidurable.harness._command_asking import CommandAsking, looked_for
from pidurable.harness._command_kinds import read_report
from pidurable.harness._reader import open_read_only
from pidurable.harness._submission import Settled, settled_of
from pidurable.records import _codec
from pidurable.records._checks import check_name
from pidurable.records._codec import Codec
from pidurable.records._entries import Edit
from pidurable.records._messages import Message, UserMessage
from pidurable.records._submissions import SubmissionRecord, WhenBusy
from pidurable.records._tasks import OutcomeStatus
from pidurable.session._seams import Blocking, Clock, SystemClock, ThreadBlocking
from pidurable.tasks._gc_report import GcReport, cutoff

__all__ = ["Client", "open_client"]

T = TypeVar("T")


@asynccontextmanager
async def open_client(
    store: str | os.PathLike[str], *, blocking: Blocking | None = None, clock: Clock | None = None
) -> AsyncIterator[Client]:
    """Open a store to hand in commands, beside the process that holds it.

    Every command has a key and counts once under it, however often it is handed in and whatever
    dies meanwhile. Works also while nobody holds the store; then commands wait for the next holder.

    Args:
        store: The path of the store.
        blocking: Where reads and files are worked on; threads where None.
        clock: Tells the moment of handing in and the age of the last heartbeat.

    Raises:
        StorageAccessError: There is no such store, or this user may not read it.
        NotAStoreError: The path holds something else.
        StorageCorruptError: It is damaged.
        StorageTooNewError: A newer version wrote it.
    """
    blocking = blocking or ThreadBlocking()
    async with open_read_only(store, blocking) as storage:
        yield Client(storage, blocking=blocking, clock=clock or SystemClock())


@final
class Client(CommandAsking):
    """Hands in commands to a session that another process holds. Made by `open_client`.

    Every method waits for the answer and gives back what the call of a harness of the same name
    gives, or raises the error that the holder met. What they have in common:

    Args:
        key: The command's own name, 1 to 512 characters; drawn where None. The same key again,
            from any process, is never applied twice and gives the first answer, which is kept for a
            week at least, and then until a collection (`gc`) removes what is so old.
        timeout: Most seconds to wait for the answer; None waits for ever, 0 only looks once.

    Raises:
        WaitTimeoutError: Not seen yet, or not answered; the command waits. Its `key` waits again
            under the same call, or takes the command back: `withdraw`.
        RequestIdConflictError: The key was used for something else.
        InvalidArgumentError: The timeout is negative, or no number; nothing was handed in.
        StorageRefusedError: Certainly not handed in (a full disk, 10,000 commands that wait), or
            withdrawn by somebody meanwhile.
        StorageAccessError: The folder of commands cannot be used; the message says why.
        AnswerGoneError: The key was used so long ago that its answer is not kept any more.
        CommandFailedError: The holder met an error that has no class here.
    """

    # --- what can be asked for -----------------------------------------------------------

    async def submit(
        self,
        content: Content,
        *,
        conversation: int | None = None,
        when_busy: WhenBusy = "follow_up",
        request_id: str | None = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> int:
        """Hand in an input and return the id of its submission; `wait_for_submission` follows it.

        Args:
            content: Text, or text and image blocks whose bytes the store has.
            conversation: Where to; None for the root, which is made at first use.
            when_busy: While a run is active: queue it for the end of the run, `steer` it into the
                run after the next tool round, or `reject` it.
            request_id: The sender's own id of this input: sent twice, it is stored once.
            key, timeout: As for every command.

        Raises:
            ConversationBusyError, ConversationFullError, NotFoundError: As `Conversation.submit`.
        """
        message = UserMessage(blocks=blocks_of(content), at_us=0)
        (encoded,) = cast("list[dict[str, Any]]", _codec.encode_messages([message]))
        asked = {
            "conversation": conversation,
            "blocks": encoded["blocks"],
            "when_busy": when_busy,
            "request_id": request_id,
        }
        return cast("int", await self._ask("submit", asked, key, timeout))

    async def write(
        self,
        value: Any = None,
        *,
        kind: str | None = None,
        messages: Sequence[Message] = (),
        head: int | None = None,
        edits: Sequence[Edit] = (),
        conversation: int | None = None,
        request_id: str | None = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> int:
        """Hand in an entry that asks the model nothing and return its submission. Starts nothing.

        Args:
            value: Any JSON.
            kind, messages, head, edits: As for `Conversation.write`.
            conversation: Where to; None for the root, which is made at first use.
            request_id: The sender's own id of this write: sent twice, it is stored once.
            key, timeout: As for every command.

        Raises:
            ConversationFullError, NotFoundError, NotJsonError: As `Conversation.write`.
        """
        asked = {
            "conversation": conversation,
            "value": value,
            "kind": kind,
            "messages": _codec.encode_messages(tuple(messages)),
            "head": head,
            "edits": _codec.encode_edits(tuple(edits)),
            "request_id": request_id,
        }
        return cast("int", await self._ask("write", asked, key, timeout))

    async def withdraw_submission(
        self,
        submission_id: int,
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> SubmissionRecord | None:
        """Take back what is still queued in a conversation; see `Submission.withdraw`.

        Returns:
            Its record with the content; None if it was too late, and nothing was changed.

        Raises:
            NotFoundError: This session has no such submission.
        """
        answer = await self._ask("withdraw", {"submission": submission_id}, key, timeout)
        return None if answer is None else SubmissionRecord(**answer)

    async def continue_run(
        self,
        conversation_id: int,
        *,
        request_id: str | None = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> int:
        """Continue a run that failed, was aborted or was cut; returns its submission.

        Args:
            conversation_id: Which conversation.
            request_id: As for `Conversation.continue_run`; the key of the command where None.
            key, timeout: As for every command.

        Raises:
            ConversationBusyError, NothingToContinueError: As `Conversation.continue_run`.
            NotFoundError: This session has no such conversation.
        """
        key = self._draw_key() if key is None else key
        asked = {
            "conversation": conversation_id,
            "request_id": key if request_id is None else request_id,
        }
        return cast("int", await self._ask("continue", asked, key, timeout))

    async def compact(
        self,
        conversation_id: int,
        instructions: str | None = None,
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> int:
        """Begin to replace the older part of a conversation by a summary; returns the task.

        Raises:
            InvalidArgumentError, NotFoundError: As `Conversation.compact`.
        """
        asked = {"conversation": conversation_id, "instructions": instructions}
        return cast("int", await self._ask("compact", asked, key, timeout))

    async def abort_conversation(
        self,
        conversation_id: int,
        reason: str = "user",
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[SubmissionRecord]:
        """Abort what runs in a conversation; returns what was queued and taken back.

        Raises:
            InvalidArgumentError, NotFoundError: As `Conversation.abort`.
        """
        asked = {"conversation": conversation_id, "reason": reason}
        answer = await self._ask("abort_conversation", asked, key, timeout)
        return [SubmissionRecord(**each) for each in answer]

    async def signal(
        self,
        task_id: int,
        name: str,
        payload: Any = None,
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Send a live task a signal. Starts nothing.

        The key counts among the keys of the task's signals too, as that of `Harness.signal`.

        Raises:
            UnknownTaskError, TaskEndedError, SignalRefusedError: As `Harness.signal`.
            NotJsonError: The payload is not strict JSON.
        """
        await self.signal_tasks([task_id], name, payload, signal_key=key, key=key, timeout=timeout)

    async def signal_tasks(
        self,
        task_ids: list[int],
        name: str,
        payload: Any = None,
        *,
        signal_key: str | None = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Send one signal to each of some live tasks, to all or to none of them.

        Args:
            task_ids: The tasks.
            name: What kind of message it is.
            payload: Strict JSON, at most 256 KiB encoded.
            signal_key: A task that has had a signal under this key gets none.
            key, timeout: As for every command.

        Raises:
            UnknownTaskError, TaskEndedError, SignalRefusedError: As `Harness.signal`.
            NotJsonError: The payload is not strict JSON.
        """
        asked = {
            "tasks": list(task_ids),
            "name": name,
            "payload": payload,
            "signal_key": signal_key,
        }
        await self._ask("signal", asked, key, timeout)

    async def abort_task(
        self,
        task_id: int,
        reason: str = "user",
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> OutcomeStatus | None:
        """Ask for the abort of a task with all below it; its end comes later.

        Returns:
            The outcome's status if the task had ended already, and nothing was changed.

        Raises:
            UnknownTaskError: This session has no such task.
        """
        (status,) = await self.abort_tasks([task_id], reason, key=key, timeout=timeout)
        return status

    async def abort_tasks(
        self,
        task_ids: list[int],
        reason: str = "user",
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[OutcomeStatus | None]:
        """Ask for the abort of some tasks, in one commit; returns how each had ended already.

        Raises:
            UnknownTaskError: This session has no such task; then none is aborted.
        """
        asked = {"tasks": list(task_ids), "reason": reason}
        return cast("list[OutcomeStatus | None]", await self._ask("abort", asked, key, timeout))

    async def retry_task(
        self,
        task_id: int,
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> bool:
        """Let a blocked task be looked at again; returns whether it was blocked.

        Raises:
            UnknownTaskError, InvalidArgumentError: As `Harness.retry_task`.
        """
        (lifted,) = await self.retry_tasks([task_id], key=key, timeout=timeout)
        return lifted

    async def retry_tasks(
        self,
        task_ids: list[int],
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[bool]:
        """Let blocked tasks be looked at again, in one commit; returns which were blocked.

        Raises:
            UnknownTaskError, InvalidArgumentError: As `Harness.retry_task`; then none was.
        """
        asked = {"tasks": list(task_ids)}
        return cast("list[bool]", await self._ask("retry", asked, key, timeout))

    async def resume_task(
        self,
        task_id: int,
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> bool:
        """Let a task go on that a restart interrupted; returns whether it was interrupted.

        Raises:
            UnknownTaskError, InvalidArgumentError: As `Harness.resume_task`.
        """
        (lifted,) = await self.resume_tasks([task_id], key=key, timeout=timeout)
        return lifted

    async def resume_tasks(
        self,
        task_ids: list[int],
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[bool]:
        """Let interrupted tasks go on, in one commit; returns which were interrupted.

        Raises:
            UnknownTaskError, InvalidArgumentError: As `Harness.resume_task`; then none was.
        """
        asked = {"tasks": list(task_ids)}
        return cast("list[bool]", await self._ask("resume", asked, key, timeout))

    async def decide(
        self,
        request_id: int,
        decision: Decision,
        *,
        by: str | None = None,
        principal: str | None = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> PermissionRequest:
        """Decide a permission request; returns it as it is decided. Starts nothing.

        Args:
            request_id, decision, by, principal: As for `Harness.decide`.
            key, timeout: As for every command.

        Raises:
            AlreadyDecidedError, InvalidArgumentError, NotFoundError: As `Harness.decide`.
        """
        asked = {
            "permission": request_id,
            "decision": encode_decision(check_decision(decision)),
            "by": by,
            "principal": principal,
        }
        return request_of(await self._ask("decide", asked, key, timeout))

    async def revoke(
        self,
        grant_id: int,
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Grant:
        """Take a grant back; returns it as it was.

        Raises:
            NotFoundError: There is no such grant, or it was revoked before.
        """
        return Grant(**await self._ask("revoke", {"grant": grant_id}, key, timeout))

    async def fork(
        self,
        conversation_id: int,
        at: int | None = None,
        *,
        fork_key: str | None = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> int:
        """Fork a conversation at an entry of its history and return the new one's id.

        Args:
            conversation_id: The parent.
            at: An entry of its history; the newest where None.
            fork_key: As the key of `Conversation.fork`: a second fork under it is the first one.
            key, timeout: As for every command.

        Raises:
            NotFoundError, InvalidArgumentError: As `Conversation.fork`.
        """
        asked = {"conversation": conversation_id, "at": at, "fork_key": fork_key}
        return cast("int", await self._ask("fork", asked, key, timeout))

    async def gc(
        self,
        *,
        older_than: timedelta,
        keep_outcomes: bool = False,
        dry_run: bool = False,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> GcReport:
        """Have ended trees of tasks removed; the answer comes when that is done.

        Args:
            older_than: How long ago the last task of a tree must have ended.
            keep_outcomes: The roots stay with their outcomes.
            dry_run: Only tell what would go.
            key, timeout: As for every command.

        Raises:
            InvalidArgumentError: `older_than` is negative, or no timedelta.
        """
        cutoff(self._clock.now_us(), older_than)  # refuses what is no age, here and at once
        asked = {
            "older_than_us": older_than // timedelta(microseconds=1),
            "keep_outcomes": keep_outcomes,
            "dry_run": dry_run,
        }
        return read_report(await self._ask("gc", asked, key, timeout))

    # --- what became of it ---------------------------------------------------------------

    async def withdraw(self, key: str) -> bool:
        """Take back a command that no holder has begun, for certain.

        Returns:
            True: it is gone, and will never be applied. False: a holder has it, and has applied it
            or may do so at any moment; asking again under its key gives the answer.

        Raises:
            NotFoundError: Nothing waits under this key, and nothing was ever answered.
            AnswerGoneError: Nothing waits under it; whether it was answered is not known any more.
        """
        key = check_name(key, "key")
        box = self._storage.command_box
        removed = await self._blocking.run(box.withdraw, key)
        # In this order: what a holder has forgotten has its answer.
        place = await self._blocking.run(box.find, key)
        answer = await self._blocking.run(self._storage.command, key)
        if place == "taken" or answer is not None:
            return False
        if not removed and place is None:
            await self._blocking.run(self._check_remembered, key)
            raise NotFoundError("command", show(key))
        return True

    async def wait_for_submission(
        self,
        submission_id: int,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Settled:
        """Wait until a submission is answered, or will not be.

        It is read from the store, so it may also be one that another process handed in.

        Args:
            submission_id: Any submission of this session.
            timeout: Most seconds to wait; None waits for ever, 0 only looks.

        Raises:
            NotFoundError: This session has no such submission.
            WaitTimeoutError: The time ran out; waiting again is fine.
        """

        found: Settled | None

        async def settled() -> Settled | None:
            record = await self.reader.submission(submission_id)
            if record.status not in ("done", "unanswered"):
                return None
            return await self._blocking.run(settled_of, record, self._storage, Codec())

        found = await looked_for(settled, timeout)
        if found is None:
            assert timeout is not None
            hint = await self._who_holds(
                "It goes on there.", "It goes on when the store is opened."
            )
            raise WaitTimeoutError(f"the answer to submission {submission_id}", timeout, hint)
        return found
