"""Checks of a store that no running system makes: is the file sound, does what is in it agree.

SQLite checks pages and indexes; the rules here are ours: every record has what it belongs to, live
work has what it goes on from, ended work has its outcome, stored JSON can be read, and blobs are
what their names say. Everything is read over one connection of its own that cannot write, and
works beside a holder. What is found is text for people, a bounded number of each kind; a check
that itself fails is what is found.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any, final

import apsw
import attrs

from pidurable.errors import (
    NotJsonError,
    PidurableError,
    StorageAccessError,
    StorageCorruptError,
)
from pidurable.records._json import loads_stored
from pidurable.storage import _sqlite_open as _open, _sqlite_place as _place

EXAMPLES_MAX = 5
"""Records that are named where many have the same thing wrong."""
PROBLEMS_MAX = 20
ROWS_AT_ONCE = 500
TABLES_BYTES_MAX = 256 * 1024 * 1024
"""Above this the size of each table is measured only where everything is checked: each page is
read for it."""

_RULES: tuple[tuple[str, str], ...] = (
    (
        "tasks of a conversation that is not there",
        "select id from tasks t where not exists"
        " (select 1 from conversations c where c.id = t.conversation)",
    ),
    (
        "tasks whose owner is not there",
        "select id from tasks t where owner is not null and not exists"
        " (select 1 from tasks o where o.id = t.owner)",
    ),
    (
        "conversations whose owner is not there",
        "select id from conversations c where owner is not null and not exists"
        " (select 1 from tasks o where o.id = c.owner)",
    ),
    (
        "forks of an entry that is not there",
        "select id from conversations c where parent_entry is not null and not exists"
        " (select 1 from entries e where e.id = c.parent_entry)",
    ),
    (
        "entries of a conversation that is not there",
        "select id from entries e where not exists"
        " (select 1 from conversations c where c.id = e.conversation)",
    ),
    (
        "live tasks below an ended owner that is not theirs any more",
        "select t.id from tasks t join tasks o on o.id = t.owner"
        " where t.status < 4 and o.status = 4 and t.background = 0",
    ),
    (
        "live tasks without an input",
        "select id from tasks t where status < 4 and not exists"
        " (select 1 from inputs i where i.task = t.id)",
    ),
    (
        "live tasks without a checkpoint to go on from",
        "select id from tasks t where status < 3 and not exists"
        " (select 1 from checkpoints k where k.task = t.id)",
    ),
    (
        "waiting tasks without what they wait for",
        "select id from tasks t where status = 2 and not exists"
        " (select 1 from waits w where w.task = t.id)",
    ),
    (
        "ended tasks without an outcome",
        "select id from tasks t where status = 4 and not exists"
        " (select 1 from outcomes o where o.task = t.id)",
    ),
    (
        "checkpoints of tasks that are not live",
        "select task from checkpoints k where not exists"
        " (select 1 from tasks t where t.id = k.task and t.status < 4)",
    ),
    (
        "inputs, outcomes, memos or signals of tasks that are not there",
        "select task from (select task from inputs union select task from outcomes"
        " union select task from memos union select task from signals) r"
        " where not exists (select 1 from tasks t where t.id = r.task)",
    ),
    (
        "revisions of a document that is not there",
        "select distinct document from revisions r where not exists"
        " (select 1 from documents d where d.id = r.document)",
    ),
    (
        "living documents that have no whole value to begin with",
        "select id from documents d where retired_seq is null and not exists"
        " (select 1 from revisions r where r.document = d.id and r.base = 1)",
    ),
    (
        "submissions whose entry is not there",
        "select id from submissions s where entry is not null and not exists"
        " (select 1 from entries e where e.id = s.entry)",
    ),
    (
        "records with an id that the counter has not given out",
        "select id from (select max(id) id from tasks union all select max(id) from entries"
        " union all select max(id) from conversations union all select max(id) from documents"
        " union all select max(id) from submissions union all select max(id) from signals)"
        " where id >= (select next_id from session)",
    ),
    (
        "commits with a number that is still to come",
        "select seq from (select max(seq) seq from entries) where seq > (select seq from session)",
    ),
)

_JSON_COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    # (what it is called, table, what names the row, column)
    ("the input of task", "inputs", "task", "value"),
    ("the checkpoint of task", "checkpoints", "task", "value"),
    ("the wait of task", "waits", "task", "value"),
    ("the outcome of task", "outcomes", "task", "value"),
    ("a memo of task", "memos", "task", "value"),
    ("the payload of signal", "signals", "id", "payload"),
    ("the edits of entry", "entries", "id", "edits"),
    ("the messages of entry", "entries", "id", "messages"),
    ("the data of entry", "entries", "id", "data"),
    ("the content of submission", "submissions", "id", "content"),
    ("a revision of document", "revisions", "document", "value"),
    ("the answer to command", "commands", "id", "answer"),
)


def sqlite_version() -> str:
    """The version of SQLite that runs here."""
    return str(apsw.sqlite_lib_version())


@attrs.frozen(kw_only=True)
class StoreSize:
    """How much of what a store has."""

    page_bytes: int
    pages: int
    free_pages: int
    conversations: int
    entries: int
    tasks: int
    documents: int
    blobs: int
    blob_bytes: int
    tables: tuple[tuple[str, int], ...]
    """Bytes by table with its indexes, the largest first; empty where it was not measured."""


@final
class StoreCheck:
    """One look at a store; close it afterwards.

    Raises:
        StorageAccessError: The file cannot be opened.
        StorageCorruptError: It is damaged so that nothing can be read.
    """

    def __init__(self, store: str) -> None:
        self._store = os.path.realpath(store)
        try:
            self._connection, self._still = _place.connect_reader(self._store, None, power=False)
        except apsw.Error as error:
            raise _open.map_error(error, self._store) or error from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            rows = self._connection.execute(statement, values).fetchall()
        except apsw.Error as error:
            mapped: PidurableError | None = _open.map_error(error, self._store)
            if isinstance(error, apsw.SQLError):
                # A table that is missing is damage here, and no mistake of the statement.
                mapped = StorageCorruptError(self._store, str(error))
            raise mapped or error from error
        if self._still is not None and _place.look_still(self._store) != self._still:
            raise StorageAccessError(self._store, "it changed while it was looked at; look again")
        return rows

    def _one(self, statement: str) -> int:
        return int(self._rows(statement)[0][0] or 0)

    def is_store(self) -> bool:
        """Whether the file says that it is one of ours."""
        return self._one("pragma application_id") == _open.APPLICATION_ID

    def schema(self) -> int:
        """The number of the schema that the store has."""
        return self._one("pragma user_version")

    def has_table(self, name: str) -> bool:
        """Whether the store's schema has a table."""
        return name in {row[0] for row in self._rows("select name from sqlite_schema")}

    # --- soundness -----------------------------------------------------------------------

    def pages(self, *, full: bool) -> list[str]:
        """What SQLite finds wrong with the file: its pages, or with `full` its indexes too."""
        pragma = "integrity_check" if full else "quick_check"
        found = [str(row[0]) for row in self._rows(f"pragma {pragma}({PROBLEMS_MAX})")]
        return [] if found == ["ok"] else found

    def references(self) -> list[str]:
        """What refers to a row that is not there, where the schema declares it."""
        found = self._rows("pragma foreign_key_check")
        return [
            f"row {row} of {table} refers to a row of {parent} that is not there"
            for table, row, parent, _ in found[:PROBLEMS_MAX]
        ]

    def rules(self) -> list[str]:
        """Which records disagree with each other."""
        wrong = []
        for what, statement in _RULES:
            try:
                ids = [row[0] for row in self._rows(f"{statement} limit {EXAMPLES_MAX + 1}")]
            except StorageCorruptError as damaged:
                wrong.append(f"{what}: nobody can tell ({damaged.problem})")
                continue
            if ids:
                more = " and others" if len(ids) > EXAMPLES_MAX else ""
                wrong.append(f"{what}: {', '.join(map(str, ids[:EXAMPLES_MAX]))}{more}")
        return wrong

    def values(self) -> list[str]:
        """Which stored JSON cannot be read, and which blob is missing or not what its name says."""
        wrong: list[str] = []
        for problem in (*self._unread_values(), *self._wrong_blobs()):
            wrong.append(problem)
            if len(wrong) == PROBLEMS_MAX:
                wrong.append("and perhaps more")
                break
        return wrong

    def _unread_values(self) -> Iterator[str]:
        for what, table, key, column in _JSON_COLUMNS:
            if not self.has_table(table):
                continue
            try:
                yield from self._unread_in(what, table, key, column)
            except StorageCorruptError as damaged:
                yield f"{what} cannot be looked at ({damaged.problem})"

    def _unread_in(self, what: str, table: str, key: str, column: str) -> Iterator[str]:
        for name, text in self._each(table, key, column):
            if text is None:
                continue
            if text.startswith("@"):
                if not self._has_blob(text[1:]):
                    yield f"{what} {name} is in blob {text[1:]}, which is missing"
                continue
            try:
                loads_stored(text)
            except (NotJsonError, ValueError, RecursionError) as error:
                yield f"{what} {name} is not JSON ({error})"

    def _each(self, table: str, key: str, column: str) -> Iterator[tuple[Any, str | None]]:
        """Every value of a column, read in parts: a read of ours holds back no checkpoint."""
        order = {"memos": "task, name", "revisions": "document, seq", "commands": "id"}
        place = order.get(table, "rowid")
        marks = ", ".join("?" * len(place.split(", ")))
        after: tuple[Any, ...] | None = None
        while True:
            where = f"where ({place}) > ({marks})" if after is not None else ""
            rows = self._rows(
                f"select {key}, {column}, {place} from {table} {where}"  # noqa: S608 - no input
                f" order by {place} limit {ROWS_AT_ONCE}",
                after or (),
            )
            yield from ((row[0], row[1]) for row in rows)
            if len(rows) < ROWS_AT_ONCE:
                return
            after = tuple(rows[-1][2:])

    def _has_blob(self, name: str) -> bool:
        statement = "select 1 from blobs where sha256 = ?"
        return bool(self._rows(statement, (name,)))

    def _wrong_blobs(self) -> Iterator[str]:
        after = ""
        while True:
            # One at a time: a blob may be large.
            rows = self._rows(
                "select sha256, bytes from blobs where sha256 > ? order by sha256 limit 1", (after,)
            )
            if not rows:
                return
            after, data = rows[0]
            if hashlib.sha256(data).hexdigest() != after:
                yield f"blob {after} has other bytes than its name says"

    # --- size ----------------------------------------------------------------------------

    def size(self, *, full: bool) -> StoreSize:
        """Count records and pages."""
        page_bytes, pages = self._one("pragma page_size"), self._one("pragma page_count")
        tables: tuple[tuple[str, int], ...] = ()
        if full or page_bytes * pages <= TABLES_BYTES_MAX:
            rows = self._rows(
                "select s.tbl_name, sum(d.pgsize) from dbstat d"
                " join sqlite_schema s on s.name = d.name where d.aggregate = 1"
                " group by s.tbl_name order by 2 desc, 1"
            )
            tables = tuple((str(name), int(size)) for name, size in rows)
        return StoreSize(
            page_bytes=page_bytes,
            pages=pages,
            free_pages=self._one("pragma freelist_count"),
            conversations=self._one("select count(*) from conversations"),
            entries=self._one("select count(*) from entries"),
            tasks=self._one("select count(*) from tasks"),
            documents=self._one("select count(*) from documents where retired_seq is null"),
            blobs=self._one("select count(*) from blobs"),
            blob_bytes=self._one("select sum(length(bytes)) from blobs"),
            tables=tables,
        )
