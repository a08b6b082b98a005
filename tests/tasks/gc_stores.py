"""Stores full of trees that have ended, or not, and a model of which of them may go."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from typing import Any

import attrs
from hypothesis import Phase

from pidurable.records import _codec, _json
from pidurable.records._tasks import OutcomeRecord, Status, Wait
from pidurable.storage import (
    RECORDS,
    Batch,
    ConversationRow,
    DocumentRow,
    EntryRow,
    HolderClaim,
    Op,
    RecordKind,
    RevisionRow,
    Storage,
    SubmissionRow,
    TaskRow,
)

UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""A smaller seed is no simpler store."""
DAY_US = 24 * 60 * 60 * 1_000_000
NOW_US = 1_700_000_000_000_000
OLD_US = NOW_US - 40 * DAY_US
NEW_US = NOW_US - 10 * DAY_US
OUTCOME = _json.dumps(_codec.encode_outcome(OutcomeRecord(status="completed", result=None)))

Writes = list[tuple[Op, tuple[Any, ...]]]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@attrs.define(eq=False)
class Planted:
    """What was put into a store, for the model."""

    writes: Writes = attrs.Factory(list)
    next_id: int = 1
    tasks: dict[int, TaskRow] = attrs.Factory(dict)
    conversations: dict[int, ConversationRow] = attrs.Factory(dict)
    submissions: dict[int, SubmissionRow] = attrs.Factory(dict)
    documents: dict[int, DocumentRow] = attrs.Factory(dict)
    waits: dict[int, tuple[int, ...]] = attrs.Factory(dict)
    blobs: list[str] = attrs.Factory(list)

    def id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def conversation(self, *, owner: int | None = None, parent: int | None = None) -> int:
        id = self.id()
        row = ConversationRow(id, f"u{id}", parent, None, owner, None, "", OLD_US)
        self.conversations[id] = row
        self.writes.append((Op.CONVERSATION, row))
        return id

    def task(
        self,
        conversation: int,
        *,
        owner: int | None = None,
        ended_us: int | None = OLD_US,
        key: str | None = None,
        background: bool = False,
        on: tuple[int, ...] | None = None,
        text: str = "{}",
    ) -> int:
        """A task that has ended, or (None) waits for something, or for a year."""
        id = self.id()
        live = ended_us is None
        values: tuple[Any, ...] = (
            *(id, conversation, "gc.planted", 1, owner, key, int(background), None, None, OLD_US),
            *(int(Status.WAITING if live else Status.TERMINAL), OLD_US, ended_us),
            # Blocked, so that nothing wakes it whatever it waits for.
            *(None, None, 1, 0, 0, OLD_US, None, "missing_definition" if live else None),
            None if live else "completed",
        )
        row = TaskRow(*values)
        self.tasks[id] = row
        self.writes += [(Op.TASK, row), (Op.TASK_INPUT, (id, text))]
        if live:
            self.waits[id] = on or ()
            wait = Wait(on=on, deadline_us=NOW_US + 365 * DAY_US)
            self.writes.append((Op.CHECKPOINT, (id, "Start", "{}", OLD_US)))
            self.writes.append((Op.WAIT, (id, _json.dumps(_codec.encode_wait(wait)))))
        else:
            self.writes.append((Op.OUTCOME, (id, OUTCOME)))
        return id

    def entry(self, conversation: int, text: str = "null") -> int:
        id = self.id()
        row = EntryRow(id, conversation, 1, "note", None, None, None, None, text, OLD_US)
        self.writes.append((Op.ENTRY, row))
        return id

    def submission(self, conversation: int, *, status: str = "done", text: str = "[]") -> int:
        id = self.id()
        values: tuple[Any, ...] = (
            *(id, conversation, "input", "follow_up"),
            *(f"request {id}", digest(text.encode())),
            *(text, OLD_US, status, None, None, None, None, None, OLD_US),
        )
        row = SubmissionRow(*values)
        self.submissions[id] = row
        self.writes.append((Op.SUBMISSION, row))
        return id

    def document(
        self,
        scope: int,
        scope_id: int,
        *,
        name: str = "planted.doc",
        retired: bool = False,
        history: str = "latest",
        text: str = "{}",
        revisions: int = 1,
    ) -> int:
        id = self.id()
        row = DocumentRow(id, name, scope, scope_id, f"k{id}", history, "initial", 1, None)
        self.documents[id] = row._replace(retired_seq=2 if retired else None)
        self.writes.append((Op.DOCUMENT, row))
        self.writes += [(Op.REVISION, RevisionRow(id, 1 + n, 1, 1, text)) for n in range(revisions)]
        if retired:
            self.writes.append((Op.DOCUMENT_RETIRE, (id, 2)))
        return id

    def blob(self, data: bytes) -> str:
        name = digest(data)
        self.blobs.append(name)
        self.writes.append((Op.BLOB, (name, data)))
        return name

    def store(self, storage: Storage) -> None:
        """Put it into a new storage, which is closed with the mark."""
        claim = HolderClaim(holder_id="plant", host="h", pid=1, at_us=1, lease_seconds=15.0)
        head = storage.acquire(claim, takeover=False)
        storage.apply(
            Batch(
                epoch=head.epoch,
                seq=10,
                next_id=self.next_id,
                flush=False,
                writes=self.writes,
                clean=True,
            )
        )
        storage.release(head.epoch)
        storage.close()


def plant_random(seed: int) -> Planted:
    """Some trees over a few conversations that nobody owns, with all that may keep them."""
    draw = random.Random(seed)
    made = Planted()
    roots = [made.conversation() for _ in range(draw.randint(1, 3))]
    for name in roots:
        made.entry(name)
    blobs = [made.blob(f"blob {n}".encode()) for n in range(draw.randint(0, 6))]

    def text() -> str:
        if blobs and draw.random() < 0.3:
            return _json.dumps({"see": f"x{draw.choice(blobs)}"})
        return "{}"

    for _ in range(draw.randint(1, 40)):
        _plant_one(made, draw, roots, text)
    return made


def _plant_one(made: Planted, draw: random.Random, roots: list[int], text: Any) -> None:
    """One more record somewhere: below what there is, as a running session could have made it."""
    conversations = list(made.conversations)
    tasks = list(made.tasks)
    what = draw.choices(
        ("root", "task", "owned", "conversation", "entry", "submission", "document", "fork"),
        (5, 4, 4, 4, 3, 2, 3, 2),
    )[0]
    ended = draw.choices((OLD_US, NEW_US, None), (12, 1, 1))[0]
    if what == "root":
        key = f"key {made.next_id}" if draw.random() < 0.5 else None
        made.task(draw.choice(roots), ended_us=ended, key=key, text=text())
    elif what == "task":
        on = tuple(draw.sample([*tasks, *conversations, *made.submissions], k=1))
        background = draw.random() < 0.3
        made.task(draw.choice(conversations), ended_us=ended, background=background, on=on)
    elif what == "owned" and tasks:
        owner = draw.choice(tasks)
        made.task(made.tasks[owner].conversation, owner=owner, ended_us=ended, text=text())
    elif what == "conversation" and tasks:
        made.conversation(owner=draw.choice(tasks))
    elif what == "entry":
        made.entry(draw.choice(conversations), text())
    elif what == "submission":
        status = draw.choices(("done", "unanswered", "placed"), (6, 3, 1))[0]
        made.submission(draw.choice(conversations), status=status, text=text())
    elif what == "document":
        scope = draw.choice((0, 1, 2) if tasks else (0, 1))
        place = (0, draw.choice(conversations), draw.choice(tasks or [0]))[scope]
        history = draw.choice(("latest", "rewindable")) if scope == 1 else "latest"
        # A task that ends takes its documents with it.
        ended_task = scope == 2 and made.tasks[place].ended_us is not None
        retired = ended_task or draw.random() < 0.4
        made.document(
            *(scope, place),
            retired=retired,
            history=history,
            text=text(),
            revisions=draw.randint(1, 3),
        )
    elif what == "fork":
        by: int | None = draw.choice([*tasks, None])
        made.conversation(owner=by, parent=draw.choice(conversations))


@attrs.frozen
class Expected:
    """What the model says of a collection."""

    roots: frozenset[int]
    tasks: frozenset[int]
    conversations: frozenset[int]
    documents: frozenset[int]


def members_of(made: Planted) -> dict[int, set[int]]:
    """The tasks and conversations of each tree, by its root."""
    root_of: dict[int, int] = {}
    for id in sorted([*made.tasks, *made.conversations]):
        if id in made.tasks:
            row = made.tasks[id]
            above = row.conversation if row.owner is None else row.owner
            root_of[id] = root_of.get(above) or id
        else:
            owned_by = made.conversations[id].owner
            if owned_by is not None:
                root_of[id] = root_of[owned_by]
    members: dict[int, set[int]] = defaultdict(set)
    for id, root in root_of.items():
        members[root].add(id)
    return members


def expected(made: Planted, *, before_us: int) -> Expected:
    """The greatest set of trees of which none is needed by anything outside of it."""
    members = members_of(made)
    root_of = {id: root for root, ids in members.items() for id in ids}
    going = {root for root in members if _may_go(made, members[root], before_us)}
    while True:
        stay = set()
        for fork in made.conversations.values():
            parent = None if fork.parent is None else root_of.get(fork.parent)
            if parent in going and root_of.get(fork.id) not in going:
                stay.add(parent)
        if not stay:
            break
        going -= stay
    gone = {id for root in going for id in members[root]}
    documents = {
        row.id
        for row in made.documents.values()
        if (row.scope and row.scope_id in gone)
        or (row.retired_seq is not None and not (row.scope == 1 and row.history == "rewindable"))
    }
    return Expected(
        frozenset(going),
        frozenset(gone & set(made.tasks)),
        frozenset(gone & set(made.conversations)),
        frozenset(documents),
    )


def _may_go(made: Planted, members: set[int], before_us: int) -> bool:
    tasks = [made.tasks[id] for id in members if id in made.tasks]
    if any(row.ended_us is None or row.ended_us >= before_us for row in tasks):
        return False
    mine = [row for row in made.submissions.values() if row.conversation in members]
    if any(row.status in ("queued", "placed") for row in mine):
        return False
    needed = {id for on in made.waits.values() for id in on}
    return not needed & (members | {row.id for row in mine})


def everything(storage: Storage) -> dict[RecordKind, list[tuple[Any, ...]]]:
    """Every record of a store, by kind."""
    return {kind: storage.scan(kind, limit=1_000_000) for kind in RecordKind}


def check_owners(storage: Storage) -> None:
    """Whatever stands has all its owners, and nothing hangs on what is gone."""
    found = everything(storage)
    tasks = {row[0]: TaskRow(*row) for row in found[RecordKind.TASK]}
    conversations = {row[0]: ConversationRow(*row) for row in found[RecordKind.CONVERSATION]}
    documents = {row[0]: DocumentRow(*row) for row in found[RecordKind.DOCUMENT]}
    for row in tasks.values():
        assert row.conversation in conversations
        assert row.owner is None or row.owner in tasks
    for made in conversations.values():
        assert made.owner is None or made.owner in tasks
        assert made.parent is None or made.parent in conversations
    for entry in found[RecordKind.ENTRY]:
        assert EntryRow(*entry).conversation in conversations
    for submission in found[RecordKind.SUBMISSION]:
        assert SubmissionRow(*submission).conversation in conversations
    for document in documents.values():
        places: Any = ({0: None}, conversations, tasks)[document.scope]
        assert document.scope_id in places
    for kind in (RecordKind.INPUT, RecordKind.OUTCOME, RecordKind.CHECKPOINT, RecordKind.WAIT):
        for hanging in found[kind]:
            assert hanging[RECORDS[kind].columns.index("task")] in tasks
    for revision in found[RecordKind.REVISION]:
        assert revision[0] in documents
