"""The supervisor: a small program that runs one command and leaves nothing of it behind.

It is started by `_env.py` as a script of its own, with the standard library only (so that it is
up within milliseconds and no crash of the runtime can take it along), and is told by argv:

    _supervisor.py CONTROL_FD STATUS_FD GRACE LEFTOVER_WAIT LEFTOVER_GRACE PROGRAM ARGUMENT...

The command inherits standard input, output, error, folder and environment of the supervisor, and
nothing else. Holds at all times:

* The command runs in a session of its own, so that a signal from a terminal reaches neither.
* On Linux the supervisor is a subreaper: whatever the command leaves behind, also after `setsid`
  and a double fork, becomes a child of the supervisor. "No child left" (ECHILD) therefore means
  that nothing at all is left. Elsewhere the process group is all that can be reached.
* A byte on the control pipe, its end (the runtime died, by kill -9 too) or SIGTERM end the command:
  SIGTERM to everything below, SIGKILL after the grace.
* When the command itself has exited, what it left behind is ended too, after a short wait.
* "done" is written, and the supervisor exits, only after everything is gone, or when something
  cannot be ended (a process of another user); that is then named.

Status lines are JSON objects with a `type`: started, failed, exited, done.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS_MAX = 5.0
"""How long to go on sending SIGKILL before what is left is reported as a survivor."""

POLL_SECONDS = 0.02
"""How often to look again while something is being ended."""


def prctl(option: int, value: int) -> bool:
    """Call prctl where there is one; return whether it worked."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)


def read_stat(pid: int) -> tuple[int, str, str] | None:
    """Return (parent, state, start time) of a process, or None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return None
    # The name is in brackets and may hold brackets and blanks; what follows the last one is plain.
    fields = data[data.rfind(b")") + 2 :].split()
    return int(fields[1]), fields[0].decode(), fields[19].decode()


def descendants(root: int) -> dict[int, str]:
    """Return the live processes below `root`, each with its start time."""
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = read_stat(int(name))
            if found is not None and found[1] != "Z":
                parents[int(name)] = found[0]
                starts[int(name)] = found[2]
    below: dict[int, str] = {}
    grew = True
    while grew:
        grew = False
        for pid, parent in parents.items():
            if pid not in below and (parent == root or parent in below):
                below[pid] = starts[pid]
                grew = True
    return below


def send(pid: int, start: str, number: int) -> None:
    """Signal exactly the process that was seen, never a later one with the same number."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        found = read_stat(pid)
        if found is not None and found[2] == start:
            signal.pidfd_send_signal(fd, number)
    except OSError as error:
        # Gone meanwhile, or of another user: the loop of the caller sees whether it is left.
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise
    finally:
        os.close(fd)


class Supervisor:
    """One command, from its start to the end of the last process below it."""

    def __init__(self, control: int, status: int) -> None:
        self.control = control
        self.status = status
        self.shell = 0
        self.exit_status: int | None = None
        self.asked = False
        self.subreaper = prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def report(self, **fields: object) -> None:
        """Write one status line; nobody may be there to read it any more."""
        try:
            os.write(self.status, json.dumps(fields).encode() + b"\n")
        except BrokenPipeError:
            self.asked = True

    def start(self, argv: list[str]) -> None:
        """Start the command."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        own = os.getpid()
        self.shell = os.fork()
        if self.shell == 0:
            self._become(argv, own)
        # The command's output ends when the command lets go of it, not when this program does.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
        self.report(type="started", pid=self.shell)

    def _become(self, argv: list[str], parent: int) -> None:
        """In the child: turn into the command. Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # Python ignores these two, and an ignored signal would stay ignored after exec.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(127)
            os.execv(argv[0], argv)  # noqa: S606 - starting a program is the point
        except OSError as error:
            self.report(type="failed", errno=error.errno, problem=os.strerror(error.errno or 0))
        finally:
            os._exit(127)

    def _on_terminate(self, number: int, frame: object) -> None:
        self.asked = True

    def wait(self, seconds: float | None) -> None:
        """Wait until something happens or the time is up; take notice of what happened."""
        poller = select.poll()
        if not self.asked:
            poller.register(self.control, select.POLLIN)
        poller.register(self.wake_read, select.POLLIN)
        for fd, _ in poller.poll(None if seconds is None else max(0.0, seconds) * 1000):
            if fd == self.control:
                self.asked = True
            else:
                os.read(self.wake_read, 4096)

    def reap(self) -> bool:
        """Collect every child that has ended; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.shell:
                self.exit_status = status
                code = os.waitstatus_to_exitcode(status)
                self.report(type="exited", code=code)

    def below(self) -> dict[int, str]:
        """Return what is still alive below this program."""
        if sys.platform.startswith("linux"):
            return descendants(os.getpid())
        try:
            os.killpg(self.shell, 0)
        except OSError:
            return {}
        return {self.shell: ""}

    def signal_all(self, processes: dict[int, str], number: int) -> None:
        """Send a signal to each of these processes."""
        if sys.platform.startswith("linux"):
            for pid, start in processes.items():
                send(pid, start, number)
            return
        # It may have ended between the look and the signal, which is what was wanted.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.shell, number)

    def left(self) -> bool:
        """Return whether anything below is still there."""
        children = self.reap()
        return children if self.subreaper else bool(self.below())

    def end_all(self, grace: float) -> list[int]:
        """End everything below; return what could not be ended."""
        if self.left():
            targets = self.below()
            self.signal_all(targets, signal.SIGTERM)
            # A stopped process would keep SIGTERM pending for ever.
            self.signal_all(targets, signal.SIGCONT)
        deadline = time.monotonic() + grace
        while self.left() and time.monotonic() < deadline:
            self.wait(min(POLL_SECONDS, deadline - time.monotonic()))
        deadline = time.monotonic() + KILL_SECONDS_MAX
        while self.left():
            if time.monotonic() >= deadline:
                return sorted(self.below())
            # Stopping first keeps a program that forks in a loop from outrunning the list.
            seen: dict[int, str] = {}
            while (found := self.below()) and not found.keys() <= seen.keys():
                self.signal_all(found, signal.SIGSTOP)
                seen.update(found)
                if time.monotonic() >= deadline:
                    break
            self.signal_all(seen, signal.SIGKILL)
            self.wait(POLL_SECONDS)
        return []

    def run(self, grace: float, leftover_wait: float, leftover_grace: float) -> None:
        """See the command through to its end, and to the end of all that it left behind."""
        while self.exit_status is None and not self.asked:
            self.wait(None)
            self.reap()
        leftover = 0
        if not self.asked:
            deadline = time.monotonic() + leftover_wait
            while self.left() and not self.asked and time.monotonic() < deadline:
                self.wait(min(POLL_SECONDS, deadline - time.monotonic()))
            leftover = len(self.below()) if self.left() else 0
            grace = leftover_grace
        survivors = self.end_all(grace)
        self.report(type="done", leftover=leftover, survivors=survivors)


def main(argv: list[str]) -> None:
    """Run the command that the arguments name."""
    control, status = int(argv[1]), int(argv[2])
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    supervisor = Supervisor(control, status)
    supervisor.start(argv[6:])
    supervisor.run(float(argv[3]), float(argv[4]), float(argv[5]))


if __name__ == "__main__":
    main(sys.argv)
