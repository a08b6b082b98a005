"""Input and runs: where queued input is placed, and how what was submitted is answered.

A conversation is busy while `pi.live.run` names a run. Input to one that is not busy is placed,
after whatever was still queued there, and starts a generation, in one commit; otherwise it waits in
`pi.inbox` for a boundary: steers are placed after a tool round and join the run, follow-ups are
placed at the end of a run that succeeded and start the next. Nothing is ever placed between a call
and its result. Every submission ends exactly once, in the commit that ends its run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._documents import InboxDocument, LiveDocument, read_doc, update_doc
from pidurable.errors import (
    ConversationBusyError,
    ConversationFullError,
    InvalidArgumentError,
    NotFoundError,
    NotJsonError,
    RequestIdConflictError,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name, is_id
from pidurable.records._messages import Block, ImageBlock, TextBlock, UserMessage
from pidurable.records._submissions import SubmissionRecord, WhenBusy
from pidurable.session._stubs import SUBMISSION
from pidurable.session._transaction import text_digest
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.session._session import Session
    from pidurable.storage import StubRow, SubmissionRow


@attrs.frozen(kw_only=True)
class GenerationInput:
    """One model answer of a run. The first of a run has no `run`: its own id names it."""

    run: int | None = None
    turn: int = 1
    continues: int | None = None
    """The generation before this one."""


Content = str | Sequence[Block]

_LATEST_US = 2**63 - 1
"""A moment whose text is as long as any."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


def blocks_of(content: Content) -> tuple[Block, ...]:
    """The blocks of user input; refuses what a model could not be sent."""
    if not isinstance(content, str | Sequence):
        raise InvalidArgumentError("content", "expected text or a list of blocks", show(content))
    blocks: tuple[Block, ...] = (
        (TextBlock(text=content),) if isinstance(content, str) else tuple(content)
    )
    for place, block in enumerate(blocks):
        if not isinstance(block, TextBlock | ImageBlock):
            raise InvalidArgumentError(
                f"content[{place}]", "expected a text or an image block", show(block)
            )
        if isinstance(block, TextBlock) and not isinstance(block.text, str):
            raise InvalidArgumentError(f"content[{place}].text", "expected a str", show(block.text))
        if isinstance(block, ImageBlock) and (
            not isinstance(block.blob, str) or _SHA256.fullmatch(block.blob) is None
        ):
            problem = "expected the SHA-256 of the image's bytes, in lower-case hex"
            raise InvalidArgumentError(f"content[{place}].blob", problem, show(block.blob))
    if not any(not isinstance(b, TextBlock) or b.text.strip() for b in blocks):
        raise InvalidArgumentError("content", "expected text that is not blank", show(content))
    return blocks


def decode_blocks(value: Any) -> tuple[Block, ...]:
    (message,) = _codec.decode_messages([{"role": "user", "blocks": value, "at_us": 0}])
    assert isinstance(message, UserMessage)
    return message.blocks


def _checked_blocks(blocks: Sequence[Block], bytes_max: int) -> Any:
    """Blocks as JSON, refused here if the message that they become later would be.

    That has more around them, in depth and in bytes, and the inbox is one level deeper still; what
    waited there and could not be placed would be in the way of everything behind it.
    """
    message = UserMessage(blocks=tuple(blocks), at_us=_LATEST_US)
    encoded = _codec.encode_messages([message])
    try:
        _json.dumps([encoded], bytes_max=bytes_max)
    except NotJsonError as error:
        below = error.path.removeprefix("$").removeprefix("[0][0].blocks")
        raise NotJsonError(f"$.content{below}", error.problem, error.value) from error
    return encoded[0]["blocks"]


def submit(
    session: Session,
    tx: TreeTransaction,
    conversation_id: int,
    content: Content,
    *,
    when_busy: WhenBusy,
    request_id: str | None,
) -> int:
    """Stage an input and return its submission. The same request id gives the same submission."""
    if when_busy not in ("follow_up", "steer", "reject"):
        raise InvalidArgumentError(
            "when_busy", "expected 'follow_up', 'steer' or 'reject'", show(when_busy)
        )
    if request_id is not None:
        request_id = check_name(request_id, "request_id")
    blocks = blocks_of(content)
    # Here, where the sender is told, and not when the input is placed.
    encoded = _checked_blocks(blocks, session.settings.value_bytes_max)
    digest = text_digest(_json.dumps(encoded, path="$.content"))
    try:
        tx.conversation(conversation_id)
        tx.check_images([UserMessage(blocks=blocks, at_us=0)])
    except NotFoundError:
        # A late retry of what was handed in once: its conversation, or its images, may be gone.
        if request_id is None or _by_request(session, tx, conversation_id, request_id) is None:
            raise
    if request_id is not None:
        earlier = _by_request(session, tx, conversation_id, request_id)
        if earlier is not None:
            if earlier[1] != digest:
                raise RequestIdConflictError(request_id, earlier[0])
            return earlier[0]
    live = read_doc(tx, LiveDocument, conversation_id)
    if live["run"] is not None and when_busy == "reject":
        raise ConversationBusyError(conversation_id, live["run"])
    record = SubmissionRecord(
        id=tx.draw_id(),
        conversation_id=conversation_id,
        kind="input",
        when_busy=when_busy,
        request_id=request_id,
        digest=digest,
        content=encoded,
        status="queued",
        created_us=tx.now_us(),
    )
    inbox = read_doc(tx, InboxDocument, conversation_id)["items"]
    if len(inbox) >= session.settings.queued_max:
        raise ConversationFullError(conversation_id, session.settings.queued_max)
    item = {"submission": record.id, "mode": when_busy, "content": encoded}
    tx.put_submission(record)
    if live["run"] is not None:
        if tx.is_cancelled(conversation_id):
            # Its run drains, and no other one will ever place what is queued behind it.
            tx.update_submission(
                attrs.evolve(record, status="unanswered", reason="aborted", ended_us=tx.now_us())
            )
            return record.id
        update_doc(tx, InboxDocument, conversation_id, items=[*inbox, item])
        return record.id
    if inbox:
        update_doc(tx, InboxDocument, conversation_id, items=[])
    start_run(tx, conversation_id, [*inbox, item])
    return record.id


def _by_request(
    session: Session, tx: TreeTransaction, conversation_id: int, request_id: str
) -> tuple[int, str] | None:
    """The id, and the digest of the content, of what was handed in under a request id."""
    claimed = tx.claimed(("request", conversation_id, request_id))
    if claimed is not None:
        record = tx.submission(claimed)
        return None if record is None else (record.id, record.digest)
    if not is_id(conversation_id):
        return None
    found: SubmissionRow | StubRow | None
    found = session.storage.submission_by_request(conversation_id, request_id)
    if found is None:
        found = session.storage.stub(SUBMISSION, conversation_id, request_id)
    return None if found is None else (found.id, found.digest)


def start_run(tx: TreeTransaction, conversation_id: int, items: Sequence[Any]) -> int:
    """Place items and create the first generation of a run that answers them."""
    from pidurable.agent._generation import Generation

    run = tx.create_task(Generation, GenerationInput(), conversation=conversation_id)
    place(tx, conversation_id, items, run=run)
    update_doc(
        tx,
        LiveDocument,
        conversation_id,
        run=int(run),
        turn=1,
        generation=int(run),
        partial=None,
        calls=[],
        retry=None,
    )
    return run


def place(
    tx: TreeTransaction,
    conversation_id: int,
    items: Sequence[Any],
    *,
    run: int,
) -> None:
    """Append the entries of queued items, in order."""
    for item in items:
        message = UserMessage(blocks=decode_blocks(item["content"]), at_us=tx.now_us())
        entry = tx.append(conversation_id, kind="pi.user", messages=[message])
        record = tx.submission(item["submission"])
        if record is not None:
            tx.update_submission(attrs.evolve(record, status="placed", entry=entry, run=int(run)))


def place_steers(tx: TreeTransaction, conversation_id: int, run: int) -> None:
    """The boundary after a tool round: every steer joins the run."""
    items = read_doc(tx, InboxDocument, conversation_id)["items"]
    steers = [item for item in items if item["mode"] == "steer"]
    if steers:
        rest = [item for item in items if item["mode"] != "steer"]
        update_doc(tx, InboxDocument, conversation_id, items=rest)
        place(tx, conversation_id, steers, run=run)


def end_run(
    session: Session,
    tx: TreeTransaction,
    conversation_id: int,
    run: int,
    *,
    answer: int | None = None,
    reason: str | None = None,
    detail: str | None = None,
) -> None:
    """The boundary at the end of a run: settle its inputs; after a success start the next run.

    Args:
        answer: The entry of the final answer; None for a run that failed or was aborted, after
            which what is queued stays queued, and visible.
        reason: Why there is no answer, one of the stable codes.
    """
    for record in open_submissions(session, tx, conversation_id):
        if record.status == "placed" and record.run == run:
            tx.update_submission(
                attrs.evolve(
                    record,
                    status="done" if answer is not None else "unanswered",
                    answer=answer,
                    reason=None if answer is not None else reason,
                    detail=None if answer is not None else detail,
                    ended_us=tx.now_us(),
                )
            )
    live = read_doc(tx, LiveDocument, conversation_id)
    if live["run"] != run:
        return
    if answer is not None:
        items = read_doc(tx, InboxDocument, conversation_id)["items"]
        steers = [item for item in items if item["mode"] == "steer"]
        taken = steers or items[:1]
        if taken:
            rest = [item for item in items if item not in taken]
            update_doc(tx, InboxDocument, conversation_id, items=rest)
            start_run(tx, conversation_id, taken)
            return
    update_doc(
        tx,
        LiveDocument,
        conversation_id,
        run=None,
        turn=0,
        generation=None,
        partial=None,
        calls=[],
        retry=None,
    )


def withdraw_queued(
    tx: TreeTransaction, conversation_id: int, *, reason: str = "withdrawn"
) -> list[SubmissionRecord]:
    """Take back everything queued in a conversation; the content stays with the submission."""
    items = read_doc(tx, InboxDocument, conversation_id)["items"]
    if not items:
        return []
    update_doc(tx, InboxDocument, conversation_id, items=[])
    withdrawn: list[SubmissionRecord] = []
    for item in items:
        record = tx.submission(item["submission"])
        if record is not None and record.status == "queued":
            withdrawn.append(
                attrs.evolve(record, status="unanswered", reason=reason, ended_us=tx.now_us())
            )
            tx.update_submission(withdrawn[-1])
    return withdrawn


def open_submissions(
    session: Session, tx: TreeTransaction, conversation_id: int
) -> list[SubmissionRecord]:
    """Submissions that are queued or placed, as staged so far, in order."""
    found = session.staged_open_submissions(conversation_id)
    for record in tx.submissions.values():
        if record.conversation_id == conversation_id:
            found[record.id] = record
    return [found[id] for id in sorted(found) if found[id].status in ("queued", "placed")]
