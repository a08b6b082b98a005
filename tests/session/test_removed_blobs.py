"""Bytes that are removed and put again by one batch are there afterwards."""

from __future__ import annotations

import pytest
import trio
from session_support import line_held, open_test_session
from trio.testing import wait_all_tasks_blocked

from pidurable.session._removals import Removal
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage, Op


@pytest.mark.parametrize("put_last", [True, False])
async def test_bytes_that_are_put_behind_their_removal_are_stored_again(put_last: bool) -> None:
    """On the line behind the removal nobody counts on what the storage still has."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        name = await session.run(session.transaction(), lambda tx: tx.put_blob(b"bytes"))

        def remove(tx: Transaction) -> None:
            assert tx.has_blob(name)
            tx.writes.append((Op.BLOB_DELETE, (name,)))
            tx.removal = Removal(blobs=[name])

        def put(tx: Transaction) -> None:
            assert tx.has_blob(name) is not put_last
            tx.put_blob(b"bytes")

        bodies = (remove, put) if put_last else (put, remove)
        async with trio.open_nursery() as nursery, line_held(session):
            for body in bodies:
                nursery.start_soon(session.run, session.transaction(), body)
                await wait_all_tasks_blocked()
        assert storage.has_blob(name) is put_last
        assert session.staged_blob(name) is put_last
