"""A screen of our own on a terminal: lines at fixed places, of which only changed ones are written.

It is the terminal's second screen, so that leaving gives back what was there before, without the
cursor, without wrapping (a width that a terminal counts differently cannot push other lines away)
and without echo. Whatever ends the block ends the screen: an error, Ctrl-C, a signal to terminate.
While the process is suspended the terminal is as it was, and resumed it is drawn anew.

What is written is bounded: a picture that would exceed `BYTES_PER_SECOND` waits for its turn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TextIO

import attrs
import trio

__all__ = ["Screen", "open_screen", "screen_size"]

BYTES_PER_SECOND = 18_000
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_DEFAULT_SIZE = (80, 24)
_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

StyledLine = tuple[str, str]
"""A line that fits the width, and the SGR parameters that it is shown with."""


def screen_size(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of a terminal, as they are now."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return _DEFAULT_SIZE
    # A terminal that was never told its size says 0.
    return size.columns or _DEFAULT_SIZE[0], size.lines or _DEFAULT_SIZE[1]


@attrs.define(eq=False)
class Screen:
    """What stands on the terminal now."""

    stream: TextIO
    now: Callable[[], float] = trio.current_time
    written: int = 0
    """Bytes in all."""
    _lines: list[StyledLine] = attrs.Factory(list)
    _size: tuple[int, int] = (0, 0)
    _budget: float = BYTES_PER_SECOND
    _budget_at: float | None = None

    async def draw(self, lines: Sequence[StyledLine], size: tuple[int, int]) -> bool:
        """Show lines from the top; False if they have to wait for the next time."""
        text = self._changes(lines, size)
        data = len(text.encode(errors="backslashreplace"))
        if not self._afford(data):
            return False
        if text:
            await self._write(text)
        self._lines, self._size = list(lines), size
        return True

    def _changes(self, lines: Sequence[StyledLine], size: tuple[int, int]) -> str:
        parts = []
        before: Sequence[StyledLine] = self._lines
        if size != self._size:
            parts.append("\x1b[2J")
            before = ()
        for number, line in enumerate(lines):
            if number < len(before) and before[number] == line:
                continue
            text, style = line
            shown = f"\x1b[{style}m{text}\x1b[0m" if style else text
            parts.append(f"\x1b[{number + 1}H{shown}\x1b[K")
        if len(lines) < len(before):
            parts.append(f"\x1b[{len(lines) + 1}H\x1b[J")
        return "".join(parts)

    def _afford(self, data: int) -> bool:
        now = self.now()
        if self._budget_at is not None:
            gained = (now - self._budget_at) * BYTES_PER_SECOND
            self._budget = min(BYTES_PER_SECOND, self._budget + gained)
        self._budget_at = now
        # One picture of a huge terminal may be larger than a second's worth: then it takes longer.
        if data > self._budget and self._budget < BYTES_PER_SECOND:
            return False
        self._budget -= data
        return True

    def enter(self) -> None:
        """Take the second screen."""
        self._lines, self._size = [], (0, 0)
        self._put(_ENTER)

    def leave(self) -> None:
        """Give back the terminal as it was."""
        self._put(_LEAVE)

    async def _write(self, text: str) -> None:
        # A terminal that was stopped (Ctrl-S) blocks whoever writes, but nobody who wants to leave.
        await trio.to_thread.run_sync(self._put, text, abandon_on_cancel=True)

    def _put(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
        self.written += len(text.encode(errors="backslashreplace"))


@asynccontextmanager
async def open_screen(stream: TextIO, keyboard: TextIO) -> AsyncIterator[Screen]:
    """Show a screen until the block ends, or a signal asks to leave; that ends the block quietly.

    Args:
        stream: A terminal to draw on.
        keyboard: Where it is typed; what is typed is not shown meanwhile.
    """
    screen = Screen(stream)
    echo = _Echo(keyboard)
    screen.enter()
    try:
        with echo, trio.open_signal_receiver(*_LEAVING, signal.SIGTSTP) as signals:
            async with trio.open_nursery() as nursery:

                async def obey() -> None:
                    async for number in signals:
                        if number != signal.SIGTSTP:
                            nursery.cancel_scope.cancel()
                            return
                        screen.leave()
                        echo.restore()
                        # Stops all threads of the process here, until somebody resumes it.
                        os.kill(os.getpid(), signal.SIGSTOP)
                        echo.silence()
                        screen.enter()

                nursery.start_soon(obey)
                yield screen
                nursery.cancel_scope.cancel()
    finally:
        with contextlib.suppress(OSError, ValueError):
            # A terminal that has been closed has nothing to give back.
            screen.leave()


class _Echo:
    """Whether a terminal shows what is typed: not while the block lasts."""

    def __init__(self, keyboard: TextIO) -> None:
        self._keyboard = keyboard
        self._before: list[Any] | None = None

    def __enter__(self) -> None:
        self.silence()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def silence(self) -> None:
        """Turn it off, and take note of how it was: somebody else may have changed it meanwhile."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            before = termios.tcgetattr(self._keyboard.fileno())
            quiet = list(before)
            quiet[3] &= ~termios.ECHO
            termios.tcsetattr(self._keyboard.fileno(), termios.TCSANOW, quiet)
            self._before = before

    def restore(self) -> None:
        """Give it back as it was."""
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(OSError, ValueError, termios.error):
                termios.tcsetattr(self._keyboard.fileno(), termios.TCSANOW, before)
