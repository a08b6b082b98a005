"""A session with one record of each kind, as the lines of its export, to be bent by tests."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any, BinaryIO

from pidurable.storage import HolderClaim, MemoryStorage
from pidurable.storage._import import ImportOptions, ImportReport, import_steps

NOW_US = 1_760_000_000_000_000
DATA = b"\x00bytes"
SHA = hashlib.sha256(DATA).hexdigest()
UUID = "8f14e45f-ceea-467f-a2b1-3f6b1f9a0c11"

Line = dict[str, Any]

HEADER: Line = {
    "format": "pidurable.export",
    "version": 1,
    "schema": 3,
    "uuid": UUID,
    "created_us": NOW_US,
    "seq": 40,
    "next_id": 100,
    "clean": True,
}


def _task(id: int, **changes: Any) -> Line:
    line: Line = {
        "record": "task",
        "id": id,
        "conversation": 1,
        "kind": "shop.payment",
        "version": 1,
        "owner": None,
        "key": None,
        "background": 0,
        "on_restart": None,
        "deadline_us": None,
        "created_us": NOW_US,
        "status": 0,
        "started_us": None,
        "ended_us": None,
        "abort_us": None,
        "abort_reason": None,
        "invocations": 0,
        "recoveries": 0,
        "tries": 0,
        "ready_us": 0,
        "woken_by": None,
        "blocked": None,
        "outcome_status": None,
    }
    return {**line, **changes}


def _conversation(id: int, **changes: Any) -> Line:
    line: Line = {
        "record": "conversation",
        "id": id,
        "uuid": f"{id:08x}-0000-4000-8000-000000000000",
        "parent": None,
        "parent_entry": None,
        "owner": None,
        "key": None,
        "principal": "somebody",
        "created_us": NOW_US,
    }
    return {**line, **changes}


RECORDS: list[Line] = [
    {"record": "blob", "sha256": SHA, "bytes": "AGJ5dGVz"},
    _conversation(1, key="root"),
    _conversation(20, parent=1, parent_entry=3, owner=10),
    _task(10, key="first"),
    _task(11, owner=10, key="second", status=4, outcome_status="completed", ended_us=NOW_US),
    {
        "record": "entry",
        "id": 3,
        "conversation": 1,
        "seq": 5,
        "kind": "shop.said",
        "by_task": 10,
        "head": 0,
        "edits": None,
        "messages": '[{"a": 1.0}]',
        "data": f"@{SHA}",
        "at_us": NOW_US,
    },
    {"record": "input", "task": 10, "value": "1E5"},
    {"record": "checkpoint", "task": 10, "phase": "pay", "value": "{}", "at_us": NOW_US},
    {"record": "wait", "task": 10, "value": '{"on":[11]}'},
    {"record": "outcome", "task": 11, "value": '{"status":"completed"}'},
    {"record": "memo", "task": 10, "name": "order", "value": "-0.0"},
    {
        "record": "signal",
        "id": 12,
        "task": 10,
        "name": "go",
        "key": "k",
        "payload": "null",
        "at_us": NOW_US,
        "read": 1,
    },
    {
        "record": "submission",
        "id": 2,
        "conversation": 1,
        "kind": "input",
        "when_busy": "follow_up",
        "request_id": "r",
        "digest": "d",
        "content": '"hello"',
        "created_us": NOW_US,
        "status": "queued",
        "entry": None,
        "run": None,
        "answer": None,
        "reason": None,
        "detail": None,
        "ended_us": None,
    },
    {
        "record": "document",
        "id": 30,
        "name": "shop.stock",
        "scope": 1,
        "scope_id": 1,
        "key": "",
        "history": "latest",
        "fork": "initial",
        "created_seq": 6,
        "retired_seq": None,
    },
    {"record": "revision", "document": 30, "seq": 6, "base": 1, "version": 1, "value": "{}"},
    {
        "record": "command",
        "id": "c-1",
        "kind": "signal",
        "digest": "d",
        "answer": "{}",
        "seq": 7,
        "at_us": NOW_US,
    },
    {
        "record": "stub",
        "kind": "task",
        "place": 1,
        "key": "gone",
        "id": 9,
        "digest": "",
        "status": "completed",
        "at_us": NOW_US,
    },
    {"record": "removal", "root": 8, "at_us": NOW_US},
]


def lines(**changes: Any) -> list[Line]:
    """The header and the records, to be changed; what is given changes the header."""
    return copy.deepcopy([{**HEADER, **changes}, *RECORDS])


def find(some: list[Line], record: str, number: int = 0) -> Line:
    """A record of a kind, the first or a later one."""
    return [line for line in some if line.get("record") == record][number]


def signed(some: Sequence[Line | bytes]) -> bytes:
    """The file of some lines, as whoever makes a hostile one would sign it."""
    data = b"".join(line if isinstance(line, bytes) else encoded(line) for line in some)
    counts: dict[str, int] = {}
    for line in some[1:]:
        if isinstance(line, dict) and isinstance(line["record"], str):
            counts[line["record"]] = counts.get(line["record"], 0) + 1
    end = {"record": "end", "records": counts, "sha256": hashlib.sha256(data).hexdigest()}
    return data + encoded(end)


def encoded(line: Line) -> bytes:
    """One line as an export writes it."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def imported(data: bytes | BinaryIO, target: Any = MemoryStorage, **changes: Any) -> ImportReport:
    """Import bytes, as a move and into memory unless told otherwise."""
    numbers = iter(range(1_000))
    usual: dict[str, Any] = {
        "as_copy": False,
        "value_bytes_max": 16 * 1024 * 1024,
        "claim": HolderClaim(holder_id="h", host="h", pid=1, at_us=NOW_US, lease_seconds=15.0),
        "new_uuid": lambda: f"new-{next(numbers)}",
    }
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    steps = import_steps(stream, target, ImportOptions(**{**usual, **changes}))
    while True:
        try:
            next(steps)
        except StopIteration as done:
            report: ImportReport = done.value
            return report
