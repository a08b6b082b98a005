"""Sessions for exports: every kind of record, every column in use, and values that hurt.

What is generated is what a session may hold, written through the contract as a session writes it:
in commits, with states that change, signals that are read, documents that are retired and made
again, and what retention leaves behind.
"""

from __future__ import annotations

import hashlib
import json
from random import Random
from typing import Any

import attrs

from pidurable.storage import (
    Batch,
    CommandRow,
    ConversationRow,
    DocumentRow,
    EntryRow,
    HolderClaim,
    Op,
    RemovalRow,
    RevisionRow,
    SignalRow,
    Storage,
    StubRow,
    SubmissionRow,
    TaskRow,
)

Write = tuple[Op, tuple[Any, ...]]
NOW_US = 1_760_000_000_000_000
MOMENTS = (-62_135_596_800_000_000, -1, 0, 1, NOW_US, 253_402_300_799_999_999)

# fmt: off
TEXTS = (
    "", " ", "a", "\x01", "\x1b[2K\r", "\x1b]52;c;cm0gLXJm\x07", "\x7f", "\x9b31m", "\n", "\r\n",
    "\t", "\u2028", "\u2029", "\u202egnp.exe", "\u200b", "\ufeff", "\ufffe", "\uffff",
    "\U0010ffff", "\ud7ff", "e\u0301", "\xe9", "\U0001d518", "\U0001f469\u200d\U0001f467",
    "\\", "\\u0000", "\\ud800", '"', "'", "`", "@", "@" + "a" * 64, "__proto__", "__class__",
    "constructor", "'; drop table tasks; --", "<script>alert(1)</script>", "record", "sha256",
    "{}%s%n{0.__class__}", "NaN", "null", "true", "1e999", "../../etc/passwd", "kind", "a\\",
)
"""Names, keys and free texts."""

NUMBERS = (
    "0", "-0.0", "0.1", "1.0", "1E5", "1e-7", "5e-324", "1.7976931348623157e308",
    "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551615",
    "-9223372036854775808", "100000000000000000000e-1", "0.30000000000000004",
)
"""As JSON is written by others; a copy must not write one of them in another way."""
# fmt: on


@attrs.define(eq=False)
class SessionMaker:
    """Generates one session from a seed and applies it to storages, the same to each."""

    seed: int
    size: int = 40
    """About so many conversations, entries and tasks each."""
    random: Random = attrs.field(init=False)
    clean: bool = attrs.field(init=False)
    uuid: str = attrs.field(init=False)
    created_us: int = attrs.field(init=False)
    next_id: int = 1
    seq: int = 0
    batches: list[tuple[int, int, list[Write]]] = attrs.Factory(list)
    """(seq, next id, writes)"""
    writes: list[Write] = attrs.Factory(list)
    conversations: list[int] = attrs.Factory(list)
    entries: list[int] = attrs.Factory(list)
    tasks: list[int] = attrs.Factory(list)
    keys: set[Any] = attrs.Factory(set)
    blobs: list[str] = attrs.Factory(list)
    living: dict[Any, int] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        self.random = Random(self.seed)
        self.clean = self.random.random() < 0.5
        self.uuid = self.make_uuid()
        self.created_us = self.random.choice(MOMENTS)
        steps = (
            self.conversation, self.entry, self.entry, self.task, self.task, self.signal,
            self.submission, self.document, self.blob, self.remains,
        )  # fmt: skip
        self.blob()
        self.conversation()
        self.task()
        self.commit()
        for step in steps:
            step()
        for _ in range(self.size * 3):
            self.random.choice(steps)()
            if self.random.random() < 0.3:
                self.commit()
        self.commit()

    def fill(self, storage: Storage, claim: HolderClaim) -> None:
        """Apply the session to an empty storage, and let go of it."""
        epoch = storage.acquire(claim, takeover=False).epoch
        last = len(self.batches) - 1
        for place, (seq, next_id, writes) in enumerate(self.batches):
            clean = self.clean and place == last
            storage.apply(
                Batch(
                    epoch=epoch,
                    seq=seq,
                    next_id=next_id,
                    flush=place == last,
                    writes=writes,
                    clean=clean,
                )
            )
        storage.release(epoch)

    # --- drawing -------------------------------------------------------------------------

    def id(self) -> int:
        # Gaps are left by bodies that were rolled back.
        self.next_id += self.random.choice((0, 0, 0, 1, 7, 2**20))
        self.next_id += 1
        return self.next_id - 1

    def commit(self) -> None:
        self.seq += self.random.choice((1, 1, 1, 2, 2**20))
        self.batches.append((self.seq, self.next_id, self.writes))
        self.writes = []

    @property
    def now(self) -> int:
        """The commit that is being written: the last one until it is stored."""
        return self.seq

    def make_uuid(self) -> str:
        digits = f"{self.random.getrandbits(128):032x}"
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def text(self) -> str:
        parts = [self.random.choice(TEXTS) for _ in range(self.random.choice((1, 1, 2, 5)))]
        if self.random.random() < 0.01:
            parts.append("key " * 10_000)
        return "".join(parts)

    def maybe(self, value: Any) -> Any:
        return value if self.random.random() < 0.6 else None

    def moment(self) -> int:
        return self.random.choice(MOMENTS)

    def small(self) -> int:
        return self.random.choice((0, 1, 2, 3, 1_000_000, 2**31, 2**53 + 1))

    def unique(self, *place: Any) -> str:
        """A key that is new at a place."""
        while True:
            key = self.text()
            if (*place, key) not in self.keys:
                self.keys.add((*place, key))
                return key

    def json(self, depth: int = 0) -> str:
        """A text of JSON, as somebody may have written it: not all of it is ours."""
        kind = self.random.randrange(7 if depth < 4 else 4)
        if kind == 0:
            return self.random.choice(("null", "true", "false"))
        if kind == 1:
            return self.random.choice(NUMBERS)
        if kind < 4:
            return json.dumps(self.text(), ensure_ascii=self.random.random() < 0.3)
        blank = self.random.choice(("", "", " ", "\n\t"))
        count = self.random.choice((0, 1, 3))
        if kind == 4:
            items = f",{blank}".join(self.json(depth + 1) for _ in range(count))
            return f"[{blank}{items}]"
        if kind == 5 and depth == 0 and self.random.random() < 0.1:
            return "[" * 200 + "]" * 200
        names = {f"{self.text()}{place}" for place in range(count)}
        fields = (f"{json.dumps(name)}{blank}:{self.json(depth + 1)}" for name in sorted(names))
        return f"{{{f',{blank}'.join(fields)}}}"

    def json_or_blob(self) -> str:
        return f"@{self.random.choice(self.blobs)}" if self.random.random() < 0.2 else self.json()

    # --- records -------------------------------------------------------------------------

    def write(self, op: Op, *row: Any) -> None:
        self.writes.append((op, row))

    def conversation(self) -> None:
        parent = self.maybe(self.random.choice(self.conversations)) if self.conversations else None
        owner = self.maybe(self.random.choice(self.tasks)) if self.tasks else None
        entry = self.maybe(self.random.choice(self.entries)) if parent and self.entries else None
        id = self.id()
        key = self.maybe(self.unique("conversation", owner))
        row = ConversationRow(
            id, self.make_uuid(), parent, entry, owner, key, self.text(), self.moment()
        )
        self.write(Op.CONVERSATION, *row)
        self.conversations.append(id)

    def entry(self) -> None:
        id = self.id()
        row = EntryRow(
            id,
            self.random.choice(self.conversations),
            self.now,
            self.text(),
            self.maybe(self.random.choice(self.tasks)) if self.tasks else None,
            self.random.choice((None, 0, id, *self.entries[:1])),
            self.maybe(self.json_or_blob()),
            self.maybe(self.json_or_blob()),
            self.maybe(self.json_or_blob()),
            self.moment(),
        )
        self.write(Op.ENTRY, *row)
        self.entries.append(id)

    def task(self) -> None:
        owner = self.maybe(self.random.choice(self.tasks)) if self.tasks else None
        conversation = self.random.choice(self.conversations)
        id = self.id()
        place = ("owner", owner) if owner else ("conversation", conversation)
        key = self.maybe(self.unique("task", *place))
        status = self.random.randrange(5)
        outcomes = ("completed", "failed", "aborted", "orphaned", "faulted")
        row = TaskRow(
            id=id,
            conversation=conversation,
            kind=self.text(),
            version=self.small(),
            owner=owner,
            key=key,
            background=self.random.randrange(2),
            on_restart=self.random.choice((None, "go", "wait", "abort")),
            deadline_us=self.maybe(self.moment()),
            created_us=self.moment(),
            status=status,
            started_us=self.maybe(self.moment()),
            ended_us=self.maybe(self.moment()),
            abort_us=self.maybe(self.moment()),
            abort_reason=self.maybe(self.text()),
            invocations=self.small(),
            recoveries=self.small(),
            tries=self.small(),
            ready_us=self.moment(),
            woken_by=self.random.choice((None, "tasks", "signal", "deadline")),
            blocked=self.maybe(self.text()),
            outcome_status=self.random.choice((None, *outcomes)),
        )
        self.write(Op.TASK, *row)
        self.tasks.append(id)
        self.write(Op.TASK_INPUT, id, self.json_or_blob())
        for op, values in (
            (Op.CHECKPOINT, (self.text(), self.json(), self.moment())),
            (Op.WAIT, (self.json(),)),
            (Op.OUTCOME, (self.json_or_blob(),)),
        ):
            if self.random.random() < 0.6:
                self.write(op, id, *values)
        for _ in range(self.random.choice((0, 0, 1, 4))):
            self.write(Op.MEMO, id, self.unique("memo", id), self.json())

    def signal(self) -> None:
        task = self.random.choice(self.tasks)
        id = self.id()
        key = self.maybe(self.unique("signal", task))
        self.write(Op.SIGNAL, *SignalRow(id, task, self.text(), key, self.json(), self.moment()))
        if self.random.random() < 0.5:
            self.write(Op.SIGNAL_READ, id)

    def submission(self) -> None:
        conversation = self.random.choice(self.conversations)
        id = self.id()
        row = SubmissionRow(
            id,
            conversation,
            self.random.choice(("input", "write", "continue")),
            self.random.choice(("follow_up", "steer", "reject")),
            self.maybe(self.unique("submission", conversation)),
            self.text(),
            self.json_or_blob(),
            self.moment(),
            self.random.choice(("queued", "placed", "done", "unanswered")),
            *(self.maybe(self.random.choice(self.entries or [0])) for _ in range(3)),
            self.maybe(self.text()),
            self.maybe(self.text()),
            self.maybe(self.moment()),
        )
        self.write(Op.SUBMISSION, *row)

    def document(self) -> None:
        scope = self.random.randrange(3)
        places = [[0], self.conversations, self.tasks][scope]
        address = (scope, self.random.choice(places), self.text(), self.text())
        if address in self.living:
            # Of a conversation only one may begin at an address in a commit.
            self.write(Op.DOCUMENT_RETIRE, self.living.pop(address), self.now)
            self.commit()
        id = self.id()
        scope, scope_id, name, key = address
        if (address, self.now) in self.keys:
            self.commit()
        self.keys.add((address, self.now))
        row = DocumentRow(
            id, name, scope, scope_id, key, self.random.choice(("latest", "rewindable")),
            self.random.choice(("initial", "current", "as_of")), self.now, None,
        )  # fmt: skip
        self.write(Op.DOCUMENT, *row)
        for place in range(self.random.choice((1, 1, 4))):
            base = int(place == 0 or self.random.random() < 0.2)
            revision = RevisionRow(id, self.now, base, self.small(), self.json())
            self.write(Op.REVISION, *revision)
            self.commit()
        if self.random.random() < 0.3:
            self.write(Op.DOCUMENT_RETIRE, id, self.now)
        else:
            self.living[address] = id

    def blob(self) -> None:
        data = self.random.choice((b"", b"\0", bytes(range(256)), self.random.randbytes(50)))
        if self.random.random() < 0.1:
            data = self.random.randbytes(1) * self.random.choice((65_537, 1 << 20))
        name = hashlib.sha256(data).hexdigest()
        self.write(Op.BLOB, name, data)
        self.blobs.append(name)

    def remains(self) -> None:
        """What commands and retention leave."""
        command = CommandRow(
            self.unique("command"), self.text(), self.text(), self.json(), self.now, self.moment()
        )
        self.write(Op.COMMAND, *command)
        kind = self.random.choice(("task", "submission", "conversation"))
        place = self.random.choice((0, *self.conversations))
        stub = StubRow(
            kind, place, self.unique("stub", kind, place), self.id(), self.text(), self.text(),
            self.moment(),
        )  # fmt: skip
        self.write(Op.STUB, *stub)
        if self.random.random() < 0.3:
            self.write(Op.REMOVAL, *RemovalRow(self.id(), self.moment()))
