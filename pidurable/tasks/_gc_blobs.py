"""Blobs that nothing refers to: marked by looking through every stored text, then swept.

A digest, that is 64 hexadecimal digits, anywhere in a text counts as a reference, whoever wrote it
and whatever it means there. So nothing has to be declared, and what is taken for a reference by
mistake only keeps some bytes too long. Texts that lie in blobs themselves are looked through too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pidurable.records import _json, _patch
from pidurable.session._blobs import is_reference
from pidurable.storage import RECORDS, RecordKind, Storage

WINDOW = 50_000
"""Most blobs that are looked for at once, which bounds what is kept in memory."""
ROWS = 50
"""Rows that are looked through in one step. One of them may hold up to 64 KiB, rarely more."""

RUN_MAX = 4_096
"""Digits in a row of which each place is looked at in the loop."""

_RUN = re.compile("[0-9a-f]{64,}")
DIGITS = 64
"""Of the name of a blob."""
_APPENDS = '"append"'
_NO_TEXT = frozenset({"digest", "sha256"})
"""Columns whose digests are those of a content, and refer to nothing."""

_KINDS = tuple(kind for kind in RecordKind if kind is not RecordKind.BLOB)
_TEXTS = {
    kind: tuple(place for place, name in enumerate(RECORDS[kind].columns) if name not in _NO_TEXT)
    for kind in _KINDS
}

Skip = Callable[[RecordKind, tuple[Any, ...]], bool]


def digests_in(text: str) -> Iterator[str]:
    """Every digest in a text; of a longer run of digits, each that it may hold."""
    for found in _RUN.finditer(text):
        run = found[0]
        for first in range(len(run) - DIGITS + 1):
            yield run[first : first + DIGITS]


def blob_windows(storage: Storage) -> Iterator[dict[str, int] | None]:
    """Give all blobs with their sizes, as many at a time as are looked for at once."""
    window: dict[str, int] = {}
    after = ""
    while True:
        page = storage.blob_sizes(after=after, limit=1_000)
        window.update(page)
        if not page or len(window) >= WINDOW:
            if window:
                yield window
            window = {}
        if not page:
            return
        yield None
        after = page[-1][0]


def keep_referenced(
    storage: Storage, wanted: dict[str, int], *, skip: Skip | None = None
) -> Iterator[None]:
    """Take out of `wanted` whatever a stored text refers to.

    Args:
        storage: Shows large values as they are stored, by reference.
        wanted: Blobs by name. Others may take names out meanwhile.
        skip: Rows that are not to be looked at.
    """
    followed: set[str] = set()
    grown: set[int] = set()
    """Documents in which a text grew: a digest may have come in two parts."""
    for kind in _KINDS:
        after: tuple[Any, ...] | None = None
        key = tuple(RECORDS[kind].columns.index(name) for name in RECORDS[kind].key)
        while wanted and (rows := storage.scan(kind, after=after, limit=ROWS)):
            after = tuple(rows[-1][place] for place in key)
            for row in rows:
                if skip is None or not skip(kind, row):
                    texts = (row[place] for place in _TEXTS[kind])
                    yield from _look_through(storage, texts, wanted, followed)
                    if kind is RecordKind.REVISION and _APPENDS in row[-1]:
                        grown.add(row[0])
            yield None
    for document in sorted(grown):
        if not wanted:
            return
        take_out(_json.dumps(_newest(storage, document), path="$"), wanted)
        yield None


def _look_through(
    storage: Storage, texts: Iterable[object], wanted: dict[str, int], followed: set[str]
) -> Iterator[None]:
    for text in texts:
        if type(text) is not str or len(text) < DIGITS:
            continue
        take_out(text, wanted)
        if is_reference(text) and text[1:] not in followed:
            # What lies there is a stored text like any other. What is damaged refers to nothing
            # that could be found; it is told when somebody looks at it.
            followed.add(text[1:])
            data = storage.blob(text[1:])
            if data is not None:
                take_out(data.decode(errors="replace"), wanted)
            yield None


def _newest(storage: Storage, document: int) -> Any:
    value: Any = None
    for row in storage.revisions(document):
        stored = _json.loads_stored(row.value)
        value = stored if row.base else _patch.apply(value, stored)
    return value


def take_out(text: str, wanted: dict[str, int]) -> None:
    """Take out of `wanted` what a text refers to."""
    for digest in digests_in(text):
        wanted.pop(digest, None)


def take_out_quickly(text: str, wanted: dict[str, int]) -> None:
    """The same in the loop, where a run of a million digits would take too long.

    Such a one may refer to anything, so nothing is wanted any more; the next collection looks.
    """
    if any(len(found[0]) > RUN_MAX for found in _RUN.finditer(text)):
        wanted.clear()
    else:
        take_out(text, wanted)
