"""A session for a command: the registry with its extensions, the models, an open harness."""

from __future__ import annotations

import contextlib
import importlib
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from pidurable.agent._default_models import default_models
from pidurable.agent._models import Models
from pidurable.cli._errors import missing_store
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.errors import NotAStoreError, StorageAccessError, StorageCorruptError
from pidurable.harness._open import Harness, open_quiet_harness
from pidurable.registry import ExtensionLoader, Registry
from pidurable.storage import SqliteStorage
from pidurable.storage._migrate import SCHEMA
from pidurable.storage._sqlite_open import identify, is_missing

__all__ = [
    "bring_up_to_date",
    "load_registry",
    "open_models",
    "open_session",
    "store_exists",
]

BUNDLED = "pidurable.extensions.coding"


def store_exists(store: str) -> bool:
    """Whether there is anything at the path of the store; an empty file is a missing store."""
    try:
        info = os.lstat(store)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it cannot be looked at, which opening it explains
    return not (stat.S_ISREG(info.st_mode) and info.st_size == 0)


async def bring_up_to_date(store: str) -> None:
    """Migrate a store of an older schema, for a command that will work on it anyway.

    Such a command looks first, and what only looks changes nothing, so it refuses an older store.

    Raises:
        StorageHeldError: A live holder has it. Stop that one first.
        MigrationError: It could not be brought to this schema. It is as it was.
    """

    def migrate() -> None:
        # What else may be wrong with the store is said by whoever opens it next.
        with contextlib.suppress(StorageAccessError, NotAStoreError, StorageCorruptError):
            # A FIFO would hold for ever whoever opens it, so what is no file goes no further.
            found = store_exists(store) and not is_missing(store, create=False)
            if found and 0 < identify(os.path.realpath(store), None) < SCHEMA:
                SqliteStorage(store, create=False).close()

    await trio.to_thread.run_sync(migrate)


def load_registry(options: Options) -> Registry:
    """Return a registry with the bundled `coding` extension and those that the options name.

    Raises:
        ExtensionError: One cannot be loaded; the message holds its own traceback.
    """
    registry = Registry()
    bundled: Any = importlib.import_module(BUNDLED)
    registry.install(bundled.extension)
    loader = ExtensionLoader(registry)
    for source in options.extensions:
        if source == bundled.extension.name:
            continue  # named although it is always there
        loader.load(source)
    return registry


def open_models(host: Host) -> Models:
    """Return the models that the variables hold keys for, and scripts."""
    return default_models(host.environ)


@asynccontextmanager
async def open_session(
    host: Host,
    options: Options,
    *,
    create: bool,
    registry: Registry | None = None,
    models: Models | None = None,
) -> AsyncIterator[Harness]:
    """Hold the store, and run what is in it from when the harness is started.

    Input of others that waits is stored at once, and begun no sooner: first the command says which
    model is to answer it.

    Raises:
        NotFoundError: There is no store, and `create` is False.
        StorageHeldError: Another live process holds it.
    """
    if not create and not store_exists(options.store):
        raise missing_store(options.store)
    registry = registry or load_registry(options)
    async with open_quiet_harness(
        options.store,
        registry=registry,
        models=models or open_models(host),
        create=create,
        failpoints=host.failpoints,
    ) as harness:
        yield harness
