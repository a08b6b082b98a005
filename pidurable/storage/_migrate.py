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

SCHEMA = 3
"""The schema that this program writes."""


class Executes(Protocol):
    """What a migration may do with the connection: execute statements."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statements: str, bindings: Any = None, /) -> Iterable[Any]: ...


Migration = Callable[[Executes], None]


def _keep_when_documents_ended(connection: Executes) -> None:
    """Schema 2: a retired document has the commit that retired it, so that the past can be asked.

    Schema 1 stored that it was retired, not when. It lived at most until the next one at its
    address began, or until now; since its last value is all that is known of the time between, it
    is taken to have lived until then.
    """
    connection.execute("alter table documents\nadd column retired_seq integer")
    connection.execute(
        "create unique index documents_past\non documents (scope_id, name, key, created_seq)"
        "\nwhere scope = 1"
    )
    connection.execute(
        "create index documents_rewindable\non documents (scope_id, name, key)"
        "\nwhere scope = 1 and history = 'rewindable'"
    )
    connection.execute(
        "update documents\nset retired_seq = ("
        "\n  select created_seq\n  from documents as later\n  where later.scope = 1"
        " and later.scope_id = documents.scope_id and later.name = documents.name"
        " and later.key = documents.key and later.created_seq > documents.created_seq"
        "\n  order by created_seq\n  limit 1\n)\nwhere retired = 1 and scope = 1"
    )
    connection.execute(
        "update documents\nset retired_seq = (select seq from session where id = 1)"
        "\nwhere retired = 1 and retired_seq is null"
    )
    connection.execute("drop index documents_living")
    connection.execute(
        "create unique index documents_living\non documents (scope, scope_id, name, key)"
        "\nwhere retired_seq is null"
    )
    connection.execute("alter table documents\ndrop column retired")


_SCHEMA_3 = (
    "create index conversations_parent\non conversations (parent)\nwhere parent is not null",
    "create index tasks_owner\non tasks (owner)\nwhere owner is not null",
    "create index submissions_conversation\non submissions (conversation)",
    "create index documents_retired\non documents (scope, scope_id)\nwhere retired_seq is not null",
    "create table commands (\n  id text primary key,\n  kind text not null,"
    "\n  digest text not null,\n  answer text not null,\n  seq integer not null,"
    "\n  at_us integer not null\n) strict, without rowid",
    "create table stubs (\n  kind text not null,\n  place integer not null,"
    "\n  key text not null,\n  id integer not null,\n  digest text not null,"
    "\n  status text not null,\n  at_us integer not null,\n  primary key (kind, place, key)"
    "\n) strict, without rowid",
    "create index stubs_id\non stubs (id)",
    "create table removals (\n  root integer primary key,\n  at_us integer not null\n) strict",
)


def _answer_commands_and_remove(connection: Executes) -> None:
    """Schema 3: answers to commands from outside, and what removing trees needs."""
    for statement in _SCHEMA_3:
        connection.execute(statement)


MIGRATIONS: dict[int, Migration] = {
    1: _keep_when_documents_ended,
    2: _answer_commands_and_remove,
}
"""From the schema in the key to the next one."""


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
        copy: Writes a whole copy of the store, as it is, to the path that it is given, through a
            connection of its own: this one is in a transaction.

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
    connection.execute("begin immediate")
    try:
        # Read to its end: an open statement would lock tables against being changed.
        [(current,)] = list(connection.execute("pragma user_version"))
        # Another opener may have migrated by now. From here on none can, nor write anything, so
        # what is copied is what is migrated.
        if current < known:
            _keep_copy(store, int(current), copy)
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
    """Write the copy under another name first, so that the final name is always a whole one.

    It has that name for good before the migration begins: a store that was killed has a log
    already, so nothing that SQLite does later need tell the disk about names in this folder.
    """
    final = copy_path(store, found)
    partial = f"{final}.part"
    if os.path.lexists(partial):
        os.unlink(partial)
    copy(partial)
    os.replace(partial, final)
    folder = os.open(os.path.dirname(final) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
