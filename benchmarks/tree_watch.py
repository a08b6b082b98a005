"""What does it cost to watch 10,000 live tasks of a session whose holder commits steadily?

A holder runs in a process of its own, over a store with a wide fan-out, a hundred owners with a
hundred tasks each, and 100 tasks that work all the time. `pidurable task tree --watch` runs in
another one, on a terminal of 80 columns that is taller than it may use, twice a second. Counted are
the lines on the screen at most, what is written to it a second, and the processor time of that
process a second, its start and its end included.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import attrs
import trio
from _processes import Process, tell
from _raw import Rows
from _runtimes import Seed, open_tasks, task_row

from pidurable.records import _codec, _json
from pidurable.records._tasks import Status, Wait
from pidurable.storage import Op
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase

SECONDS = 20.0
SHORT_SECONDS = 5.0
LIVE = 10_000
WORKING = 100
OWNERS = 50
PAUSE_SECONDS = 1.0
"""Between two phases of a working task: together they commit about a hundred times a second."""
COLUMNS, ROWS = 80, 100
LINES_MUST, KB_S_MUST, CORE_MUST = 60, 20.0, 0.10


@attrs.frozen
class Step:
    """How often it has worked."""

    number: int


WorkContext = TaskContext[int, Step, int]


class Work(Task[int, Step, int]):
    """Goes from phase to phase for ever, with a pause between."""

    name = "bench.work"
    abort = nothing_to_undo

    def initial(self, input: int) -> Step:
        return Step(0)

    @phase
    async def step(self, at: Step, ctx: WorkContext) -> None:
        await trio.sleep(PAUSE_SECONDS)
        await ctx.goto(Step(at.number + 1))


class Sleeper(Task[int, Step, int]):
    """Waits for a signal that never comes."""

    name = "bench.wait"
    abort = nothing_to_undo

    def initial(self, input: int) -> Step:
        return Step(0)

    @phase
    async def step(self, at: Step, ctx: WorkContext) -> None:
        await ctx.wait(then=at, signals=True)


def seed(path: Path) -> None:
    """A store with `LIVE` tasks: those that work, and waiting ones, half of them owned."""
    made = Seed(path)
    owners: list[int] = []
    waits = _json.dumps(_codec.encode_wait(Wait(signals=True)))

    def waiting(number: int, id: int) -> Rows:
        owner = None
        if number < OWNERS:
            owners.append(id)
        elif number % 2:
            owner = owners[number // 2 % OWNERS]
        started = {"started_us": made.now_us, "invocations": 1}
        row = task_row(id, "bench.wait", status=int(Status.WAITING), owner=owner, **started)
        return [
            (Op.TASK, row),
            (Op.TASK_INPUT, (id, "0")),
            (Op.CHECKPOINT, (id, "step", '{"number":0}', made.now_us)),
            (Op.WAIT, (id, waits)),
        ]

    def working(number: int, id: int) -> Rows:
        return [
            (Op.TASK, task_row(id, "bench.work")),
            (Op.TASK_INPUT, (id, "0")),
            (Op.CHECKPOINT, (id, "step", '{"number":0}', made.now_us)),
        ]

    made.fill(LIVE - WORKING, waiting)
    made.fill(WORKING, working)
    made.close()


async def hold(path: Path) -> None:
    """Run what is in the store until this process is killed."""
    async with open_tasks(path, Work(), Sleeper(), durability="process") as runtime:
        runtime.start()
        await trio.sleep(2 * PAUSE_SECONDS)  # Until all of them have begun.
        before = runtime.session.line.published_seq
        await trio.sleep(2.0)
        tell({"commits_s": (runtime.session.line.published_seq - before) / 2.0})
        await trio.sleep_forever()


@attrs.define
class Watched:
    """What came out of the watching process."""

    rows: int = 0
    written: int = 0

    def take(self, data: bytes) -> None:
        self.written += len(data)
        for found in re.findall(rb"\x1b\[(\d+)H(?!\x1b\[J)", data):
            self.rows = max(self.rows, int(found))


def watch(path: Path, seconds: float) -> tuple[Watched, float, float]:
    """Watch for a while; what was seen, how long it was, and the processor seconds it took."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "pidurable.cli", "task", "tree", "--watch"]
    environ = {**os.environ, "TERM": "xterm"}
    begun = time.monotonic()
    process = subprocess.Popen(
        [*command, "--store", str(path)],
        stdin=slave,
        stdout=slave,
        env=environ,
        start_new_session=True,
    )
    os.close(slave)
    seen = Watched()
    leaving = False
    while True:
        if not leaving and time.monotonic() - begun >= seconds:
            process.send_signal(signal.SIGINT)
            leaving = True
        if not select.select([master], [], [], 0.05)[0]:
            continue
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # Linux says so when the last one has closed the terminal.
            break
        if not data:
            break
        seen.take(data)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.close(master)
    if process.returncode != 130:
        raise RuntimeError(f"the watch ended with {process.returncode}")
    return seen, time.monotonic() - begun, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a try of a few seconds")
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold is not None:
        trio.run(hold, given.hold)
        return
    seconds = SHORT_SECONDS if given.short else SECONDS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        seed(path)
        with Process(__file__, "--hold", path) as holder:
            commits = holder.hear()["commits_s"]
            seen, elapsed, processor = watch(path, seconds)
    kb_s, core = seen.written / 1000 / elapsed, processor / elapsed
    print(f"{LIVE:,} live tasks, {commits:.0f} commits a second, watched for {elapsed:.0f} s")
    print(f"lines on the screen    {seen.rows:8d}   must {LINES_MUST}")
    print(f"kB written a second    {kb_s:8.2f}   must {KB_S_MUST:g}")
    print(f"share of a core        {core:8.3f}   must {CORE_MUST:g}")
    print(f"tree_watch: lines={seen.rows} kb_s={kb_s:.2f} core={core:.3f}")


if __name__ == "__main__":
    main()
