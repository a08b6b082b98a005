"""Boundaries: the only places where what is queued enters the transcript of a busy conversation.

| boundary | writes | steers | follow-ups |
|---|---|---|---|
| after a tool round | all | one or all (setting), join the run | none |
| end of a run | all | one or all, alone, start the next run | if no steer waits: one or all |

Writes go first, then the items of users, each in order of arrival. Holds at all times:

* nothing that a model sees is placed between a call and its result: a round ends when every call is
  terminal;
* only a run that was answered starts the next one; after any other end steers and follow-ups stay
  queued, and visible, and the next input takes them along;
* an input that came when its run was being aborted already is that next input: however the run
  ends, it takes along what was queued before it, and starts a run;
* no write is queued while the conversation is not busy: every end of a run places all of them, also
  the end of one that failed or was aborted, and one that comes later is placed at once;
* every submission ends exactly once: an input in the commit that ends its run, a write in the one
  that places it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from pidurable.agent._documents import (
    LiveDocument,
    queued_items,
    read_doc,
    unqueue,
    update_doc,
)
from pidurable.records import _codec
from pidurable.records._limits import Settings
from pidurable.records._messages import Block, TextBlock, UserMessage
from pidurable.records._submissions import SubmissionRecord, SubmissionStatus
from pidurable.session._entry_form import EncodedEntry, decode_entry
from pidurable.tasks._transaction import TreeTransaction

if TYPE_CHECKING:
    from pidurable.agent._generation import Generation
    from pidurable.session._session import Session

WRITE = "write"
"""The mode of a queued write; other items have what their sender chose for a busy conversation."""

AFTER = "after"
"""In an item: the run that was being aborted when it was handed in. It is no part of that run."""

_NO_NOTE = "(the note was empty)"
_STALE = "the context starts later already"


@attrs.frozen(kw_only=True)
class GenerationInput:
    """One model answer of a run. The first of a run has no `run`: its own id names it."""

    run: int | None = None
    turn: int = 1
    continues: int | None = None
    """The generation before this one."""
    handoffs: int = 0
    """Rounds in a row, up to the one before this, that handed off to a fresh context."""


@functools.cache
def generation_class() -> type[Generation]:
    """The definition of generations, whose module needs this one."""
    from pidurable.agent._generation import Generation

    return Generation


# --- placing ------------------------------------------------------------------------------------


def decode_blocks(value: Any) -> tuple[Block, ...]:
    """The blocks of queued content."""
    return _codec.decode_blocks(value, path="$.blocks")


def start_run(
    tx: TreeTransaction, conversation_id: int, items: Sequence[Any], *, turn: int = 1
) -> int:
    """Place the items of users and create the first generation of a run that answers them."""
    run = tx.create_task(generation_class(), GenerationInput(), conversation=conversation_id)
    place(tx, conversation_id, items, run=run)
    update_doc(
        tx,
        LiveDocument,
        conversation_id,
        run=int(run),
        turn=turn,
        generation=int(run),
        partial=None,
        calls=[],
        retry=None,
    )
    return run


def say(tx: TreeTransaction, conversation_id: int, blocks: tuple[Block, ...]) -> int:
    """Append what a user has said, and return its entry."""
    message = UserMessage(blocks=blocks, at_us=tx.now_us())
    return tx.append(conversation_id, kind="pi.user", messages=[message])


def place(
    tx: TreeTransaction,
    conversation_id: int,
    items: Sequence[Any],
    *,
    run: int,
) -> None:
    """Append the entries of queued items of users, in order."""
    for item in items:
        entry = say(tx, conversation_id, decode_blocks(item["content"]))
        record = tx.submission(item["submission"])
        if record is not None:
            tx.update_submission(attrs.evolve(record, status="placed", entry=entry, run=int(run)))


def place_write(
    tx: TreeTransaction, record: SubmissionRecord, encoded: EncodedEntry
) -> SubmissionRecord:
    """Append what a write holds, and return how it ended.

    A head that would let the context start earlier than it does has lost to a later cut: such a
    summary is stale, and what it says is in the transcript, or in a newer one, already.
    """
    start = tx.context_start(record.conversation_id) if encoded.head else None
    if start is not None and encoded.head is not None and encoded.head < start:
        return ended(tx, record, "unanswered", reason="stale", detail=f"{_STALE}, at entry {start}")
    entry = tx.append_encoded(record.conversation_id, encoded)
    return ended(tx, record, "done", entry=entry)


def ended(
    tx: TreeTransaction,
    record: SubmissionRecord,
    status: SubmissionStatus,
    *,
    entry: int | None = None,
    answer: int | None = None,
    reason: str | None = None,
    detail: str | None = None,
) -> SubmissionRecord:
    """An open submission as it ends now: as `attrs.evolve` does, in a third of its time."""
    return SubmissionRecord(
        id=record.id,
        conversation_id=record.conversation_id,
        kind=record.kind,
        when_busy=record.when_busy,
        request_id=record.request_id,
        digest=record.digest,
        content=record.content,
        status=status,
        entry=record.entry if entry is None else entry,
        run=record.run,
        answer=answer,
        reason=reason,
        detail=detail,
        created_us=record.created_us,
        ended_us=tx.now_us(),
    )


def _place_writes(
    tx: TreeTransaction, conversation_id: int, items: Sequence[Any]
) -> tuple[list[Any], bool]:
    """Place every queued write; return the other items, and whether a reset was placed."""
    others: list[Any] = []
    reset = False
    for item in items:
        if item["mode"] != WRITE:
            others.append(item)
            continue
        record = tx.submission(item["submission"])
        if record is None or record.status != "queued":
            continue
        # Where the queue was full it has the name alone.
        encoded = decode_entry(record.content if item["entry"] is None else item["entry"])
        tx.update_submission(place_write(tx, record, encoded))
        reset = reset or encoded.head == 0
    return others, reset


# --- the two boundaries -------------------------------------------------------------------------


def place_after_round(
    settings: Settings, tx: TreeTransaction, conversation_id: int, run: int
) -> bool:
    """The boundary after a tool round: writes, then steers, which join the run.

    Returns:
        Whether the run goes on. It does not where a reset was placed, which ends it here: its
        inputs are unanswered, `reset`, and steers stay queued.
    """
    items = queued_items(tx, conversation_id)
    if not items:
        return True
    others, reset = _place_writes(tx, conversation_id, items)
    steers: list[Any] = []
    if not reset:
        steers = _of_mode(others, "steer", settings.steers)
    rest = _without(others, steers)
    _leave(tx, conversation_id, items, rest)
    place(tx, conversation_id, steers, run=run)
    if reset:
        detail = "a reset was placed during the run"
        _end(settings, tx, conversation_id, run, answer=None, reason="reset", detail=detail)
    return not reset


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
            which what users had queued stays queued, and visible, until the next input: one that
            came when the run was being aborted already, or a later one.
        reason: Why there is no answer, one of the stable codes.
    """
    _end(session.settings, tx, conversation_id, run, answer=answer, reason=reason, detail=detail)


def _end(
    settings: Settings,
    tx: TreeTransaction,
    conversation_id: int,
    run: int,
    *,
    answer: int | None,
    reason: str | None,
    detail: str | None,
) -> None:
    for record in tx.open_submissions(conversation_id):
        if record.status == "placed" and record.run == run:
            tx.update_submission(
                ended(tx, record, "unanswered", reason=reason, detail=detail)
                if answer is None
                else ended(tx, record, "done", answer=answer)
            )
    if read_doc(tx, LiveDocument, conversation_id)["run"] != run:
        return
    items = queued_items(tx, conversation_id)
    if items:
        taken = _take_next(settings, tx, conversation_id, items, run, answered=answer is not None)
        if taken:
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


def _take_next(
    settings: Settings,
    tx: TreeTransaction,
    conversation_id: int,
    items: Sequence[Any],
    run: int,
    *,
    answered: bool,
) -> list[Any]:
    """Place the writes that a run leaves behind, and take out of the queue what starts the next."""
    rest, _ = _place_writes(tx, conversation_id, items)
    if answered:
        taken = _of_mode(rest, "steer", settings.steers)
        if not taken:
            taken = rest[:1] if settings.follow_ups == "one" else rest
    else:
        taken = _until_new_wish(rest, run)
        if taken and tx.is_cancelled(conversation_id):
            taken = []
    rest = _without(rest, taken)
    _leave(tx, conversation_id, items, rest)
    return taken


def is_aborting(tx: TreeTransaction, live: dict[str, Any]) -> bool:
    """Whether the run that `pi.live` names is to be aborted, and has not settled yet."""
    generation = live["generation"]
    node = None if generation is None else tx.view.task(generation)
    return node is not None and node.marked


def _until_new_wish(items: Sequence[Any], run: int) -> list[Any]:
    """What starts a run when one has settled that was aborted: as if it were handed in just now.

    The first input that came after the abort, with what was still queued before it. What is behind
    that is queued for the new run, as it would be if it came now.
    """
    for place, item in enumerate(items):
        if item.get(AFTER) == run:
            return list(items[: place + 1])
    return []


def _of_mode(items: Sequence[Any], mode: str, most: str) -> list[Any]:
    """The items of a mode: the first of them, or all, as the setting says."""
    found = [item for item in items if item["mode"] == mode]
    return found[:1] if most == "one" else found


def _leave(
    tx: TreeTransaction, conversation_id: int, items: Sequence[Any], rest: Sequence[Any]
) -> None:
    """Let the rest of the items stay queued."""
    kept = {item["submission"] for item in rest}
    gone = {item["submission"] for item in items} - kept
    unqueue(tx, conversation_id, gone)


def _without(items: Sequence[Any], taken: Sequence[Any]) -> list[Any]:
    gone = {item["submission"] for item in taken}
    return [item for item in items if item["submission"] not in gone]


# --- a fresh context ----------------------------------------------------------------------------


def move_to_fresh_context(
    tx: TreeTransaction,
    conversation_id: int,
    run: int,
    note: str,
    unanswered: Sequence[tuple[int, UserMessage]] = (),
) -> int:
    """Begin the context anew, with a note and what the run is to answer; return the first entry.

    The inputs of the run are said again behind the note, in their order, since the model sees
    nothing of what was before; their submissions, and the run, stay what they were. The entries
    that say them again name the ones that they repeat in their data. A run that continues another
    has no input of its own: it answers what that one had not.

    Args:
        note: What the model has left for itself; one that is blank says so.
        unanswered: What the context had asked.
    """
    text = note if note.strip() else _NO_NOTE
    said = UserMessage(blocks=(TextBlock(text=text),), at_us=tx.now_us())
    first = tx.append(conversation_id, kind="pi.reset", messages=[said], head=0)
    records = tx.open_submissions(conversation_id)
    if any(record.run == run and record.kind == "continue" for record in records):
        own = {record.entry for record in records}
        for entry, message in unanswered:
            if entry not in own:
                tx.append(conversation_id, {"again": entry}, kind="pi.user", messages=[message])
    for record in records:
        if record.status != "placed" or record.run != run or record.kind != "input":
            continue
        again = UserMessage(blocks=decode_blocks(record.content), at_us=tx.now_us())
        tx.append(
            conversation_id,
            {"again": record.entry, "submission": record.id},
            kind="pi.user",
            messages=[again],
        )
    return first
