"""A guard in real time: what hangs is told with the place where it does, and never waited for.

A virtual clock ends what waits, not what spins or is stuck in a call of the system. `limited` ends
that too: an alarm of the system interrupts it, again and again where something swallows it, and the
last one ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

SECONDS = float(os.environ.get("VERIFY_HANG_SECONDS", "300"))
"""Far more than a run takes on a machine that is busy with other things."""
AGAIN_SECONDS = 10.0
RINGS_MAX = 3


class HungError(Exception):
    """It took longer than anything here may; the message says where it was."""


class _AlarmError(BaseException):
    """Ends what hangs: nothing that runs under the guard knows it."""


@contextlib.contextmanager
def limited(
    seconds: float = SECONDS, *, again: float = AGAIN_SECONDS, what: str = ""
) -> Iterator[None]:
    """Let a block take so long in real time. For the main thread.

    Raises:
        HungError: It took longer, and was interrupted.
    """
    places: list[str] = []

    def ring(number: int, frame: Any) -> None:
        places.append("".join(traceback.format_stack(frame, limit=8)))
        if len(places) > RINGS_MAX:
            print(f"{what} hangs, and nothing stops it:\n{places[-1]}\nFAIL", flush=True)
            os._exit(3)
        raise _AlarmError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        # Somebody else's alarm, as that of a test's timeout, goes on.
        left = outer and max(outer - (time.monotonic() - started), 0.001)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        if places:
            raise HungError(f"{what} hangs:\n{places[0]}") from sys.exc_info()[1]
