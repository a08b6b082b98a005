"""Commands of an environment: each runs below a supervisor of its own, and leaves nothing behind.

`run_command` returns, or raises, only after every process of the command is gone, however it ended:
by itself, by its timeout, or by cancellation. Holds at all times:

* The command's end is the end of its shell, not of its output pipe: a background process that
  holds the pipe is ended by the supervisor shortly after (and counted).
* Memory is bounded: one chunk is read, handed to `on_output`, and only then the next one is read,
  so that a slow consumer slows the command down and a flood never piles up.
* The runtime holds the only writing end of the control pipe. When it dies, by kill -9 too, the
  supervisor sees the end of the pipe and ends the command.
* Should the supervisor itself be killed, the command is found by the mark in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import trio

from pidurable.errors import InternalError, InvalidArgumentError, show

OnOutput = Callable[[bytes], Awaitable[None]]

CHUNK_BYTES = 64 * 1024
DRAIN_BYTES_MAX = 1024 * 1024
"""Most bytes still read once everything is gone: more than a pipe can hold."""

GRACE_SECONDS = 2.0
LEFTOVER_WAIT_SECONDS = 0.2
LEFTOVER_GRACE_SECONDS = 1.0
SUPERVISOR_SECONDS_MAX = 8.0
"""How long after the grace the supervisor may take before it is killed too: it gives up after 5."""

MARK_VARIABLE = "PIDURABLE_COMMAND"
_PASSED = ("PATH", "HOME", "LANG", "TERM", "TMPDIR", "VIRTUAL_ENV")
_SUPERVISOR = Path(__file__).with_name("_supervisor.py")


@attrs.frozen(kw_only=True)
class ExitStatus:
    """How a command ended. Nothing of it runs any more, unless `survivors` says so."""

    code: int | None
    """The shell's exit code; minus the signal's number if a signal ended it; None if it was ended
    before its code was known."""
    timed_out: bool = False
    leftover: int = 0
    """Processes that the command left running in the background, and that were ended."""
    survivors: tuple[int, ...] = ()
    """Processes that could not be ended (of another user, or stuck in the kernel)."""


def child_environment(
    variables: Mapping[str, str] | None = None, *, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what a command gets to see: an allowlist, then what the host passes.

    Keys of providers and other secrets of the runtime stay out, because nothing is passed that is
    not named here.

    Args:
        variables: What the host passes besides, or instead.
        environ: Where the allowed ones come from; by default this process's environment.
    """
    source = os.environ if environ is None else environ
    allowed = {
        name: value for name, value in source.items() if name in _PASSED or name.startswith("LC_")
    }
    allowed.setdefault("PATH", os.defpath)
    return {**allowed, **(variables or {})}


async def run_command(
    argv: list[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    on_output: OnOutput,
    timeout: float | None = None,  # noqa: ASYNC109 - ends the command, not this wait
    grace_seconds: float = GRACE_SECONDS,
) -> ExitStatus:
    """Run a program under the supervisor and return when nothing of it is left.

    Cancelling ends the command first and is raised only after it is gone (bounded: what cannot be
    ended within `grace_seconds` + 8 s is left to the operating system). An error of `on_output`
    ends the command in the same way and is raised as it is.

    Args:
        argv: Program (an absolute path) and arguments.
        cwd: Folder to start in.
        environment: The whole environment of the command.
        on_output: Receives what the command writes to standard output and error, in order; the
            command waits while it runs.
        timeout: Most seconds the command may run; then it is ended and the status says so.
        grace_seconds: Time between SIGTERM and SIGKILL.

    Raises:
        InvalidArgumentError: The command cannot be passed to a program (a NUL, a lone surrogate).
        OSError: The program or the folder cannot be used.
    """
    for part in (*argv, cwd, *environment.values()):
        _check_passable(part)
    mark = secrets.token_hex(16)
    async with _open_command(
        argv, cwd, {**environment, MARK_VARIABLE: mark}, mark, grace_seconds
    ) as command:
        return await command.follow(on_output, timeout)


def _check_passable(text: str) -> None:
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError("command", "holds a lone surrogate", show(text)) from error
    if b"\0" in data:
        raise InvalidArgumentError("command", "holds a NUL character", show(text))


@contextlib.asynccontextmanager
async def _open_command(
    argv: list[str], cwd: str, environment: dict[str, str], mark: str, grace_seconds: float
) -> AsyncIterator[_Command]:
    """Start a supervisor with its command, and see to the end of both."""
    # The ends that the supervisor gets are closed here in any case; of ours, each has one owner.
    control_read, control_write = os.pipe()
    status_read, status_write = os.pipe()
    output_read, output_write = os.pipe()
    ours, theirs = (control_write, status_read, output_read), (control_read, status_write)
    for fd in ours:
        os.set_blocking(fd, False)
    try:
        try:
            process = await trio.lowlevel.open_process(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(_SUPERVISOR),
                    str(control_read),
                    str(status_write),
                    str(grace_seconds),
                    str(LEFTOVER_WAIT_SECONDS),
                    str(LEFTOVER_GRACE_SECONDS),
                    *argv,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                cwd=cwd,
                env=environment,
                pass_fds=theirs,
                start_new_session=True,
            )
        finally:
            for fd in (*theirs, output_write):
                os.close(fd)
        command = _Command(
            process=process,
            control=control_write,
            status=status_read,
            output=output_read,
            mark=mark,
            grace_seconds=grace_seconds,
        )
        try:
            yield command
        finally:
            with trio.CancelScope(shield=True):
                await command.end()
    finally:
        for fd in ours:
            os.close(fd)


@attrs.define(eq=False)
class _Command:
    """One running command as the runtime sees it."""

    process: trio.Process
    control: int
    status: int
    output: int
    mark: str
    grace_seconds: float
    asked: bool = False
    timed_out: bool = False
    code: int | None = None
    done: bool = False
    """Nothing of the command is left, or what is left is named in `survivors`."""
    leftover: int = 0
    survivors: tuple[int, ...] = ()
    failure: OSError | None = None
    _status_text: bytes = b""
    _status_scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    _output_scope: trio.CancelScope | None = None
    """Set while the output is waited for."""
    _handed_over: trio.Event = attrs.Factory(trio.Event)
    _broken: Exception | None = None

    async def follow(self, on_output: OnOutput, limit: float | None) -> ExitStatus:
        """Hand over the output until the command has ended; raise what `on_output` raised."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hand_over, on_output, nursery.cancel_scope)
            if limit is not None:
                nursery.start_soon(self._time_out, limit)
            await self._read_status()
            # What still waits for output must wake up: a survivor may hold the pipe open.
            if self._output_scope is not None:
                self._output_scope.cancel()
            await self._handed_over.wait()
            nursery.cancel_scope.cancel()
        if self._broken is not None:
            raise self._broken
        if self.failure is not None:
            raise self.failure
        return ExitStatus(
            code=self.code,
            timed_out=self.timed_out,
            leftover=self.leftover,
            survivors=self.survivors,
        )

    async def _hand_over(self, on_output: OnOutput, nursery_scope: trio.CancelScope) -> None:
        drained = 0
        while drained < DRAIN_BYTES_MAX:
            try:
                data = os.read(self.output, CHUNK_BYTES)
            except BlockingIOError:
                if self.done:
                    break
                with trio.CancelScope() as self._output_scope:
                    await trio.lowlevel.wait_readable(self.output)
                self._output_scope = None
                continue
            if not data:
                break
            if self.done:
                drained += len(data)
            try:
                await on_output(data)
                await trio.lowlevel.checkpoint()
            except Exception as error:
                # Raised by `follow` as it is, not inside a group; `_open_command` ends the command.
                self._broken = error
                nursery_scope.cancel()
                return
        self._handed_over.set()

    async def _time_out(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.timed_out = True
        self.ask()

    def ask(self) -> None:
        """Ask the supervisor to end everything, and give it a bounded time."""
        if not self.asked:
            self.asked = True
            # The supervisor may be gone already; then its status pipe has ended, which is seen.
            with contextlib.suppress(BrokenPipeError):
                os.write(self.control, b"x")
            limit = self.grace_seconds + SUPERVISOR_SECONDS_MAX
            self._status_scope.deadline = trio.current_time() + limit

    async def _read_status(self) -> None:
        """Read status lines until the supervisor is done, dead, or past its time."""
        with self._status_scope:
            while not self.done:
                await trio.lowlevel.wait_readable(self.status)
                data = os.read(self.status, CHUNK_BYTES)
                if not data:
                    break
                *lines, self._status_text = (self._status_text + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        if not self.done:
            await self._bury_supervisor()

    def _take(self, line: dict[str, Any]) -> None:
        match line["type"]:
            case "started":
                pass
            case "failed":
                self.failure = OSError(line["errno"], line["problem"])
            case "exited":
                self.code = line["code"]
            case "done":
                self.leftover = line["leftover"]
                self.survivors = tuple(line["survivors"])
                self.done = True
            case other:
                raise InternalError(f"the supervisor said {other!r}")

    async def _bury_supervisor(self) -> None:
        """End what a supervisor that was killed, or hangs, could not end any more."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        # From here on no new process can be missed for long: the shell died with its parent.
        for _ in range(100):
            found = await trio.to_thread.run_sync(_find_marked, self.mark)
            if not found:
                break
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await trio.sleep(0.02)
        self.survivors = tuple(await trio.to_thread.run_sync(_find_marked, self.mark))
        self.done = True

    async def end(self) -> None:
        """End the command if it still runs, and collect the supervisor. Runs shielded."""
        if not self.done:
            self.ask()
            if self._status_scope.cancel_called:
                await self._bury_supervisor()
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._discard_output)
                    await self._read_status_again()
                    nursery.cancel_scope.cancel()
        await self.process.wait()

    async def _read_status_again(self) -> None:
        # A scope can be entered once only, and the first one may have been left by cancellation.
        self._status_scope = trio.CancelScope(deadline=self._status_scope.deadline)
        await self._read_status()

    async def _discard_output(self) -> None:
        """Keep the pipe from filling: a handler of SIGTERM that says goodbye must not hang."""
        while True:
            try:
                if not os.read(self.output, CHUNK_BYTES):
                    return
                await trio.lowlevel.checkpoint()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.output)


def _find_marked(mark: str) -> list[int]:
    """Return the processes whose environment holds the mark of a command (Linux only)."""
    needle = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    if not sys.platform.startswith("linux"):
        return found
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            data = Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue  # Gone meanwhile, or of another user.
        if needle in data.split(b"\0"):
            found.append(int(name))
    return found
