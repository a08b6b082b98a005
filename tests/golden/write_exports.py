"""Write what an export of each golden store holds, once today's code has brought it here.

To be run when the schema, or the form of an export, has changed on purpose: what differs then is
to be looked at (`xz -dc`), line by line, before it is kept. Nothing else writes these files.
"""

from __future__ import annotations

import lzma
import tempfile
from pathlib import Path

from golden_stores import HERE, SCHEMAS, export, unpack

from pidurable.storage import SqliteStorage

if __name__ == "__main__":
    for schema in SCHEMAS:
        with tempfile.TemporaryDirectory() as folder:
            store = unpack(schema, Path(folder))
            SqliteStorage(store, create=False).close()
            (HERE / f"schema_{schema}.jsonl.xz").write_bytes(lzma.compress(export(store), preset=9))
