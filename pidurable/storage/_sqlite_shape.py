"""What a store of today's schema consists of, so that one that lost a part is told so at once.

A missing table would only be noticed by the first statement that needs it, deep in somebody's work,
and a missing index never: keys would then exist twice. What is there besides is left alone.
"""

from __future__ import annotations

import functools
from importlib import resources

import apsw

from pidurable.storage._migrate import SCHEMA

_PARTS = (
    "select 'table', name, ''\nfrom sqlite_schema\nwhere type = 'table'"
    "\nunion all"
    "\nselect 'column', tables.name, columns.name\nfrom sqlite_schema as tables"
    "\njoin pragma_table_info(tables.name) as columns\nwhere tables.type = 'table'"
    "\nunion all"
    "\nselect 'index', name, ''\nfrom sqlite_schema\nwhere type = 'index' and sql is not null"
)


def schema_text() -> str:
    """Return the script that makes a store of today's schema."""
    return resources.files("pidurable.storage").joinpath(f"schema_v{SCHEMA}.sql").read_text("utf-8")


@functools.cache
def _expected() -> frozenset[tuple[str, str, str]]:
    connection = apsw.Connection(":memory:")
    try:
        connection.execute(schema_text())
        return frozenset((str(a), str(b), str(c)) for a, b, c in connection.execute(_PARTS))
    finally:
        connection.close()


def missing_part(connection: apsw.Connection) -> str | None:
    """Name a part of today's schema that a store does not have; None where it has all."""
    missing = _expected().difference(connection.execute(_PARTS).fetchall())
    if not missing:
        return None
    # A table goes with its columns and indexes: it alone is worth naming.
    order = ("table", "column", "index")
    kind, name, column = min(missing, key=lambda part: (order.index(part[0]), *part))
    return f"the {kind} {name}.{column}" if column else f"the {kind} {name}"
