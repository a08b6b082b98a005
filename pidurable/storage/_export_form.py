"""The form of an export: JSON lines, one record a line, the same bytes for the same session.

::

    {"format":"pidurable.export","version":1,"schema":3,"uuid":"...","created_us":...,...}
    {"record":"conversation","id":1,...}
    ...
    {"record":"end","records":{"conversation":1,...},"sha256":"..."}

The first line is the session, the last one counts the records and has the SHA-256 of every byte
before it, so that a file that was cut or changed is known before anything of it counts. Between
them stand the records, kind by kind in the order of `FORMS`, each kind in the order of its key.
Every column of every table is there, but for what says who holds the session. Invariants:

* JSON that a session has stored travels as a text, character by character, so that no number, no
  order of keys and no blank is ever changed;
* what a column may hold is said here once, and holds for reading and for writing;
* an id refers to what is older: to a smaller id. So what refers cannot go in circles.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Set as AbstractSet
from typing import Any

import attrs

from pidurable.errors import NotJsonError, check
from pidurable.records._json import encode_plain, loads, loads_canonical
from pidurable.storage._contract import RECORDS, Head, RecordKind
from pidurable.storage._migrate import SCHEMA

FORMAT = "pidurable.export"
VERSION = 1
NUMBER_MAX = 2**62
"""Ids and commits end here: a session that begins there still has as many ahead of it."""
_MOMENT_MIN, _MOMENT_MAX = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999, in UTC microseconds."""

_SHA = re.compile("[0-9a-f]{64}")

Check = Callable[[Any, Head], str | None]
"""Says what is wrong with a value, or None."""


@attrs.frozen
class Column:
    """One column of a kind of record."""

    name: str
    type: type
    check: Check
    optional: bool = False
    """Whether it may be null."""
    refers: str | None = None
    """The kind that it refers to, which must have such a record."""


@attrs.frozen
class RecordForm:
    """What a line of one kind of record holds, in the order of the columns."""

    kind: RecordKind
    columns: tuple[Column, ...]
    names: tuple[str, ...] = attrs.field(init=False)
    written: tuple[str, ...] = attrs.field(init=False)
    """The names of the line, in the order in which it is written."""
    expected: frozenset[str] = attrs.field(init=False)
    """The same in any order."""
    links: tuple[tuple[int, Column], ...] = attrs.field(init=False)
    """The columns that refer, with their places."""
    blob_columns: tuple[int, ...] = attrs.field(init=False)
    """The places of what may lie in a blob instead."""
    key: int = attrs.field(init=False)
    """So many columns at the beginning make the key, by which records are ordered."""
    has_own_id: bool = attrs.field(init=False)
    """Whether the key is an id of the session's one counter."""

    def __attrs_post_init__(self) -> None:
        shape = RECORDS[self.kind]
        set_ = object.__setattr__
        set_(self, "names", tuple(column.name for column in self.columns))
        set_(self, "written", ("record", *self.names))
        set_(self, "expected", frozenset(self.written))
        links = ((place, each) for place, each in enumerate(self.columns) if each.refers)
        set_(self, "links", tuple(links))
        blobs = (at for at, each in enumerate(self.columns) if each.check is _json_or_blob)
        set_(self, "blob_columns", tuple(blobs))
        set_(self, "key", len(shape.key))
        set_(self, "has_own_id", self.columns[0] == _OWN)
        # A column that is added to the contract must be added here, or a copy would lose it.
        check("record" not in self.names, f"a column of {self.kind} is called as its kind is")
        check(self.names == shape.columns, f"an export of {self.kind} has other columns")
        check(self.names[: self.key] == shape.key, f"an export of {self.kind} has another key")


# --- what a column may hold -------------------------------------------------------------------


def _anything(value: Any, head: Head) -> str | None:
    return None


def _id(value: int, head: Head) -> str | None:
    if 0 < value < head.next_id:
        return None
    return f"expected an id from 1 to {head.next_id - 1}"


def _place(value: int, head: Head) -> str | None:
    return None if value == 0 else _id(value, head)


def _seq(value: int, head: Head) -> str | None:
    return None if 0 <= value <= head.seq else f"expected a commit from 0 to {head.seq}"


def _count(value: int, head: Head) -> str | None:
    return None if 0 <= value <= NUMBER_MAX else f"expected a number from 0 to {NUMBER_MAX}"


def _moment(value: int, head: Head) -> str | None:
    if _MOMENT_MIN <= value <= _MOMENT_MAX:
        return None
    return "expected a moment in the years 1 to 9999, in UTC microseconds"


def _uuid(value: str, head: Head) -> str | None:
    return None if 0 < len(value) <= 512 else "expected a uuid, of 1 to 512 characters"


def _sha(value: str, head: Head) -> str | None:
    return None if _SHA.fullmatch(value) else "expected the SHA-256 of its bytes, in hex"


def _one_of(*choices: Any) -> Check:
    listed = ", ".join(map(json.dumps, choices))

    def among(value: Any, head: Head) -> str | None:
        return None if value in choices else f"expected one of {listed}"

    return among


def _json(value: str, head: Head) -> str | None:
    if loads_canonical(value) is not None:
        return None
    try:
        loads(value)
    except NotJsonError as error:
        return f"expected a text of strict JSON ({error})"
    return None


def _json_or_blob(value: str, head: Head) -> str | None:
    if value.startswith("@"):
        return None if _SHA.fullmatch(value, 1) else "expected `@` and the SHA-256 of a blob"
    return _json(value, head)


def _number(name: str, check: Check, *, optional: bool = False) -> Column:
    return Column(name, int, check, optional)


def _text(name: str, check: Check = _anything, *, optional: bool = False) -> Column:
    return Column(name, str, check, optional)


def _link(name: str, kind: str, *, optional: bool = False) -> Column:
    return Column(name, int, _id, optional, kind)


def _soft(name: str) -> Column:
    """An id that may name what retention has removed."""
    return Column(name, int, _place, optional=True)


_OWN = _number("id", _id)
_FLAG = _one_of(0, 1)

FORMS: tuple[RecordForm, ...] = (
    RecordForm(RecordKind.BLOB, (_text("sha256", _sha), _text("bytes"))),
    RecordForm(
        RecordKind.CONVERSATION,
        (
            _OWN,
            _text("uuid", _uuid),
            _link("parent", "conversation", optional=True),
            _soft("parent_entry"),
            _link("owner", "task", optional=True),
            _text("key", optional=True),
            _text("principal"),
            _number("created_us", _moment),
        ),
    ),
    RecordForm(
        RecordKind.TASK,
        (
            _OWN,
            _link("conversation", "conversation"),
            _text("kind"),
            _number("version", _count),
            _link("owner", "task", optional=True),
            _text("key", optional=True),
            _number("background", _FLAG),
            _text("on_restart", _one_of("go", "wait", "abort"), optional=True),
            _number("deadline_us", _moment, optional=True),
            _number("created_us", _moment),
            _number("status", _one_of(0, 1, 2, 3, 4)),
            _number("started_us", _moment, optional=True),
            _number("ended_us", _moment, optional=True),
            _number("abort_us", _moment, optional=True),
            _text("abort_reason", optional=True),
            _number("invocations", _count),
            _number("recoveries", _count),
            _number("tries", _count),
            _number("ready_us", _moment),
            _text("woken_by", _one_of("tasks", "signal", "deadline"), optional=True),
            _text("blocked", optional=True),
            _text(
                "outcome_status",
                _one_of("completed", "failed", "aborted", "orphaned", "faulted"),
                optional=True,
            ),
        ),
    ),
    RecordForm(
        RecordKind.ENTRY,
        (
            _OWN,
            _link("conversation", "conversation"),
            _number("seq", _seq),
            _text("kind"),
            _soft("by_task"),
            _soft("head"),
            _text("edits", _json_or_blob, optional=True),
            _text("messages", _json_or_blob, optional=True),
            _text("data", _json_or_blob, optional=True),
            _number("at_us", _moment),
        ),
    ),
    RecordForm(RecordKind.INPUT, (_link("task", "task"), _text("value", _json_or_blob))),
    RecordForm(
        RecordKind.CHECKPOINT,
        (
            _link("task", "task"),
            _text("phase"),
            _text("value", _json),
            _number("at_us", _moment),
        ),
    ),
    RecordForm(RecordKind.WAIT, (_link("task", "task"), _text("value", _json))),
    RecordForm(RecordKind.OUTCOME, (_link("task", "task"), _text("value", _json_or_blob))),
    RecordForm(RecordKind.MEMO, (_link("task", "task"), _text("name"), _text("value", _json))),
    RecordForm(
        RecordKind.SIGNAL,
        (
            _OWN,
            _link("task", "task"),
            _text("name"),
            _text("key", optional=True),
            _text("payload", _json),
            _number("at_us", _moment),
            _number("read", _FLAG),
        ),
    ),
    RecordForm(
        RecordKind.SUBMISSION,
        (
            _OWN,
            _link("conversation", "conversation"),
            _text("kind"),
            _text("when_busy"),
            _text("request_id", optional=True),
            _text("digest"),
            _text("content", _json_or_blob),
            _number("created_us", _moment),
            _text("status", _one_of("queued", "placed", "done", "unanswered")),
            _soft("entry"),
            _soft("run"),
            _soft("answer"),
            _text("reason", optional=True),
            _text("detail", optional=True),
            _number("ended_us", _moment, optional=True),
        ),
    ),
    RecordForm(
        RecordKind.DOCUMENT,
        (
            _OWN,
            _text("name"),
            _number("scope", _one_of(0, 1, 2)),
            _number("scope_id", _place),
            _text("key"),
            _text("history", _one_of("latest", "rewindable")),
            _text("fork", _one_of("initial", "current", "as_of")),
            _number("created_seq", _seq),
            _number("retired_seq", _seq, optional=True),
        ),
    ),
    RecordForm(
        RecordKind.REVISION,
        (
            _link("document", "document"),
            _number("seq", _seq),
            _number("base", _FLAG),
            _number("version", _count),
            _text("value", _json),
        ),
    ),
    RecordForm(
        RecordKind.COMMAND,
        (
            _text("id"),
            _text("kind"),
            _text("digest"),
            _text("answer", _json),
            _number("seq", _seq),
            _number("at_us", _moment),
        ),
    ),
    RecordForm(
        RecordKind.STUB,
        (
            _text("kind"),
            _number("place", _place),
            _text("key"),
            _number("id", _id),
            _text("digest"),
            _text("status"),
            _number("at_us", _moment),
        ),
    ),
    RecordForm(RecordKind.REMOVAL, (_number("root", _id), _number("at_us", _moment))),
)

BY_NAME = {str(form.kind): form for form in FORMS}
PLACES = {form.kind: place for place, form in enumerate(FORMS)}


# --- lines ------------------------------------------------------------------------------------


def header_line(head: Head) -> bytes:
    """The first line. The epoch stays behind: it says who may write, not what is there."""
    return _line(
        {
            "format": FORMAT,
            "version": VERSION,
            "schema": SCHEMA,
            "uuid": head.uuid,
            "created_us": head.created_us,
            "seq": head.seq,
            "next_id": head.next_id,
            "clean": head.clean,
        }
    )


def record_line(form: RecordForm, row: tuple[Any, ...]) -> bytes:
    """The line of one record.

    Raises:
        UnicodeEncodeError: A text has a lone surrogate.
    """
    if form.kind is RecordKind.BLOB:
        row = row[0], base64.b64encode(row[1]).decode()
    return _line({"record": form.kind, **dict(zip(form.names, row, strict=True))})


def end_line(counts: dict[str, int], digest: str) -> bytes:
    """The last line."""
    return _line({"record": "end", "records": counts, "sha256": digest})


def _line(fields: dict[str, Any]) -> bytes:
    return f"{encode_plain(fields)}\n".encode()


def blob_bytes(row: tuple[Any, ...]) -> tuple[bytes | None, str | None]:
    """The bytes of a blob's line, or what is wrong with them."""
    try:
        data = base64.b64decode(row[1], validate=True)
    except (binascii.Error, ValueError) as error:
        return None, f"expected base64 ({error})"
    if hashlib.sha256(data).hexdigest() != row[0]:
        return None, "the bytes are not those that the SHA-256 names"
    return data, None


def read_header(fields: dict[str, Any]) -> Head | tuple[str, str]:
    """The session of a header, or the path of what is wrong with it and the problem."""
    columns = (
        Column("uuid", str, _uuid),
        Column("created_us", int, _moment),
        Column("seq", int, _count),
        Column("next_id", int, _first_free),
        Column("clean", bool, _anything),
    )
    expected = {"format", "version", "schema", *(column.name for column in columns)}
    nobody = Head("", 0, 0, 0, 1, True)
    if (problem := names_problem(fields, expected)) is not None:
        return problem
    for column in columns:
        if (wrong := value_problem(column, fields[column.name], nobody)) is not None:
            return f"$.{column.name}", wrong
    return Head(
        fields["uuid"],
        fields["created_us"],
        0,
        fields["seq"],
        fields["next_id"],
        fields["clean"],
    )


def _first_free(value: int, head: Head) -> str | None:
    return None if 1 <= value <= NUMBER_MAX else f"expected an id from 1 to {NUMBER_MAX}"


def names_problem(fields: dict[str, Any], expected: AbstractSet[str]) -> tuple[str, str] | None:
    """The path and the problem, unless a line has exactly the expected names."""
    if fields.keys() == expected:
        return None
    for name in sorted(expected - fields.keys()):
        return f"$.{name}", "it is missing"
    name = min(fields.keys() - expected)
    return f"$[{json.dumps(name[:80])}]", "nothing of this name belongs here"


def value_problem(column: Column, value: Any, head: Head) -> str | None:
    """What is wrong with a value of a column, or None."""
    if value is None and column.optional:
        return None
    if type(value) is not column.type:
        null = " or null" if column.optional else ""
        return f"expected {_TYPES[column.type]}{null}"
    return column.check(value, head)


_TYPES = {int: "an integer", str: "a text", bool: "true or false"}
