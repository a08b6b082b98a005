"""Bring an older store to the schema of this program: a copy first, then one transaction.

A migration is a function from one schema to the next, run in order. Either all of them and the new
`user_version` are stored, or the store is as it was; the copy `<store>.v<N>.bak` stays beside it in
both cases. The epoch goes up in the same transaction: a holder that runs the older program meets
`HolderLostError` at its next commit, before it can write into tables that it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from pidurable.errors import MigrationError, PidurableError, StorageTooNewError

SCHEMA = 1
"""The schema that this program writes."""


class Executes(Protocol):
    """What a migration may do with the connection: execute statements."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statements: str, bindings: Any = None, /) -> Iterable[Any]: ...


Migration = Callable[[Executes], None]

MIGRATIONS: dict[int, Migration] = {}
"""From the schema in the key to the next one. Empty while there is only schema 1."""


def copy_path(store: str, schema: int) -> str:
    """Return the name of the copy that is kept of a store before it is migrated."""
    return f"{store}.v{schema}.bak"


def migrate(
    connection: Executes,
    *,
    store: str,
    found: int,
    copy: Callable[[str], None],
    known: int = SCHEMA,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> None:
    """Migrate a store from the schema `found` to `known`.

    To be called with no transaction open and no live holder.

    Args:
        copy: Writes a whole copy of the store, as it is, to the path that it is given.

    Raises:
        StorageTooNewError: The store is of a newer schema. Nothing was changed.
        MigrationError: A step is missing or failed; the store is as it was.
    """
    if found > known:
        raise StorageTooNewError(store, found, known)
    for schema in range(found, known):
        if schema not in migrations:
            raise MigrationError(store, f"this program has no migration from schema {schema}")
    if found == known:
        return
    _keep_copy(store, found, copy)
    connection.execute("begin immediate")
    try:
        # Read to its end: an open statement would lock tables against being changed.
        [(current,)] = list(connection.execute("pragma user_version"))
        # Another opener may have migrated while this one was copying.
        for schema in range(int(current), known):
            migrations[schema](connection)
        if current < known:
            connection.execute("update session\nset epoch = epoch + 1\nwhere id = 1")
            connection.execute(f"pragma user_version = {known:d}")
        connection.execute("commit")
    except BaseException as error:
        # SQLite may have rolled back by itself, and would report a second rollback.
        if connection.in_transaction:
            connection.execute("rollback")
        if isinstance(error, PidurableError) or not isinstance(error, Exception):
            raise
        raise MigrationError(  # noqa: ASYNC104 - nothing is awaited here
            store, f"from schema {found} to {known}: {error}; it is as it was"
        ) from error


def _keep_copy(store: str, found: int, copy: Callable[[str], None]) -> None:
    """Write the copy under another name first, so that the final name is always a whole one."""
    final = copy_path(store, found)
    partial = f"{final}.part"
    if os.path.lexists(partial):
        os.unlink(partial)
    copy(partial)
    os.replace(partial, final)
