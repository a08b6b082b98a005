"""A bank that is down, also when something has to be given back; and an answer that takes long.

Teaches: `retry`, which runs a phase again from its checkpoint after a stored, growing delay, and an
abort handler too, so that the money comes back; and a phase that asks on and on with `backoff`.

Run it with: python examples/09_retries.py
"""

from __future__ import annotations

import logging
from datetime import timedelta

import attrs
import trio
from trio.testing import MockClock

from pidurable import Extension, Registry, Retry, Task, TaskContext, backoff, open_harness, phase
from pidurable.testing import InlineBlocking, TrioClock


def call_bank(what: str) -> None:
    minutes = int(trio.current_time() / 60)
    if minutes < 60:  # for the first hour
        raise ConnectionError("the bank is down")
    print(f"{minutes // 60:02}:{minutes % 60:02} {what}")


@attrs.frozen
class Send:
    pass


@attrs.frozen
class Follow:
    asked: int


class Transfer(Task[str, Send | Follow, str]):
    name = "bank.transfer"
    retry = Retry(on=(ConnectionError,), tries=100, base=60, maximum=600, jitter=0)

    def initial(self, name: str) -> Send:
        return Send()

    @phase
    async def send(self, at: Send, ctx: TaskContext[str, Send | Follow, str]) -> None:
        call_bank(f"sent: {ctx.input}")  # while this raises, the phase runs again by itself
        await ctx.goto(Follow(1))

    @phase
    async def follow(self, at: Follow, ctx: TaskContext[str, Send | Follow, str]) -> None:
        call_bank(f"asked: {ctx.input}")
        if at.asked < 4:
            pause = timedelta(seconds=backoff(at.asked, base=1800, maximum=7200, seed=ctx.task_id))
            await ctx.wait(then=Follow(at.asked + 1), deadline=ctx.now() + pause)
        else:
            await ctx.complete("it has arrived")

    async def abort(self, at: Send | Follow, ctx: TaskContext[str, Send | Follow, str]) -> None:
        call_bank(f"taken back: {ctx.input}")  # retried too, while the task keeps its mark
        await ctx.end_aborted()


async def main() -> None:
    logging.getLogger("pidurable").setLevel(logging.ERROR)  # it warns of each try that failed
    registry = Registry()
    registry.install(Extension("bank", tasks=[Transfer()]))
    clock, inline = TrioClock(), InlineBlocking()
    async with open_harness(":memory:", registry=registry, clock=clock, blocking=inline) as harness:
        root = await harness.root()
        kept, regretted = [await root.create_task(Transfer, name) for name in ("kept", "regretted")]
        await trio.sleep(60)
        await harness.abort_task(regretted)  # it may have been sent, for all that we know
        print("kept:", (await harness.wait_for_task(kept)).result)


if __name__ == "__main__":
    trio.run(main, clock=MockClock(autojump_threshold=0))
