"""Files that are imported come from anywhere: each is taken whole, or refused at a line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported import DATA, RECORDS, SHA, Line, encoded, find, imported, lines, signed

from pidurable.errors import ExportFileError, PathTakenError, StorageTooNewError
from pidurable.records._json import loads
from pidurable.storage import MemoryStorage, Storage
from pidurable.storage._contract import RecordKind
from pidurable.storage._export import export_steps

MIB = 1024 * 1024


def exported(storage: Storage) -> bytes:
    """The bytes of an export."""
    stream = io.BytesIO()
    for _ in export_steps(storage, stream, overwrite=False, folder=None):
        pass
    return stream.getvalue()


def test_every_kind_is_imported_and_exported_again_with_the_same_bytes() -> None:
    """Nothing of any column is lost or written in another way; nobody holds the session."""
    data = signed(lines())
    report = imported(data)

    assert report.storage is not None
    assert exported(report.storage) == data
    assert set(report.records) == {kind.value for kind in RecordKind}
    assert (report.uuid, report.seq, report.live_tasks) == (lines()[0]["uuid"], 40, 1)
    holder = report.storage.holder()
    assert holder is not None
    assert holder.released
    assert report.storage.blob(SHA) == DATA


def test_a_copy_has_other_uuids_and_nothing_else() -> None:
    """The session and each of its conversations get one of their own."""
    report = imported(signed(lines()), as_copy=True)

    assert report.storage is not None
    expected = lines(uuid="new-0")
    find(expected, "conversation")["uuid"] = "new-1"
    find(expected, "conversation", 1)["uuid"] = "new-2"
    assert exported(report.storage) == signed(expected)
    assert (report.origin, report.uuid) == (lines()[0]["uuid"], "new-0")


def test_keys_that_the_session_gave_follow_the_uuid_of_a_copy() -> None:
    """By them work finds what it made; a key that somebody else chose stays what it is."""
    keyed = (("conversation", "key"), ("task", "key"), ("signal", "key"), ("stub", "key"))
    bent, expected = lines(), lines(uuid="new-0")
    for record, name in (*keyed, ("submission", "request_id")):
        find(bent, record)[name] = f"{lines()[0]['uuid']}:5:task"
        find(expected, record)[name] = "new-0:5:task"
    find(expected, "conversation")["uuid"] = "new-1"
    find(expected, "conversation", 1)["uuid"] = "new-2"

    report = imported(signed(bent), as_copy=True)

    assert report.storage is not None
    assert exported(report.storage) == signed(expected)


def put(record: str, number: int = 0, /, **changes: Any) -> Callable[[list[Line]], None]:
    """Change columns of a record; one that becomes `...` is left out."""

    def bend(some: list[Line]) -> None:
        line = some[0] if record == "header" else find(some, record, number)
        line.update(changes)
        for name, value in changes.items():
            if value is ...:
                del line[name]

    return bend


def add(line: Line, /, **changes: Any) -> Callable[[list[Line]], None]:
    """Add a record like another one, behind it."""

    def bend(some: list[Line]) -> None:
        some.insert(some.index(line) + 1, {**line, **changes})

    return bend


def swap(first: str, second: str) -> Callable[[list[Line]], None]:
    """Exchange two records."""

    def bend(some: list[Line]) -> None:
        a, b = (some.index(find(some, each)) for each in (first, second))
        some[a], some[b] = some[b], some[a]

    return bend


def one(record: str, number: int = 0) -> Line:
    return find(RECORDS, record, number)


DEEP = "[" * 201 + "]" * 201
BENT: list[tuple[str, Callable[[list[Line]], None]]] = [
    # The header.
    ("line 1, $.format: it is not an export", put("header", format="other")),
    ("line 1, $.version: expected 1, got '1'", put("header", version="1")),
    ("line 1, $.schema: expected 3, got 2", put("header", schema=2)),
    ("line 1, $.schema: expected 3, got True", put("header", schema=True)),
    ("line 1, $.uuid: expected a uuid", put("header", uuid="")),
    ("line 1, $.next_id: expected an id from 1", put("header", next_id=2**63 - 1)),
    ("line 1, $.next_id: expected an id from 1", put("header", next_id=0)),
    ("line 1, $.seq: expected a number from 0", put("header", seq=-1)),
    ("line 1, $.created_us: expected a moment", put("header", created_us=2**62)),
    ("line 1, $.clean: expected true or false", put("header", clean=1)),
    ("line 1, $.clean: it is missing", put("header", clean=...)),
    ('line 1, $["epoch"]: nothing of this name belongs here', put("header", epoch=7)),
    # Names and types.
    ("line 7, $.seq: it is missing", put("entry", seq=...)),
    ('line 7, $["__proto__"]: nothing of this name', put("entry", __proto__="x")),
    ("line 3, $.record: there is no such kind of record", put("conversation", record="x")),
    ("line 3, $.record: there is no such kind of record", put("conversation", record=[1])),
    ("line 7, $.seq: expected an integer, got '5'", put("entry", seq="5")),
    ("line 7, $.seq: expected an integer, got 5.0", put("entry", seq=5.0)),
    ("line 7, $.seq: expected an integer, got True", put("entry", seq=True)),
    ("line 7, $.seq: expected an integer, got None", put("entry", seq=None)),
    ("line 7, $.kind: expected a text, got 5", put("entry", kind=5)),
    ("line 7, $.by_task: expected an integer or null", put("entry", by_task="10")),
    ("line 7, $.data: expected a text or null", put("entry", data={"a": 1})),
    # Numbers.
    ("line 7, $.id: expected an id from 1 to 99, got 0", put("entry", id=0)),
    ("line 7, $.id: expected an id from 1 to 99, got -3", put("entry", id=-3)),
    ("line 7, $.id: expected an id from 1 to 99, got 100", put("entry", id=100)),
    ("line 7, $.head: expected an id from 1 to 99", put("entry", head=2**63)),
    ("line 7, $.seq: expected a commit from 0 to 40, got 41", put("entry", seq=41)),
    ("line 7, $.at_us: expected a moment in the years", put("entry", at_us=10**18)),
    ("line 5, $.status: expected one of 0, 1, 2, 3, 4", put("task", status=5)),
    ("line 5, $.background: expected one of 0, 1", put("task", background=2)),
    ("line 5, $.version: expected a number from 0", put("task", version=-1)),
    ('line 5, $.on_restart: expected one of "go"', put("task", on_restart="never")),
    ('line 14, $.status: expected one of "queued"', put("submission", status="lost")),
    ("line 15, $.scope: expected one of 0, 1, 2", put("document", scope=3)),
    # JSON inside.
    ("line 8, $.value: expected a text of strict JSON ($: a number", put("input", value="NaN")),
    ("line 8, $.value: expected a text of strict JSON", put("input", value="1e999")),
    ("line 8, $.value: expected a text of strict JSON", put("input", value='{"a":1,"a":2}')),
    ("line 8, $.value: expected a text of strict JSON", put("input", value='"\\ud800"')),
    ("line 8, $.value: expected a text of strict JSON", put("input", value='"\\u0000"')),
    ("line 8, $.value: expected a text of strict JSON", put("input", value=str(2**64))),
    ("line 8, $.value: expected a text of strict JSON", put("input", value="9" * 5_000)),
    ("line 8, $.value: expected a text of strict JSON", put("input", value=DEEP)),
    ("line 8, $.value: expected a text of strict JSON", put("input", value="[" * 100_000)),
    ("line 8, $.value: expected a text of strict JSON", put("input", value="")),
    ("line 8, $.value: expected `@` and the SHA-256", put("input", value="@" + "A" * 64)),
    ("line 8, $.value: there is no such blob", put("input", value="@" + "0" * 64)),
    ("line 9, $.value: expected a text of strict JSON", put("checkpoint", value=f"@{SHA}")),
    ("line 13, $.payload: one that was read keeps no payload", put("signal", payload="1")),
    # Blobs.
    ("line 2, $.bytes: expected base64", put("blob", bytes="AGJ5*dGVz")),
    ("line 2, $.bytes: expected base64", put("blob", bytes="AGJ5dGV")),
    ("line 2, $.bytes: the bytes are not those", put("blob", bytes="AGJ5dGVy")),
    ("line 2, $.sha256: expected the SHA-256", put("blob", sha256=SHA.upper())),
    # References.
    ("line 7, $.conversation: there is no conversation 4", put("entry", id=50, conversation=4)),
    ("line 7, $.conversation: expected the id of something older", put("entry", conversation=20)),
    ("line 4, $.parent: expected the id of something older", put("conversation", 1, parent=20)),
    ("line 4, $.parent: there is no conversation 2", put("conversation", 1, parent=2)),
    ("line 4, $.owner: there is no task 12", put("conversation", 1, owner=12)),
    ("line 6, $.owner: expected the id of something older", put("task", 1, owner=11)),
    ("line 6, $.owner: there is no task 9", put("task", 1, owner=9)),
    ("line 8, $.task: there is no task 20", put("input", task=20)),
    ("line 16, $.document: there is no document 10", put("revision", document=10)),
    ("line 15, $.scope_id: there is no older conversation 2", put("document", scope_id=2)),
    ("line 15, $.scope_id: there is no older task 1 ", put("document", scope=2)),
    ("line 15, $.scope_id: expected 0 for the session", put("document", scope=0)),
    ("line 15, $.retired_seq: expected no commit before", put("document", retired_seq=5)),
    ("line 16, $.base: expected a base first", put("revision", base=0)),
    # Order, and what may be there once.
    ("line 15, $.document: there is no document 30", swap("document", "revision")),
    ("line 18, $.record: expected no more of this kind", swap("command", "stub")),
    ("line 8, $.id: it occurs twice", add(one("entry"))),
    ("line 8, $.id: expected rising keys", add(one("entry"), id=2)),
    ("line 8, $.id: it is the id of a task already", add(one("entry"), id=11)),
    ("line 6, $.id: it is the id of a conversation already", put("task", 1, id=20)),
    ("line 7: it contradicts a line before it", add(one("task", 1), id=13)),
    ("line 13, $.name: it occurs twice", add(one("memo"))),
    ("line 14: it contradicts a line before it", add(one("signal"), id=13)),
    ("line 15: it contradicts a line before it", add(one("submission"), id=13)),
    ("line 16: it contradicts a line before it", add(one("document"), id=31)),
    ("line 19, $.key: it occurs twice", add(one("stub"))),
]  # fmt: skip


@pytest.mark.parametrize(("says", "bend"), BENT, ids=[f"{n}" for n in range(len(BENT))])
def test_a_line_that_cannot_be_is_refused_with_its_place(
    says: str, bend: Callable[[list[Line]], None]
) -> None:
    """Although the file is signed: each error names the line and the path."""
    some = lines()
    bend(some)

    with pytest.raises(ExportFileError) as caught:
        imported(signed(some))

    assert str(caught.value).startswith(f"-, {says}")


@pytest.mark.parametrize(
    ("says", "data"),
    [
        ("-, line 1: it is not an export: it is empty", b""),
        ("-, line 1, $: it is not an export: not UTF-8", b"SQLite format 3\x00\xff\n"),
        ("-, line 1, $: it is not an export: not JSON", b"hello\n"),
        ("-, line 1: it is not an export: the file was cut", encoded(lines()[0])[:-1]),
        ("-, line 1, $: it is not an export: expected an object", b"[1]\n"),
        ("-, line 1, $: it is not an export: nested", b"[" * 100_000 + b"\n"),
        ("-, line 2: the file was cut: its last line", encoded(lines()[0])),
        ("-, line 21: expected nothing behind", signed(lines()) + b"\n"),
        ("-, line 21: expected nothing behind", signed(lines()) + bytes(1_000)),
        ("-, line 20, $.sha256: the lines before", signed(lines()).replace(b"go", b"no")),
        ("-, line 20, $.records: expected", signed(lines()).replace(b'"blob":1', b'"blob":2')),
        ("-, line 2, $.a: an object must", encoded(lines()[0]) + b'{"a":{"b":1,"b":2}}\n'),
        ("-, line 2, $: an object must", encoded(lines()[0]) + b'{"record":"x","record":"y"}\n'),
        ("-, line 2, $.a: a string must have no NUL", encoded(lines()[0]) + b'{"a":"\\u0000"}\n'),
        ("-, line 2, $: not JSON", signed([lines()[0], b"\n"])),
        ("-, line 2, $: not UTF-8", encoded(lines()[0]) + b'{"record":"\xed\xa0\x80"}\n'),
    ],
)  # fmt: skip
def test_a_file_that_is_no_export_or_was_changed_is_refused(says: str, data: bytes) -> None:  # C075
    """Cut, changed, with something behind it, or something else from its first line on."""
    with pytest.raises(ExportFileError) as caught:
        imported(data)

    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("name", ["version", "schema"])
def test_an_export_of_a_newer_program_says_so(name: str) -> None:
    """It is not called damaged: the way out is another one."""
    with pytest.raises(StorageTooNewError, match="Upgrade pidurable"):
        imported(signed(lines(**{name: 9})))


class Endless(io.RawIOBase):
    """A line without an end."""

    def __init__(self) -> None:
        self.given = 0
        self._begin = encoded(lines()[0])

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._begin or b"x" * len(buffer)
        self._begin = b""
        buffer[: len(data)] = data[: len(buffer)]
        self.given += len(data)
        return len(data)


def test_a_line_without_an_end_is_refused_when_it_is_too_long() -> None:
    """Not more of it is read than the longest line that can be."""
    endless = Endless()
    reader: Any = io.BufferedReader(endless)

    with pytest.raises(ExportFileError, match="line 2: it has more than 1049600 bytes"):
        imported(reader, value_bytes_max=512)

    assert endless.given < 2 * MIB


def test_a_value_over_the_limit_is_refused_and_the_limit_can_be_raised() -> None:
    """A limit is tested at its value and one above."""
    some = lines()
    find(some, "input")["value"] = json.dumps("x" * 98)
    data = signed(some)

    assert imported(data, value_bytes_max=100).records["input"] == 1
    with pytest.raises(ExportFileError, match=r"\$\.value: at most 99 bytes are allowed"):
        imported(data, value_bytes_max=99)


def test_nothing_is_left_of_a_refused_file_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """No store, no part of one, no lock; and what is at the path stays as it is."""
    store = tmp_path / "new.sqlite"
    some = lines()
    find(some, "removal")["root"] = 0
    with pytest.raises(ExportFileError):
        imported(signed(some), str(store))
    assert list(tmp_path.iterdir()) == []

    store.write_text("mine")
    with pytest.raises(PathTakenError):
        imported(signed(lines()), str(store))
    assert store.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [store]


def test_the_line_that_takes_a_key_twice_is_found_in_a_file_too(tmp_path: Path) -> None:
    """SQLite refuses the whole batch; the line is looked for."""
    some = lines()
    add(one("submission"), id=13)(some)

    with pytest.raises(ExportFileError, match=r"line 15: it contradicts a line.*request"):
        imported(signed(some), str(tmp_path / "new.sqlite"))

    assert list(tmp_path.iterdir()) == []


def test_the_log_of_a_store_that_was_removed_is_not_taken_for_the_new_ones(tmp_path: Path) -> None:
    """SQLite would replay it into the imported store."""
    (tmp_path / "new.sqlite-wal").write_bytes(b"frames")

    with pytest.raises(PathTakenError, match=r"new\.sqlite-wal exists already"):
        imported(signed(lines()), str(tmp_path / "new.sqlite"))


def test_every_line_is_one_json_object_that_others_can_read() -> None:
    """Whatever is in it, a line has no break inside and is strict JSON."""
    some = lines()
    find(some, "entry")["kind"] = "a\n\r\u2028\x85\x1c\ud7ff\U0010ffff"
    report = imported(signed(some))
    assert isinstance(report.storage, MemoryStorage)

    found = exported(report.storage).split(b"\n")

    assert [loads(line) for line in found[:-2]] == some
    assert found[-1] == b""
