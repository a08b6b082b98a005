"""What the lines of an export must be for a session to be made of them.

A file may come from anywhere, so nothing in it is believed: each line is checked alone (its names,
types, numbers, JSON) and against those before it (order, ids, what it refers to). What a backend's
unique indexes would refuse is left to them. Memory does not grow with the session but for 8 bytes
for each conversation, task and document, which are what others refer to.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

import attrs

from pidurable.errors import NotJsonError, show
from pidurable.records._json import loads, loads_canonical
from pidurable.storage._contract import Head, RecordKind
from pidurable.storage._export_form import (
    BY_NAME,
    FORMS,
    PLACES,
    Column,
    RecordForm,
    blob_bytes,
    names_problem,
    value_problem,
)

_REFERRED = ("conversation", "task", "document")
_CONVERSATION, _TASK = 1, 2  # scopes


@attrs.define(eq=False)
class WrongLineError(Exception):
    """A line cannot be taken. Turned into the error for callers by whoever knows the file."""

    problem: str
    path: str = ""
    value: str = ""
    line: int | None = None
    """Another line than the one at hand."""


class _Ids:
    """Ids that came in rising order: 8 bytes each."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids = array("q")

    def add(self, id: int) -> None:
        self._ids.append(id)

    def __contains__(self, id: int) -> bool:
        place = bisect_left(self._ids, id)
        return place < len(self._ids) and self._ids[place] == id


@attrs.define(eq=False)
class ImportChecks:
    """The state of one import: what came so far."""

    head: Head
    value_bytes_max: int
    counts: dict[str, int] = attrs.Factory(dict)
    _place: int = 0
    """Which kind the lines are at."""
    _key: tuple[Any, ...] | None = None
    """The key of the last line, if it was of the same kind."""
    _ids: dict[str, _Ids] = attrs.Factory(lambda: {kind: _Ids() for kind in _REFERRED})
    _owners: array[int] = attrs.Factory(lambda: array("q"))
    """(owner, line) of conversations, whose owners are among the tasks that come later."""

    def record(self, fields: dict[str, Any], line: int) -> tuple[RecordForm, tuple[Any, ...]]:
        """The row of a line; of a blob with its bytes.

        Raises:
            WrongLineError: It cannot be taken.
        """
        form = self._form(fields)
        if (problem := names_problem(fields, form.expected)) is not None:
            raise WrongLineError(problem[1], problem[0])
        row = tuple(map(fields.__getitem__, form.names))
        large, head = self.value_bytes_max // 4, self.head
        for column, value in zip(form.columns, row, strict=True):
            if value is None and column.optional:
                continue
            wrong = value_problem(column, value, head)
            if wrong is None and type(value) is str and len(value) > large:
                wrong = self._size_problem(column, value)
            if wrong is not None:
                raise WrongLineError(wrong, f"$.{column.name}", show(value))
        self._in_order(form, row)
        self._refers(form, row, line)
        check = _TOGETHER.get(form.kind)
        if check is not None:
            check(self, row)
        self.counts[form.kind.value] = self.counts.get(form.kind, 0) + 1
        if form.kind is RecordKind.BLOB:
            data, wrong = blob_bytes(row)
            if wrong is not None or data is None:
                raise WrongLineError(wrong or "", "$.bytes", show(row[1], length=40))
            row = row[0], data
        return form, row

    def finish(self) -> None:
        """Check what only the end can tell.

        Raises:
            WrongLineError: Something refers to what did not come.
        """
        owners = self._owners
        for place in range(0, len(owners), 2):
            if owners[place] not in self._ids["task"]:
                problem = f"there is no task {owners[place]} in this file"
                raise WrongLineError(problem, "$.owner", line=owners[place + 1])

    def _form(self, fields: dict[str, Any]) -> RecordForm:
        name = fields.get("record")
        form = BY_NAME.get(name) if isinstance(name, str) else None
        if form is None:
            raise WrongLineError("there is no such kind of record", "$.record", show(name))
        place = PLACES[form.kind]
        if place < self._place:
            problem = f"expected no more of this kind after the first {FORMS[self._place].kind}"
            raise WrongLineError(problem, "$.record", show(name))
        if place > self._place:
            self._place, self._key = place, None
        return form

    def _size_problem(self, column: Column, value: str) -> str | None:
        # As text, three bytes of a blob take four characters.
        size = len(value) // 4 * 3 - 2 if column.name == "bytes" else len(value.encode())
        if size <= self.value_bytes_max:
            return None
        return f"at most {self.value_bytes_max} bytes are allowed (value_bytes_max)"

    def _in_order(self, form: RecordForm, row: tuple[Any, ...]) -> None:
        key = row[: form.key]
        if self._key is not None and key <= self._key:
            path = f"$.{form.names[form.key - 1]}"
            what = "it occurs twice" if key == self._key else "expected rising keys"
            raise WrongLineError(what, path, show(key if form.key > 1 else key[0]))
        self._key = key
        if not form.has_own_id:
            return
        # One counter gives all ids. Entries, signals and submissions are not kept: too many.
        for kind, ids in self._ids.items():
            if row[0] in ids:
                raise WrongLineError(f"it is the id of a {kind} already", "$.id", show(row[0]))
        if form.kind in self._ids:
            self._ids[form.kind].add(row[0])

    def _refers(self, form: RecordForm, row: tuple[Any, ...], line: int) -> None:
        for place, column in form.links:
            value = row[place]
            if value is None:
                continue
            if form.has_own_id and value >= row[0]:
                problem = "expected the id of something older, a smaller one than its own"
                raise WrongLineError(problem, f"$.{column.name}", show(value))
            if form.kind is RecordKind.CONVERSATION and column.refers == "task":
                self._owners.extend((value, line))
            elif value not in self._ids[column.refers or ""]:
                problem = f"there is no {column.refers} {value} in this file"
                raise WrongLineError(problem, f"$.{column.name}")

    # --- what only several columns tell --------------------------------------------------

    def _document(self, row: tuple[Any, ...]) -> None:
        id, _name, scope, scope_id, _key, _history, _fork, created, retired = row
        kind = {_CONVERSATION: "conversation", _TASK: "task"}.get(scope)
        if kind is None:
            if scope_id != 0:
                raise WrongLineError("expected 0 for the session", "$.scope_id", show(scope_id))
        elif scope_id not in self._ids[kind] or scope_id >= id:
            raise WrongLineError(f"there is no older {kind} {scope_id} in this file", "$.scope_id")
        if retired is not None and retired < created:
            raise WrongLineError("expected no commit before its first", "$.retired_seq")

    def _signal(self, row: tuple[Any, ...]) -> None:
        if row[6] == 1 and row[4] != "null":
            raise WrongLineError("one that was read keeps no payload", "$.payload", show(row[4]))

    _revised: int = 0

    def _revision(self, row: tuple[Any, ...]) -> None:
        if row[0] != self._revised and row[2] != 1:
            raise WrongLineError("expected a base first", "$.base", show(row[2]))
        self._revised = row[0]


_TOGETHER = {
    RecordKind.DOCUMENT: ImportChecks._document,
    RecordKind.SIGNAL: ImportChecks._signal,
    RecordKind.REVISION: ImportChecks._revision,
}


def parse_line(data: bytes) -> tuple[dict[str, Any], bool]:
    """The fields of a line, and whether it is written as an export writes them.

    Raises:
        WrongLineError: It is not one JSON object, strictly.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    quick = loads_canonical(text[:-1])
    try:
        value = loads(data) if quick is None else quick[0]
    except NotJsonError as error:
        raise WrongLineError(error.problem, error.path, error.value) from None
    if not isinstance(value, dict):
        raise WrongLineError("expected an object", "$", show(value))
    return value, quick is not None
