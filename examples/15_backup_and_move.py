"""A parcel on its way: its session is exported while it works, then moved, and copied.

Teaches: `export_session`, which writes one state of a session into a file while work goes on;
`import_session` as a move, which goes on under the same keys, so that nothing is paid twice; and as
a copy, another session with the same past, whose effects have keys of their own.

Run it with: python examples/15_backup_and_move.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import attrs
import trio

from pidurable import (
    Extension,
    Harness,
    Registry,
    Task,
    TaskContext,
    export_session,
    import_session,
    nothing_to_undo,
    open_harness,
    phase,
)

stamps: dict[str, int] = {}  # the post office sells one stamp for each key, however often asked
sold, opens = trio.Event(), trio.Event()


@attrs.frozen
class AtTheCounter:
    """A stamp was sold or not: who was killed here cannot know, and asks again."""


class Parcel(Task[str, AtTheCounter, str]):
    name = "post.parcel"
    abort = nothing_to_undo

    def initial(self, address: str) -> AtTheCounter:
        return AtTheCounter()

    @phase
    async def send(self, at: AtTheCounter, ctx: TaskContext[str, AtTheCounter, str]) -> None:
        stamp = stamps.setdefault(ctx.key("stamp"), len(stamps) + 1)
        sold.set()
        await opens.wait()  # the counter for parcels
        await ctx.complete(f"sent to {ctx.input} with stamp {stamp}")


async def send(harness: Harness) -> str:
    task = await (await harness.root()).create_task(Parcel, "Ada", key="parcel")  # made once
    return str((await harness.wait_for_task(task)).result)


async def main(folder: Path) -> None:
    registry = Registry()
    registry.install(Extension("post", tasks=[Parcel()]))
    old, file = folder / "old", folder / "parcel.jsonl"
    async with open_harness(old, registry=registry) as harness, trio.open_nursery() as work:
        work.start_soon(send, harness)
        await sold.wait()
        report = await export_session(old, file)  # beside its holder, which goes on
        print("exported, with unfinished tasks:", report.live_tasks)
        work.cancel_scope.cancel()  # this machine goes away; the original must never work again
    opens.set()
    for store, as_copy in ((folder / "moved", False), (folder / "copied", True)):
        await import_session(file, store, as_copy=as_copy)
        async with open_harness(store, registry=registry) as harness:
            print(f"{store.name}:", await send(harness), "- stamps sold:", len(stamps))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        trio.run(main, Path(place))
