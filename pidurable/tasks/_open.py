"""Opening: a session with its runtime, as one block that leaves nothing behind.

The block's own exception leaves it bare, not in a group. Leaving cancels the invocations and waits
for them, lets accepted commits finish, stores the closing mark and closes the storage, all
shielded: a cancelled host still closes cleanly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from pidurable.records._limits import Settings
from pidurable.session._seams import (
    Blocking,
    Clock,
    Failpoints,
    Randomness,
    SystemClock,
    SystemRandomness,
    ThreadBlocking,
)
from pidurable.session._session import Session
from pidurable.storage import HolderClaim, MemoryStorage, Storage
from pidurable.tasks._errors import leaves
from pidurable.tasks._installed import Definitions
from pidurable.tasks._recovery import recover
from pidurable.tasks._runtime import Runtime


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_runtime(
    storage: Storage,
    *,
    snapshot: Callable[[], Definitions],
    settings: Settings | None = None,
    clock: Clock | None = None,
    blocking: Blocking | None = None,
    randomness: Randomness | None = None,
    failpoints: Failpoints | None = None,
    takeover: bool = False,
    durability: str = "power",
    prepare: Callable[[Runtime], None] | None = None,
) -> AsyncIterator[Runtime]:
    """Hold a storage, recover what is in it, and run its tasks while the block lasts.

    Args:
        storage: An open storage; closed at the end.
        snapshot: Gives the definitions as of now.
        settings: Limits; the defaults where None.
        clock, blocking, randomness, failpoints: The seams; the system's own where None.
        takeover: Hold it although a live holder does.
        durability: `power` or `process`.
        prepare: Called before recovery, to add participants.

    Raises:
        StorageHeldError: A live holder has it.
    """
    settings = settings or Settings()
    clock = clock or SystemClock()
    blocking = blocking or ThreadBlocking()
    randomness = randomness or SystemRandomness()
    claim = HolderClaim(
        holder_id=randomness.uuid(),
        host=socket.gethostname(),
        pid=os.getpid(),
        at_us=clock.now_us(),
        lease_seconds=settings.lease_seconds,
    )
    try:
        session = Session(
            storage,
            settings=settings,
            clock=clock,
            blocking=blocking,
            randomness=randomness,
            failpoints=failpoints or Failpoints(),
            claim=claim,
            takeover=takeover,
            durability=durability,
            inline=isinstance(storage, MemoryStorage),
            codec=snapshot().codec,
        )
    except BaseException:
        storage.close()
        raise
    runtime = Runtime(session, snapshot=snapshot)
    error: BaseException | None = None
    late: BaseException | None = None
    scope = trio.CancelScope()
    with scope:
        try:
            async with trio.open_nursery() as services:
                services.start_soon(session.serve)  # noqa: ASYNC113 - runs as long as the body
                services.start_soon(runtime.runner.report_stopping)
                try:
                    async with trio.open_nursery() as nursery:
                        body = trio.CancelScope()
                        runtime.runner.on_fatal = body.cancel
                        try:
                            with body:
                                if prepare is not None:
                                    prepare(runtime)
                                await recover(runtime)
                                runtime.serve(nursery)
                                yield runtime
                        except BaseException as caught:  # noqa: ASYNC103 - raised below, bare
                            error = caught
                        # From here on nothing outside may cut the closing short.
                        scope.shield = True
                        runtime.begin_close()
                        nursery.cancel_scope.cancel()
                except BaseException as caught:  # noqa: ASYNC103 - raised below, bare
                    late = caught
                await session.close(runtime.closing_writes)
                services.cancel_scope.cancel()
        except BaseException as caught:  # noqa: ASYNC103 - raised below, bare
            late = late or caught
        finally:
            runtime.release_waiters()
    if runtime.runner.fatal is not None:
        raise runtime.runner.fatal
    if late is not None and (error is None or outranks(late, error)):
        raise bare(late)
    if error is not None:
        raise error


def bare(error: BaseException) -> BaseException:
    """What a nursery of ours raises, without the group that the host knows nothing of.

    Ctrl-C that arrives while a nursery waits for its children comes out of it in a group.
    """
    for leaf in leaves(error):
        if isinstance(leaf, KeyboardInterrupt | SystemExit):
            return leaf
    found = leaves(error)
    return found[0] if len(found) == 1 else error


def outranks(late: BaseException, error: BaseException) -> bool:
    """Whether what came while closing is what the host has to hear, and not what its body raised.

    A cancellation that came from inside says nothing of its cause, and Ctrl-C is always heard.
    """
    return all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error)) or isinstance(
        bare(late), KeyboardInterrupt | SystemExit
    )
