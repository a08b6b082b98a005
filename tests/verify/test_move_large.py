"""Values as large as they may be, through an import and out again (R16)."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from pidurable.storage import Storage
from pidurable.storage._export import export_steps

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))

from exported import find, imported, lines, signed

pytestmark = pytest.mark.slow
MIB = 1024 * 1024


def written(storage: Storage) -> bytes:
    """The bytes of an export."""
    stream = io.BytesIO()
    for _ in export_steps(storage, stream, overwrite=False, folder=None):
        pass
    return stream.getvalue()


@pytest.mark.parametrize(
    ("record", "column", "value"),
    [
        ("input", "value", '"' + "x" * (16 * MIB - 2) + '"'),
        ("input", "value", "[" + "1," * 999_999 + "1]"),
        ("input", "value", "[" + "[]," * 999_999 + "[]]"),
        ("checkpoint", "value", '{"' + "k" * MIB + '":1}'),
        ("checkpoint", "value", '"' + "\\n" * (8 * MIB - 1) + '"'),
        ("task", "key", "key " * (MIB // 4)),
        ("memo", "name", "\x1b" * MIB),
        ("document", "name", "\U0010ffff" * (4 * MIB)),
    ],
    ids=["string", "million", "lists", "key", "escapes", "task key", "control", "wide"],
)
def test_what_is_as_large_as_it_may_be_is_imported_whole(
    record: str, column: str, value: str
) -> None:
    """Into memory and out again with the same bytes."""
    some = lines()
    find(some, record)[column] = value
    data = signed(some)

    report = imported(data)

    assert report.storage is not None
    assert written(report.storage) == data
