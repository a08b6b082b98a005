"""Does opening a store take longer because a million tasks have ended in it?

Two stores have the same 10,000 live tasks, each with a checkpoint of about 600 B: one of them has
nothing else, in the other 1,000,000 ended tasks lie between them. A fresh process opens one or the
other, imports included, until the harness is open, and until each live task runs in its handler.
Every round is done with the file in memory (warm), and with the system asked to forget it (cold).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import trio
from _processes import Process, tell
from _raw import Rows, Stopwatch, Table

ROUNDS = 5
LIVE = 10_000
ENDED = 1_000_000
SHORT_LIVE = 1_000
SHORT_ENDED = 20_000
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


async def open_store(path: Path, count: int) -> None:
    """The role of a process: open, say when it is open and when all runs, and close."""
    import attrs
    from _runtimes import open_tasks

    from pidurable.records._limits import Settings
    from pidurable.tasks._context import TaskContext
    from pidurable.tasks._definition import Task, nothing_to_undo, phase

    @attrs.frozen
    class Number:
        number: int

    @attrs.frozen
    class Here:
        number: int
        text: str

    begun = 0
    all_begun = trio.Event()

    class Stay(Task[Number, Here, None]):
        name = "bench.stay"
        abort = nothing_to_undo

        def initial(self, input: Number) -> Here:
            return Here(input.number, TEXT)

        @phase
        async def here(self, at: Here, ctx: TaskContext[Number, Here, None]) -> None:
            nonlocal begun
            begun += 1
            if begun == count:
                all_begun.set()
            await trio.sleep_forever()

    async with open_tasks(path, Stay(), settings=Settings(running_max=2 * count)) as runtime:
        # Of the processor alone, which other work on the machine disturbs less.
        tell({"cpu_s": time.process_time()})
        runtime.start()
        await all_begun.wait()
        tell({"cpu_s": time.process_time()})


def seed_store(path: Path, live: int, ended: int) -> None:
    """A store whose live tasks lie evenly between the ended ones."""
    from _runtimes import Seed, task_row

    from pidurable.records import _codec, _json
    from pidurable.records._tasks import OutcomeRecord, Status
    from pidurable.storage import Op

    seed = Seed(path)
    outcome = _json.dumps(
        _codec.encode_outcome(OutcomeRecord(status="completed", result=TEXT, has_result=True))
    )
    every = ended // live + 1

    def rows(number: int, id: int) -> Rows:
        text = f'{{"number":{number}}}'
        if number % every == 0:
            checkpoint = _json.dumps({"number": number, "text": TEXT})
            return [
                (Op.TASK, task_row(id, "bench.stay")),
                (Op.TASK_INPUT, (id, text)),
                (Op.CHECKPOINT, (id, "here", checkpoint, seed.now_us)),
            ]
        given = {
            "status": int(Status.TERMINAL),
            "started_us": seed.now_us,
            "ended_us": seed.now_us,
            "outcome_status": "completed",
        }
        return [
            (Op.TASK, task_row(id, "bench.stay", **given)),
            (Op.TASK_INPUT, (id, text)),
            (Op.OUTCOME, (id, outcome)),
        ]

    seed.fill(live * every, rows)
    seed.close()


def forget(path: Path) -> None:
    """Ask the system to read the file from the disk the next time."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def measure(folder: Path, live: int, ended: int) -> None:
    table = Table()
    stores = {"with history": ended, "without": 0}
    for name, count in stores.items():
        watch = Stopwatch()
        seed_store(folder / name, live, count)
        size = os.path.getsize(folder / name)
        print(f"{name}: {size / 2**20:,.0f} MiB, filled in {watch.seconds():.0f} s")
    for number in range(ROUNDS):
        for state in ("warm", "cold"):
            for name in stores if number % 2 == 0 else reversed(stores):
                path = folder / name
                if state == "cold":
                    forget(path)
                watch = Stopwatch()
                with Process(__file__, "--open", path, live) as process:
                    for what in ("open", "all running"):
                        heard = process.hear()
                        table.add(f"{state}, {name}: {what}, s", watch.seconds())
                        table.add(f"{state}, {name}: {what}, s of CPU", heard["cpu_s"])
                    process.finish()
    table.show()
    warm = table.median("warm, with history: open, s")
    ratio = table.ratio("warm, with history: open, s", "warm, without: open, s")
    running = table.median("warm, with history: all running, s")
    cold = table.median("cold, with history: open, s")
    cpu = table.median("warm, with history: open, s of CPU")
    print(
        f"open: warm_s={warm:.2f} ratio={ratio:.2f} running_s={running:.2f} cold_s={cold:.2f}"
        f" cpu_s={cpu:.2f} live={live} ended={ended}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help=f"{SHORT_ENDED:,} ended tasks")
    parser.add_argument("--open", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open is not None:
        trio.run(open_store, Path(given.open[0]), int(given.open[1]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        if given.short:
            measure(Path(folder), SHORT_LIVE, SHORT_ENDED)
        else:
            measure(Path(folder), LIVE, ENDED)
