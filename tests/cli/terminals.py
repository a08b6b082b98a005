"""A command on a terminal of its own, and the screen that a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import strict_guard

SECONDS_MAX = 60.0
"""A test that waits longer than this for something to show has failed."""


class Warm:
    """The Python of `warm_commands.py`, begun when the first fork of it is asked for."""

    python: subprocess.Popen[str] | None = None
    used = True
    """With `-m slow` each command is a Python of its own, as people run them."""

    @classmethod
    def ask(cls, **told: Any) -> Any:
        """Say something, and return the answer."""
        if cls.python is None:
            cls.python = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("warm_commands.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # Not in the folder of the test that happens to be first: it may look who is there.
                cwd=Path(__file__).parent,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        assert cls.python.stdin is not None
        assert cls.python.stdout is not None
        print(json.dumps(told), file=cls.python.stdin, flush=True)
        return json.loads(cls.python.stdout.readline())

    @classmethod
    def close(cls) -> None:
        """End it, if it was begun."""
        if cls.python is not None:
            cls.python.communicate(timeout=SECONDS_MAX)
            cls.python = None


class Fork:
    """A command that a fork has become: of a `Popen` what tests of terminals need."""

    def __init__(self, argv: list[str], folder: Path, environ: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._stopped = False
        begin = {"argv": argv, "folder": str(folder), "environ": environ}
        self.pid: int = Warm.ask(begin={**begin, "device": environ["DEVICE"]})

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        status = None if self.returncode is not None else Warm.ask(look=self.pid)
        if status is not None and os.WIFSTOPPED(status):
            self._stopped = True
        elif status is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def is_stopped(self) -> bool:
        """Whether it has been stopped, as by Ctrl-Z."""
        self.poll()
        return self._stopped

    def wait(self, seconds_max: float = SECONDS_MAX) -> int:
        """Wait for its end, and return the exit code."""
        deadline = time.monotonic() + seconds_max
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"process {self.pid} has not ended"
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Process(subprocess.Popen[bytes]):
    """A command that is a Python of its own."""

    def is_stopped(self) -> bool:
        """Whether it has been stopped, as by Ctrl-Z."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        return pid != 0 and os.WIFSTOPPED(status)


class Terminal:
    """A command on a pseudo-terminal of its own, and the screen that a person would see."""

    def __init__(self, folder: Path, *argv: str, size: tuple[int, int] = (120, 40)) -> None:
        self.master, slave = pty.openpty()
        self.screen = pyte.Screen(*size)
        self.resize(*size)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PIDURABLE_")}
        environ |= {"DEVICE": os.ttyname(slave), "TERM": "xterm", "PYTHONPATH": python_path()}
        self.process: Fork | Process
        if Warm.used:
            self.process = Fork(list(argv), folder, environ)
        else:
            # A session leader that opens a terminal gets it as its controlling one.
            opens = 'exec "$@" <"$DEVICE" >"$DEVICE" 2>&1'
            self.process = Process(
                ["sh", "-c", opens, "sh", sys.executable, "-m", "pidurable.cli", *argv],
                cwd=folder,
                env=environ,
                start_new_session=True,
                preexec_fn=_listen,
            )
        self.slave = slave

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, as dragging its window does."""
        packed = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, packed)
        self.screen.resize(lines, columns)

    def read(self) -> None:
        """Take what is there; wait a little if nothing is."""
        ready, _, _ = select.select([self.master], [], [], 0.02)
        if ready:
            data = os.read(self.master, 65536)
            self.raw += data
            self.stream.feed(data)

    def text(self) -> str:
        """The screen, without blank lines."""
        return "\n".join(line.rstrip() for line in self.screen.display if line.strip())

    def until(self, text: str) -> None:
        """Read until the screen shows a text."""
        deadline = time.monotonic() + SECONDS_MAX
        while text not in self.text():
            assert time.monotonic() < deadline, f"{text!r} was not shown:\n{self.text()}"
            assert self.process.poll() is None or text in self.text(), self.text()
            self.read()

    def read_until(self, seen: Callable[[], bool]) -> None:
        """Read until something is so."""
        deadline = time.monotonic() + SECONDS_MAX
        while not seen():
            assert time.monotonic() < deadline, self.text()
            self.read()

    def press(self, keys: bytes) -> None:
        """Type something."""
        os.write(self.master, keys)

    def wait(self) -> int:
        """Read on until the process has ended, and return its exit code."""
        deadline = time.monotonic() + SECONDS_MAX
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            self.read()
        for _ in range(3):
            self.read()
        assert self.process.returncode is not None
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal, as closing its window does."""
        os.close(self.slave)
        os.close(self.master)
        self.slave = self.master = -1

    def close(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if self.master >= 0:
            self.hang_up()


def _listen() -> None:
    """Begin as a terminal does: whoever runs the tests may ignore its going away (nohup)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def python_path() -> str:
    """The folder that the package is imported from, and where the guard of all tests is found."""
    import pidurable

    return os.pathsep.join([str(Path(pidurable.__file__).parent.parent), strict_guard.FOLDER])


@contextlib.contextmanager
def terminal(folder: Path, *argv: str, size: tuple[int, int] = (120, 40)) -> Iterator[Terminal]:
    """Run a command on a terminal while the block lasts."""
    found = Terminal(folder, *argv, size=size)
    try:
        yield found
    finally:
        found.close()
