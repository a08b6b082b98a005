"""Write the golden store of schema 2, with the code that wrote schema 2 last.

Run it under a checkout of commit 04ce3e7, "Let both sets of teeth share how a planted copy is
played and what is printed of it": `PYTHONPATH=<checkout> python tests/golden/write_schema_2.py`. Of
that commit's public names it uses those of schema 1 and `put_blob`; large values are blobs.
"""

from __future__ import annotations

from golden_write import write

if __name__ == "__main__":
    write(2)
