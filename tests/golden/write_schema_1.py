"""Write the golden store of schema 1, with the code that wrote schema 1 last.

Run it under a checkout of commit e6e7fa0, "Watch documents: one shared frame per commit, bounded,
with its exact patch": `PYTHONPATH=<checkout> python tests/golden/write_schema_1.py`. Of that
commit's public names it uses `open_harness`, `open_reader`, tasks with `@phase`, `@document`,
`@entry`, `Edit`, tools and the scripted model; there was no `put_blob` yet, so that large values
lie in their rows and there is no picture.
"""

from __future__ import annotations

from golden_write import write

if __name__ == "__main__":
    write(1)
