"""Write a golden store: live its lives, say what is in it, end a copy of it, and pack it.

To be run under the code of the schema that is to be written, by `write_schema_N.py`; what it says
is found in the store, and how it ends, is what that code found and did. Writing one again gives
another store (ids, moments and keys differ), so it is done once and the files are kept.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import golden_work as work
import trio

HERE = Path(__file__).parent
PACKED = ("golden.sqlite", "golden.sqlite-wal", "ledger")
"""The shared memory and the lock file are of the process that was killed, and stay behind."""
ENDS = 3
"""So many copies are ended: what differs between them is no expectation."""


Life = Callable[[Path], Any]


def write(
    schema: int,
    *,
    lives: Sequence[Life] = (work.begin, work.grow, work.cut),
    afterwards: Life | None = None,
) -> None:
    """Write `schema_N.tar.xz` and `schema_N.json` beside this file.

    Args:
        lives: What is lived, each to its kill.
        afterwards: What others do to the store that nobody holds any more.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        folder.mkdir()
        for life in lives:
            code = work.live(life, folder)
            if code != -9:
                sys.exit(f"the life {life.__name__} was to be killed and ended with {code}")
        if afterwards is not None and work.live(afterwards, folder) != 0:
            sys.exit("what comes afterwards failed")
        pack(folder, HERE / f"schema_{schema}.tar.xz")
        ends: list[Any] = []
        for number in range(ENDS):
            copy = Path(name) / f"end-{number}"
            shutil.copytree(folder, copy)
            if work.live(work.end, copy) != 0:
                sys.exit("a copy did not end")
            ends.append(trio.run(work.ended_in, copy))
        if any(each != ends[0] for each in ends):
            sys.exit("copies of one store ended in different ways")
        said = {"schema": schema, "found": trio.run(work.found_in, folder), "end": ends[0]}
    text = rendered(said) + "\n"
    (HERE / f"schema_{schema}.json").write_text(text, encoding="utf-8")


def rendered(value: Any, depth: int = 0) -> str:
    """JSON with a line for each record, so that a difference is a line."""
    if depth < 3 and isinstance(value, dict) and value:
        items = (f'"{key}": {rendered(each, depth + 1)}' for key, each in sorted(value.items()))
        return "{\n" + ",\n".join(items) + "\n}"
    if depth < 3 and isinstance(value, list) and value:
        return "[\n" + ",\n".join(rendered(each, 3) for each in value) + "\n]"
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def pack(folder: Path, path: Path) -> None:
    """Pack the files of a killed holder, with nothing in it of who packed them."""
    with tarfile.open(path, "w:xz", preset=9) as packed:
        beside = sorted((folder / "golden.sqlite.commands").glob("*"))
        names = [*PACKED, *(str(path.relative_to(folder)) for path in beside if path.is_file())]
        for name in names:
            data = (folder / name).read_bytes()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o600
            packed.addfile(info, io.BytesIO(data))
