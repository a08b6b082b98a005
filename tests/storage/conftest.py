"""What the tests of the storage share: handles that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pidurable.storage import SqliteStorage


@pytest.fixture
def open_store() -> Iterator[Callable[..., SqliteStorage]]:
    """Open stores, and close those that a test leaves open: the garbage collector is no part of it.

    Dropped handles are closed whenever it runs, which may move the log of another test's store.
    """
    with ExitStack() as stack:

        def opened(*args: Any, **options: Any) -> SqliteStorage:
            storage = SqliteStorage(*args, **options)
            stack.callback(storage.close)
            return storage

        yield opened
