"""The inbox: what is handed in to a conversation, kept until a boundary places it, or taken back.

A conversation is busy while `pi.live.run` names a run. Input to one that is not busy is placed,
after whatever was still queued there, and starts a generation, in one commit; otherwise it waits in
`pi.inbox` for a boundary (see `_boundaries`). What is handed in while a run is being aborted is no
part of it: that is placed as if it came a moment later, when the run has ended.

A write asks the model nothing. One that no request can see (no messages, no head, no edits) is
stored at once, also in the middle of a round; any other at once where the conversation is not busy,
else at the next boundary.

Everything is checked where it is handed in, so that nothing that waits can turn out to be
unplaceable: it would be in the way of all that is behind it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pidurable.agent._boundaries import (
    AFTER,
    WRITE,
    GenerationInput as GenerationInput,
    decode_blocks as decode_blocks,
    end_run as end_run,
    ended,
    is_aborting,
    place_write,
    say,
    start_run,
)
from pidurable.agent._documents import (
    InboxDocument,
    LiveDocument,
    address_of,
    queue_item,
    queued_items,
    read_doc,
    unqueue,
    update_doc,
)
from pidurable.errors import (
    ConversationBusyError,
    ConversationFullError,
    InvalidArgumentError,
    NotFoundError,
    NothingToContinueError,
    NotJsonError,
    RequestIdConflictError,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name, is_id
from pidurable.records._entries import Edit
from pidurable.records._messages import (
    Block,
    ImageBlock,
    Message,
    TextBlock,
    UserMessage,
)
from pidurable.records._submissions import SubmissionRecord, WhenBusy
from pidurable.session._entry_form import encode_entry
from pidurable.session._stubs import SUBMISSION
from pidurable.session._transaction import text_digest
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.session._session import Session
    from pidurable.storage import StubRow, SubmissionRow


Content = str | Sequence[Block]

_KEPT_FREE_BYTES = 8 * 1024
"""Of the queue, kept for summaries, of which it holds the name alone where it is full; at most an
eighth of it. A hundred of them wait in that."""

_LATEST_US = 2**63 - 1
"""A moment whose text is as long as any."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


# --- what is handed in --------------------------------------------------------------------------


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


def _checked_blocks(blocks: Sequence[Block], bytes_max: int) -> tuple[Any, str]:
    """Blocks as JSON and its text, refused here if the message that they become later would be.

    That has more around them, in depth and in bytes, and the inbox is one level deeper still; what
    waited there and could not be placed would be in the way of everything behind it.
    """
    message = UserMessage(blocks=tuple(blocks), at_us=_LATEST_US)
    encoded = _codec.encode_messages([message])
    checked = _codec.as_read([message], bytes_max) is not None
    try:
        _json.dumps([encoded], bytes_max=bytes_max, setting="value_bytes_max", checked=checked)
    except NotJsonError as error:
        below = error.path.removeprefix("$").removeprefix("[0][0].blocks")
        raise NotJsonError(f"$.content{below}", error.problem, error.value) from error
    content = encoded[0]["blocks"]
    text = _json.dumps(content, path="$.content", bytes_max=bytes_max, checked=checked)
    if not checked or any(block.opaque is not None for block in blocks):
        # What is queued is kept as it is, and the sender may go on to change what it has handed in.
        content = _json.loads_stored(text)
    return content, text


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
    encoded, text = _checked_blocks(blocks, session.settings.value_bytes_max)
    digest = text_digest(text)
    try:
        tx.conversation(conversation_id)
        tx.check_images([UserMessage(blocks=blocks, at_us=0)])
    except NotFoundError:
        # A late retry of what was handed in once: its conversation, or its images, may be gone.
        if request_id is None or _by_request(session, tx, conversation_id, request_id) is None:
            raise
    earlier = _earlier(session, tx, conversation_id, request_id, digest)
    if earlier is not None:
        return earlier
    live = read_doc(tx, LiveDocument, conversation_id)
    if live["run"] is not None and when_busy == "reject":
        raise ConversationBusyError(conversation_id, live["run"])
    id = tx.draw_id()
    handed_in = partial(
        SubmissionRecord,
        id=id,
        conversation_id=conversation_id,
        kind="input",
        when_busy=when_busy,
        request_id=request_id,
        digest=digest,
        content=encoded,
        created_us=tx.now_us(),
    )
    if live["run"] is None:
        queued = queued_items(tx, conversation_id)
        if queued:
            update_doc(tx, InboxDocument, conversation_id, items=[])
        run = start_run(tx, conversation_id, queued)
        entry = say(tx, conversation_id, blocks)
        tx.put_submission(handed_in(status="placed", entry=entry, run=int(run)), text)
    elif tx.is_cancelled(conversation_id):
        # Its run drains, and no other one will ever place what is queued behind it.
        aborted = handed_in(status="unanswered", reason="aborted", ended_us=tx.now_us())
        tx.put_submission(aborted, text)
    else:
        item = {"submission": id, "mode": when_busy, "content": encoded}
        if is_aborting(tx, live):
            item[AFTER] = live["run"]
        _check_room(session, tx, conversation_id, item)
        tx.put_submission(handed_in(status="queued"), text)
        queue_item(tx, conversation_id, item)
    return id


def write(
    session: Session,
    tx: TreeTransaction,
    conversation_id: int,
    value: object = None,
    *,
    kind: str | None = None,
    messages: Sequence[Message] = (),
    head: int | None = None,
    edits: Sequence[Edit] = (),
    request_id: str | None = None,
    crowds: bool = True,
) -> int:
    """Stage a write, placed now or at the next boundary, and return its submission.

    It ends `done` in the commit that places it, or `stale` where its head would by then let the
    context start earlier than it does. Arguments are those of `Transaction.append`.

    Args:
        session: The session.
        tx: The commit.
        conversation_id: Where to.
        value, kind, messages, head, edits: The entry.
        request_id: The same one gives the same submission.
        crowds: Whether a full inbox refuses it. What the product itself has to say is not lost:
            it is queued by name there.
    """
    if request_id is not None:
        request_id = check_name(request_id, "request_id")
    encoded = encode_entry(session, value, kind=kind, messages=messages, head=head, edits=edits)
    content = encoded.json()
    text = _checked_write(content, session.settings.value_bytes_max)
    digest = text_digest(text)
    try:
        tx.conversation(conversation_id)
        tx.check_entry(conversation_id, encoded)
    except NotFoundError:
        if request_id is None or _by_request(session, tx, conversation_id, request_id) is None:
            raise
    earlier = _earlier(session, tx, conversation_id, request_id, digest)
    if earlier is not None:
        return earlier
    record = SubmissionRecord(
        id=tx.draw_id(),
        conversation_id=conversation_id,
        kind="write",
        when_busy="follow_up",
        request_id=request_id,
        digest=digest,
        content=content,
        status="queued",
        created_us=tx.now_us(),
    )
    if encoded.is_visible and read_doc(tx, LiveDocument, conversation_id)["run"] is not None:
        item = {"submission": record.id, "mode": WRITE, "entry": content}
        try:
            _check_room(session, tx, conversation_id, item)
        except ConversationFullError:
            if crowds:
                raise
            # What it holds is with its submission all the same.
            item["entry"] = None
        tx.put_submission(record, text)
        queue_item(tx, conversation_id, item)
        return record.id
    tx.put_submission(place_write(tx, record, encoded), text)
    return record.id


def continue_run(
    session: Session,
    tx: TreeTransaction,
    conversation_id: int,
    *,
    may: bool,
    as_of: int,
    request_id: str | None,
) -> int | None:
    """Start a run without input and return its submission; what is queued stays queued.

    Args:
        session: The session.
        tx: The commit.
        conversation_id: Which conversation.
        may: Whether there was something to answer, as the context says.
        as_of: The newest entry then. If there is a newer one by now the answer is None: look again.
        request_id: The same one gives the same submission.
    """
    tx.conversation(conversation_id)
    digest = text_digest("null")
    earlier = _earlier(session, tx, conversation_id, request_id, digest)
    if earlier is not None:
        return earlier
    live = read_doc(tx, LiveDocument, conversation_id)
    if live["run"] is not None:
        raise ConversationBusyError(conversation_id, live["run"])
    if (tx.newest_entry(conversation_id) or 0) != as_of:
        return None
    if not may:
        raise NothingToContinueError(conversation_id, "terminal")
    run = start_run(tx, conversation_id, [])
    record = SubmissionRecord(
        id=tx.draw_id(),
        conversation_id=conversation_id,
        kind="continue",
        when_busy="reject",
        request_id=request_id,
        digest=digest,
        content=None,
        status="placed",
        run=int(run),
        created_us=tx.now_us(),
    )
    tx.put_submission(record)
    return record.id


def _checked_write(content: Any, bytes_max: int) -> str:
    """An entry's JSON as text, refused here if the inbox could not hold it, three levels down."""
    try:
        _json.dumps([[[content]]], bytes_max=bytes_max, setting="value_bytes_max")
    except NotJsonError as error:
        below = error.path.removeprefix("$").removeprefix("[0][0][0]")
        # Named as where nothing is around it.
        below = f"<{content['kind']}>{below[5:]}" if below.startswith(".data") else below
        raise NotJsonError(f"${below}", error.problem, error.value) from error
    return _json.dumps(content, bytes_max=bytes_max, setting="value_bytes_max")


def _check_room(
    session: Session, tx: TreeTransaction, conversation_id: int, item: dict[str, Any]
) -> None:
    """Refuse an item that the inbox cannot hold besides what is queued.

    What is queued is measured only where it may be too much, so that an item costs its own size.
    """
    items = queued_items(tx, conversation_id)
    settings = session.settings
    if len(items) >= settings.queued_max:
        raise ConversationFullError(conversation_id, settings.queued_max)
    most = settings.document_bytes_max
    most -= min(_KEPT_FREE_BYTES, most // 8)
    before = session.staged_doc(address_of(InboxDocument, conversation_id))
    if before is not None:
        # Queued in order: what this body has queued is newer than all that was there before it.
        known = before.value["items"]
        newest = known[-1]["submission"] if known else 0
        fresh = [each for each in items if each["submission"] > newest]
        if before.bytes_bound + _size_of([*fresh, item]) <= most:
            return
    size = _size_of({"items": [*items, item]})
    if size > most:
        raise ConversationFullError(conversation_id, settings.queued_max, size, most)


def _size_of(value: Any) -> int:
    return len(_json.dumps(value).encode())


# --- request ids --------------------------------------------------------------------------------


def _earlier(
    session: Session,
    tx: TreeTransaction,
    conversation_id: int,
    request_id: str | None,
    digest: str,
) -> int | None:
    """The submission that was handed in under a request id already, or None.

    Raises:
        RequestIdConflictError: It was with other content.
    """
    if request_id is None:
        return None
    found = _by_request(session, tx, conversation_id, request_id)
    if found is None:
        return None
    if found[1] != digest:
        raise RequestIdConflictError(request_id, found[0])
    return found[0]


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


# --- taking back --------------------------------------------------------------------------------


def withdraw_queued(
    tx: TreeTransaction, conversation_id: int, *, reason: str = "withdrawn"
) -> list[SubmissionRecord]:
    """Take back what users have queued in a conversation; the content stays with the submission.

    Writes stay: they ask nothing, and the end of the run places them.
    """
    items = queued_items(tx, conversation_id)
    ids = {item["submission"] for item in items if item["mode"] != WRITE}
    unqueue(tx, conversation_id, ids)
    withdrawn: list[SubmissionRecord] = []
    for item in items:
        record = tx.submission(item["submission"]) if item["submission"] in ids else None
        if record is not None and record.status == "queued":
            withdrawn.append(_taken_back(tx, record, reason))
    return withdrawn


def withdraw(tx: TreeTransaction, submission_id: int) -> SubmissionRecord:
    """Take back one submission if it is still queued, and return it as it is then."""
    record = tx.submission(submission_id)
    if record is None:
        raise NotFoundError("submission", submission_id)
    if record.status != "queued":
        return record
    unqueue(tx, record.conversation_id, {submission_id})
    return _taken_back(tx, record, "withdrawn")


def _taken_back(tx: TreeTransaction, record: SubmissionRecord, reason: str) -> SubmissionRecord:
    taken = ended(tx, record, "unanswered", reason=reason)
    tx.update_submission(taken)
    return taken
