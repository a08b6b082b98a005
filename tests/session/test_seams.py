"""The threads behind the seams: nobody waits for a call that is not answered."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
import trio.lowlevel

from pidurable.errors import InternalError
from pidurable.session._seams import ThreadBlocking


async def test_a_call_to_a_closed_worker_is_refused() -> None:
    """A call that comes after the close raises, and does not wait for an answer for ever."""
    worker = ThreadBlocking().worker("test")
    assert await worker.run(max, 1, 2) == 2
    worker.close()
    with pytest.raises(InternalError, match="after it was closed"), trio.fail_after(60):
        await worker.run(max, 1, 2)


async def test_calls_of_tasks_do_not_keep_the_session_from_reading() -> None:
    """As many blocking calls as there are threads leave those of another object free."""
    release = threading.Event()
    of_tasks, of_session = ThreadBlocking(), ThreadBlocking()

    async def block() -> None:
        await of_tasks.run(release.wait, 90)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(block)
            await trio.lowlevel.checkpoint()
            answers: list[Any] = [await of_session.run(max, n, 1) for n in range(3)]
            release.set()
    assert answers == [1, 1, 2]
