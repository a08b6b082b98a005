"""Values with a long text that grows: what was appended is put together when somebody looks.

A text is immutable, so one word more costs a copy of all of it. Here a commit that only appends to
a long text notes what it appends, and shares the list of such notes with its predecessor: each
value is a window on the list, as long as it was then. The copy is made when the value is read, once
for however many commits have passed, and what grows from there begins with the text as it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from pidurable.errors import NotJsonError
from pidurable.records import _patch

LONG_CHARACTERS_MIN = 16 * 1024
"""A text of fewer characters is copied: that costs less than the notes do."""


@final
class Grown:
    """A JSON value in which one text has grown. Immutable to whoever holds it."""

    __slots__ = ("_base", "_count", "_path", "_pieces", "_whole")

    def __init__(self, base: Any, path: str, pieces: list[str], count: int) -> None:
        self._base = base
        self._path = path
        self._pieces = pieces
        self._count = count
        self._whole: Any = None

    def more(self, path: str, pieces: list[str]) -> Grown | None:
        """This value with more at the end of the text at `path`; None if it is another text."""
        if self._whole is not None or path != self._path:
            return None
        noted = self._pieces
        if len(noted) != self._count:
            # A body that was rolled back has appended to the same list.
            noted = noted[: self._count]
        noted += pieces
        return Grown(self._base, path, noted, len(noted))

    def value(self) -> Any:
        """The value as plain JSON. Costs the size of the text, the first time."""
        if self._whole is None:
            text = "".join(self._pieces[: self._count])
            op = {"op": "append", "path": self._path, "value": text}
            self._whole = _patch.apply(self._base, [op])
        return self._whole


def plain(held: Any) -> Any:
    """The JSON of what a document holds: itself, or what it has grown to."""
    return held.value() if type(held) is Grown else held


def changed(held: Any, ops: Sequence[_patch.PatchOp]) -> Any:
    """What a large document holds after operations on it.

    Raises:
        NotJsonError: An operation does not fit the value.
    """
    path = ops[0].get("path")
    if type(path) is not str or not all(
        op.get("op") == "append" and op.get("path") == path and type(op.get("value")) is str
        for op in ops
    ):
        return _patch.apply(plain(held), ops)
    pieces = [op["value"] for op in ops]
    if type(held) is Grown:
        longer = held.more(path, pieces)
        if longer is not None:
            return longer
    value = plain(held)
    try:
        text = _patch.get(value, path)
    except NotJsonError:
        text = None
    if type(text) is not str or len(text) < LONG_CHARACTERS_MIN:
        return _patch.apply(value, ops)
    return Grown(value, path, pieces, len(pieces))
