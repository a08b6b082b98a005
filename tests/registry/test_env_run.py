"""Commands of a local environment: their end, their output, and that nothing is left of them.

Whether a process is gone is told by a FIFO that it holds open: once every holder is gone, and only
then, reading it gives the end of file. No clock is needed for that.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from pidurable.errors import InvalidArgumentError
from pidurable.registry import LocalEnv
from pidurable.registry._processes import child_environment

BEACON = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if sys.argv[2] == "setsid":
    os.setsid()
fd = os.open(sys.argv[1], os.O_WRONLY)
os.write(fd, b"up %d\\n" % os.getpid())
while True:
    signal.pause()
"""
"""A program that cannot be ended by SIGTERM, and holds the FIFO."""


class Beacons:
    """The reading end of the FIFO."""

    def __init__(self, folder: Path) -> None:
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.script = folder / "beacon.py"
        self.script.write_text(BEACON)
        self.fd = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.seen = b""

    def command(self, mode: str) -> str:
        return f"{sys.executable} -I -S {self.script} {self.fifo} {mode}"

    async def wait_up(self, count: int) -> list[int]:
        """Wait until so many beacons run; return their processes."""
        while self.seen.count(b"\n") < count:
            await self._read()
        return [int(line.split()[1]) for line in self.seen.splitlines()]

    async def _read(self) -> bytes:
        while True:
            try:
                data = os.read(self.fd, 4096)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.fd)
                continue
            if not data and not self.seen:  # Nobody has opened it yet: epoll does not tell of that.
                await trio.lowlevel.checkpoint()
                continue
            self.seen += data
            return data

    def gone(self) -> bool:
        """Return whether no process holds the FIFO any more, now."""
        try:
            return os.read(self.fd, 4096) == b""
        except BlockingIOError:
            return False

    async def wait_gone(self) -> None:
        """Wait until no process holds the FIFO any more."""
        while await self._read():
            pass


@pytest.fixture
def beacons(tmp_path: Path) -> Iterator[Beacons]:
    """Beacons that can be started, and a way to see whether any is left."""
    (tmp_path / "beacons").mkdir()
    made = Beacons(tmp_path / "beacons")
    yield made
    os.close(made.fd)


@pytest.fixture
def env(tmp_path: Path) -> LocalEnv:
    """An environment that waits only briefly between SIGTERM and SIGKILL."""
    return LocalEnv(tmp_path, grace_seconds=0.05)


class Output:
    """Collects output."""

    def __init__(self) -> None:
        self.data = b""

    async def __call__(self, data: bytes) -> None:
        self.data += data


async def test_output_and_exit_code_come_back(env: LocalEnv) -> None:
    """Standard output and error arrive in order, with the code of the shell."""
    output = Output()

    status = await env.run("echo one; echo two >&2; echo three; exit 7", on_output=output)

    assert output.data == b"one\ntwo\nthree\n"
    assert (status.code, status.timed_out, status.leftover, status.survivors) == (7, False, 0, ())


async def test_a_signal_is_told_as_a_negative_code(env: LocalEnv) -> None:
    """A shell that a signal ended has minus the signal's number as its code."""
    status = await env.run("kill -KILL $$", on_output=Output())

    assert status.code == -signal.SIGKILL


TREE = "{plain} & ( {setsid} & ) ; ( ( {setsid} & ) & ) ; wait"


@pytest.mark.parametrize("how", ["cancel", "error"])
async def test_nothing_is_left_when_a_command_is_ended(
    env: LocalEnv, beacons: Beacons, how: str
) -> None:
    """Children, grandchildren with setsid and double forks that ignore SIGTERM are gone before
    the call returns."""  # C046
    command = TREE.format(plain=beacons.command("plain"), setsid=beacons.command("setsid"))

    class Broken(Exception):
        pass

    async def on_output(data: bytes) -> None:
        await beacons.wait_up(3)
        raise Broken

    async with trio.open_nursery() as nursery:

        async def run() -> None:
            if how == "error":
                with pytest.raises(Broken):
                    await env.run(f"echo x; {command}", on_output=on_output)
            else:
                await env.run(command, on_output=on_output)
            assert beacons.gone()

        nursery.start_soon(run)
        if how == "cancel":
            await beacons.wait_up(3)
            nursery.cancel_scope.cancel()

    assert beacons.gone()


async def test_nothing_is_left_after_the_time_limit(
    env: LocalEnv, beacons: Beacons, mock_clock: trio.testing.MockClock
) -> None:
    """At its limit a command is ended, and the status says so once everything is gone."""  # C046
    command = TREE.format(plain=beacons.command("plain"), setsid=beacons.command("setsid"))

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def run() -> None:
            status = await env.run(command, on_output=Output(), timeout=60.0)
            assert status.timed_out
            assert status.survivors == ()
            assert beacons.gone()

        await beacons.wait_up(3)
        mock_clock.jump(60.0)


async def test_a_cancelled_command_gets_time_to_clean_up(tmp_path: Path) -> None:
    """SIGTERM comes first, and a handler that writes much on its way out is not stuck."""
    env = LocalEnv(tmp_path, grace_seconds=30.0)
    # The sleep first: one that is forked while the signal is on its way outlives the shell.
    command = "trap 'head -c 300000 /dev/zero; echo bye > bye; exit' TERM; sleep 60 & echo up; wait"

    with trio.CancelScope() as scope:

        async def cancel(data: bytes) -> None:
            scope.cancel()

        await env.run(command, on_output=cancel)

    assert scope.cancelled_caught
    assert (tmp_path / "bye").read_text() == "bye\n"


RUNTIME = """
import sys, trio
from pidurable.registry import LocalEnv

async def main():
    async def ignore(data): pass
    await LocalEnv(sys.argv[1], grace_seconds=0.05).run(sys.argv[2], on_output=ignore)

trio.run(main)
"""


async def test_nothing_is_left_when_the_runtime_is_killed(tmp_path: Path, beacons: Beacons) -> None:
    """A kill -9 of the runtime ends its commands, setsid and ignored SIGTERM or not."""  # C046
    command = TREE.format(plain=beacons.command("plain"), setsid=beacons.command("setsid"))
    runtime = await trio.lowlevel.open_process(
        [sys.executable, "-c", RUNTIME, str(tmp_path), command], cwd=Path(__file__).parents[2]
    )
    await beacons.wait_up(3)

    runtime.kill()
    await runtime.wait()

    await beacons.wait_gone()


async def test_nothing_is_left_when_the_supervisor_is_killed(
    env: LocalEnv, beacons: Beacons
) -> None:
    """A command that kills its own supervisor is found by its mark and ended all the same."""
    status = None

    async def run() -> None:
        nonlocal status
        command = f"{beacons.command('setsid')} & read line < go; kill -KILL $PPID; wait"
        os.mkfifo(env.root / "go")
        status = await env.run(command, on_output=Output())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await beacons.wait_up(1)
        await trio.to_thread.run_sync((env.root / "go").write_text, "now\n")

    assert status is not None
    assert (status.code, status.survivors) == (None, ())
    assert beacons.gone()


@pytest.mark.parametrize(
    "start",
    ["{} & echo done", "{} >/dev/null & echo done", "setsid {} & echo done"],
)
async def test_the_end_of_the_shell_is_the_end_of_the_command(env: LocalEnv, start: str) -> None:
    """A background process that holds the output pipe does not keep the call open; it is ended
    and counted."""  # C047
    output = Output()

    status = await env.run(start.format("sleep 300"), on_output=output, timeout=100.0)

    assert output.data == b"done\n"
    assert (status.code, status.timed_out, status.leftover) == (0, False, 1)


async def test_a_flood_of_output_takes_bounded_memory(env: LocalEnv) -> None:
    """However much a command writes, only one chunk of it is held at a time."""  # C087
    total = 0

    async def count(data: bytes) -> None:
        nonlocal total
        total += len(data)
        assert len(data) <= 64 * 1024

    tracemalloc.start()
    try:
        status = await env.run("head -c 40000000 /dev/zero", on_output=count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (status.code, total) == (0, 40_000_000)
    assert peak < 2_000_000


async def test_a_slow_reader_slows_the_command_down(env: LocalEnv) -> None:
    """While the output is not taken, the command waits: nothing piles up in between."""  # C087
    taken = 0

    with trio.CancelScope() as scope:

        async def take_one(data: bytes) -> None:
            nonlocal taken
            taken += len(data)
            for _ in range(10):
                await trio.testing.wait_all_tasks_blocked()
            scope.cancel()

        await env.run("yes", on_output=take_one)

    assert taken <= 64 * 1024


async def test_endless_output_ends_at_the_time_limit(env: LocalEnv) -> None:
    """A command that writes without end is ended at its limit like any other."""  # C087
    status = await env.run("yes", on_output=Output(), timeout=0.05)

    assert status.timed_out


async def test_commands_see_only_the_allowed_environment(
    env: LocalEnv, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Secrets of the runtime's environment do not reach a command, nor its supervisor."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    monkeypatch.setenv("LC_TIME", "C")
    output = Output()
    passing = LocalEnv(tmp_path, variables={"FROM_HOST": "1"})

    await passing.run(
        "env; tr '\\0' '\\n' < /proc/$PPID/environ", on_output=output, variables={"MORE": "2"}
    )

    names = {line.partition("=")[0] for line in output.data.decode().splitlines()}
    allowed = {"PATH", "HOME", "LANG", "TERM", "TMPDIR", "VIRTUAL_ENV", "FROM_HOST", "MORE"}
    of_shell = {"PWD", "OLDPWD", "SHLVL", "_", "PIDURABLE_COMMAND"}
    assert {name for name in names if not name.startswith("LC_")} <= allowed | of_shell
    assert {"PATH", "FROM_HOST", "MORE", "LC_TIME"} <= names
    assert b"canary" not in output.data


def test_a_command_always_has_a_path() -> None:
    """Without PATH in the runtime's environment the system's default is passed."""
    assert child_environment({"A": "1"}, environ={"SECRET": "x"}) == {"PATH": os.defpath, "A": "1"}


async def test_commands_inherit_no_descriptors(env: LocalEnv) -> None:
    """A command has its three standard streams and nothing else, even of inheritable files."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    output = Output()
    try:
        await env.run("echo /proc/self/fd/*; readlink /proc/self/fd/0", on_output=output)
    finally:
        os.close(read_end)
        os.close(write_end)

    lines = output.data.decode().splitlines()
    # The shell itself opens the folder that it lists, as descriptor 3.
    assert set(lines[0].split()) <= {f"/proc/self/fd/{number}" for number in range(4)}
    assert lines[1] == "/dev/null"


async def test_signals_are_as_a_program_expects_them(env: LocalEnv) -> None:
    """SIGPIPE ends a writer as usual, although Python ignores it."""
    output = Output()

    await env.run("yes | head -n 1; echo ${PIPESTATUS[0]}", on_output=output)

    assert output.data == b"y\n141\n"


async def test_a_command_starts_in_the_folder_that_was_asked_for(
    env: LocalEnv, tmp_path: Path
) -> None:
    """`cwd` is a folder below the root; a file or a missing one is an error."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").touch()
    output = Output()

    await env.run("pwd", on_output=output, cwd="sub")

    assert output.data.decode().strip() == str((tmp_path / "sub").resolve())
    with pytest.raises(NotADirectoryError):
        await env.run("pwd", on_output=output, cwd="file")
    with pytest.raises(FileNotFoundError):
        await env.run("pwd", on_output=output, cwd="missing")


@pytest.mark.parametrize("command", ["echo a\0b", "echo \ud800"])
async def test_a_command_that_cannot_be_passed_on_is_refused(env: LocalEnv, command: str) -> None:
    """NUL and lone surrogates are refused before anything starts."""  # C081, C082
    with pytest.raises(InvalidArgumentError, match="command: holds a"):
        await env.run(command, on_output=Output())


async def test_a_missing_shell_is_an_error_of_the_call(tmp_path: Path) -> None:
    """A program that cannot be started raises the reason; nothing is left running."""
    env = LocalEnv(tmp_path, shell="/nowhere/shell")

    with pytest.raises(FileNotFoundError):
        await env.run("true", on_output=Output())


async def test_descriptors_do_not_leak(env: LocalEnv) -> None:
    """Whatever way a command ends, no descriptor and no zombie stays behind."""

    async def cancel_at_once() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await env.run("sleep 60", on_output=Output())

    await env.run("true", on_output=Output())
    gc.collect()  # what earlier tests dropped is closed by now, or else in the middle of this
    before = sorted(os.listdir("/proc/self/fd"))
    await env.run("true", on_output=Output())
    await env.run("sleep 60", on_output=Output(), timeout=0.01)
    await cancel_at_once()

    assert sorted(os.listdir("/proc/self/fd")) == before
    children = await trio.run_process(
        ["ps", "-o", "pid=,stat=,args=", "--ppid", str(os.getpid())], capture_stdout=True
    )
    assert b"_supervisor.py" not in children.stdout
    assert b"<defunct>" not in children.stdout
