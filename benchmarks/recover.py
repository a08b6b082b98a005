"""How long after a kill -9 are 10,000 interrupted tasks running again?

One process runs the tasks, each in its handler with a checkpoint of about 600 B, and is killed. The
time is that of a fresh process from its start, imports included, until each task has an invocation
whose handler has begun. The reference does by hand what that needs at least: it reads the rows,
decodes each checkpoint with the same codec, writes that each task runs, and starts a trio task
each.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import trio
from _processes import Process, tell
from _raw import Stopwatch, Table

ROUNDS = 5
TASKS = 10_000
SHORT_TASKS = 1_000
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


async def run_tasks(path: Path, count: int, *, create: bool) -> None:
    """The role of a process: open, run `count` tasks, say so, and stay until killed."""
    watch = Stopwatch()
    import attrs
    from _runtimes import open_tasks

    from pidurable.records._limits import Settings
    from pidurable.tasks._context import TaskContext
    from pidurable.tasks._definition import Task, nothing_to_undo, phase
    from pidurable.tasks._transaction import TreeTransaction

    imported = watch.seconds()

    @attrs.frozen
    class Number:
        number: int

    @attrs.frozen
    class Here:
        number: int
        text: str
        parts: list[int]

    begun = 0
    all_begun = trio.Event()

    class Stay(Task[Number, Here, None]):
        name = "bench.stay"
        abort = nothing_to_undo

        def initial(self, input: Number) -> Here:
            return Here(input.number, TEXT, [1, 2, 3])

        @phase
        async def here(self, at: Here, ctx: TaskContext[Number, Here, None]) -> None:
            nonlocal begun
            begun += 1
            if begun == count:
                all_begun.set()
            await trio.sleep_forever()

    settings = Settings(running_max=2 * count)
    async with open_tasks(path, Stay(), settings=settings) as runtime:
        opened = watch.seconds()
        if create:

            def fill(tx: TreeTransaction) -> None:
                conversation = tx.create_conversation()
                for number in range(count):
                    tx.create_task(Stay, Number(number), conversation=conversation)

            await runtime.commit(fill)
        runtime.start()
        await all_begun.wait()
        tell({"imported_s": imported, "opened_s": opened, "running_s": watch.seconds()})
        await trio.sleep_forever()


async def by_hand(path: Path, count: int) -> None:
    """The reference, in a fresh process too."""
    import apsw
    import attrs

    from pidurable.records import _json
    from pidurable.records._codec import Codec
    from pidurable.session._seams import SystemClock
    from pidurable.storage import Op, TaskStateRow
    from pidurable.storage._sqlite_statements import READS, WRITES

    @attrs.frozen
    class Here:
        number: int
        text: str
        parts: list[int]

    begun = 0
    all_begun = trio.Event()

    async def here(at: Here) -> None:
        nonlocal begun
        begun += 1
        if begun == count:
            all_begun.set()
        await trio.sleep_forever()

    codec, now = Codec(), SystemClock().now_us()
    connection = apsw.Connection(str(path))
    connection.execute("pragma synchronous = full")
    rows = connection.execute(READS["live_tasks"], (0, count)).fetchall()
    checkpoints = [
        codec.decode(_json.loads_stored(text), Here)
        for (text,) in connection.execute(
            "select value from checkpoints join tasks on id = task where status < 4"
        )
    ]
    states = [
        # The columns as a reservation writes them.
        TaskStateRow(1, 1, now, None, None, None, 2, 1, 0, now, None, None, None, int(row[0]))  # type: ignore[arg-type]
        for row in rows
    ]
    connection.execute("begin immediate")
    connection.executemany(WRITES[Op.TASK_STATE], states)
    connection.execute("commit")
    async with trio.open_nursery() as nursery:
        for at in checkpoints:
            nursery.start_soon(here, at)
        await all_begun.wait()
        tell({})
        await trio.sleep_forever()


def timed(table: Table, name: str, *arguments: object) -> None:
    """Start a process, and note how long it takes until it speaks."""
    watch = Stopwatch()
    with Process(__file__, *arguments) as process:
        heard = process.hear()
        table.add(f"{name}, s", watch.seconds())
        for part, seconds in heard.items():
            table.add(f"  of it {part.removesuffix('_s')} after, s", seconds)


def measure(folder: Path, count: int) -> None:
    table = Table()
    for number in range(ROUNDS):
        mine, theirs = folder / f"product{number}.sqlite", folder / f"raw{number}.sqlite"
        with Process(__file__, "--create", mine, count) as process:
            process.hear()
            process.kill()
        # A copy, with its log, is what the killed process left.
        for suffix in ("", "-wal"):
            shutil.copy(f"{mine}{suffix}", f"{theirs}{suffix}")
        parts = [
            lambda path=mine: timed(table, "running again", "--again", path, count),
            lambda path=theirs: timed(table, "by hand", "--by-hand", path, count),
        ]
        for part in parts if number % 2 == 0 else reversed(parts):
            part()
    table.show()
    seconds = table.median("running again, s")
    ratio = table.ratio("running again, s", "by hand, s")
    name = f"s_{count // 1000}k"
    print(f"recover: {name}={seconds:.2f} ratio={ratio:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help=f"{SHORT_TASKS:,} tasks")
    parser.add_argument("--create", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--again", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--by-hand", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    role = given.create or given.again
    if role is not None:
        trio.run(lambda: run_tasks(Path(role[0]), int(role[1]), create=given.create is not None))
        sys.exit()
    if given.by_hand is not None:
        trio.run(by_hand, Path(given.by_hand[0]), int(given.by_hand[1]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), SHORT_TASKS if given.short else TASKS)
