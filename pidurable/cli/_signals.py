"""Signals: the first asks to leave in order, the second leaves at once.

The handler is a plain one, not a trio receiver: it must work while the event loop is kept busy by
code that does not listen. Leaving at once is `os._exit`: what was committed is in the store, and
the commands that tools run are ended by their supervisors when this process is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import attrs
import trio

__all__ = ["Interrupts", "catch_interrupts"]

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"


@attrs.define(eq=False)
class Interrupts:
    """What came so far."""

    first: signal.Signals | None = None
    resume_command: str = "pidurable resume"
    """What goes on with the work; said when leaving at once."""
    terminal: bool = False
    """A live display hides the cursor; leaving at once has to show it again."""
    _asked: trio.Event = attrs.Factory(trio.Event)

    async def wait(self) -> signal.Signals:
        """Wait for the first signal."""
        await self._asked.wait()
        assert self.first is not None
        return self.first

    def on_signal(self, number: int, token: trio.lowlevel.TrioToken) -> None:
        """Take notice of a signal; leave the process if it is not the first."""
        if self.first is not None:
            self._leave(number)
        self.first = signal.Signals(number)
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(self._asked.set)

    def _leave(self, number: int) -> None:
        if self.first is signal.SIGHUP and number == signal.SIGHUP:
            return  # A terminal that closes may say so several times.
        with contextlib.suppress(OSError):
            if self.terminal:
                os.write(2, _SHOW_CURSOR)
            text = f"\npidurable: left at once; `{self.resume_command}` goes on\n"
            os.write(2, text.encode(errors="backslashreplace"))
        os._exit(EXIT_CODE)


@contextlib.contextmanager
def catch_interrupts(resume_command: str) -> Iterator[Interrupts]:
    """Catch SIGINT, SIGTERM and SIGHUP for a block of trio code, and to the end of the process
    once one came.

    Outside of the main thread Python delivers no signals, and nothing is caught.

    Args:
        resume_command: The command that goes on with the work, for the last message.
    """
    interrupts = Interrupts(resume_command=resume_command)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    token = trio.lowlevel.current_trio_token()

    def handler(number: int, frame: FrameType | None) -> None:
        interrupts.on_signal(number, token)

    before = {}
    for number in SIGNALS:
        # Somebody who started this with a signal ignored (nohup) wants it ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield interrupts
    finally:
        # After the first signal this process only leaves, and another one still means "at once".
        if interrupts.first is None:
            for number, old in before.items():
                signal.signal(number, old)
