"""Hard scenario: a held chain and a wide hold end in few commits and in linear work."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import trio
from recount import check_tree
from seeded import Seed, plant, unwatched
from worlds import World, done

from pidurable.records._limits import PASS_RECORDS_MAX
from pidurable.records._tasks import Status
from pidurable.storage import Op

FIRST = 2
"""The id of the topmost task; the root conversation has the one before."""


class Ends:
    """A participant that notes which tasks each commit made terminal, in its own order."""

    def __init__(self) -> None:
        self.commits: list[list[int]] = []

    def committed(self, tx: Any) -> None:
        ended = [
            row.id for op, row in tx.writes if op is Op.TASK_STATE and row.status == Status.TERMINAL
        ]
        if ended:
            self.commits.append(ended)

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...


def chain_of(held: int) -> list[Seed]:
    """So many tasks that hold, each owning the next, over a leaf that is ready to run."""
    chain = [
        Seed(
            id=FIRST + level,
            name=f"level {level}",
            owner=FIRST + level - 1 if level else None,
            held="completed",
        )
        for level in range(held)
    ]
    return [*chain, Seed(id=FIRST + held, name="leaf", owner=FIRST + held - 1)]


@pytest.mark.parametrize(
    "held", [2, 499, 500, 501, 1_000, pytest.param(20_000, marks=pytest.mark.slow)]
)
async def test_a_held_chain_ends_in_one_commit_for_every_500_levels(
    held: int, slow_run: bool
) -> None:
    """Exactly ceil(n / 500) commits end n held owners, each after what is below it; 20,000 too."""
    # Hard scenario: held chain and wide hold.
    if held > 1_000 and not slow_run:
        pytest.skip("takes seconds; run it with -m slow")
    world = World()
    plant(world, chain_of(held))
    world.scripts["leaf"] = done
    ends = Ends()
    async with world.open(start=False) as rt:
        unwatched(world)
        rt.session.participants.append(ends)
        rt.start()
        top = await world.end(FIRST)
        await rt.wait_for_idle()
        assert top.result == "level 0"
        assert not rt.published.nodes
        assert not rt.index.ends
    leaf, *commits = ends.commits
    assert leaf == [FIRST + held]
    assert len(commits) == -(-held // PASS_RECORDS_MAX)
    assert all(len(commit) <= PASS_RECORDS_MAX for commit in commits)
    # Bottom-up through all commits: no owner before what is below it.
    assert [id for commit in commits for id in commit] == list(
        range(FIRST + held - 1, FIRST - 1, -1)
    )


async def test_a_held_chain_goes_on_where_a_crash_cut_it() -> None:
    """Killed between two of its commits, what is left ends bottom-up after the reopening."""
    # Hard scenario: held chain and wide hold.
    held = 1_200
    world = World()
    plant(world, chain_of(held))
    world.scripts["leaf"] = done
    async with world.crashing(start=False) as rt:
        unwatched(world)

        class AfterTheFirst(Ends):
            def committed(self, tx: Any) -> None:
                super().committed(tx)
                if len(self.commits) == 2:
                    world.storage.freeze()

        rt.session.participants.append(AfterTheFirst())
        rt.start()
        await world.quiet()
    rows = world.base.reopen()._data.tasks
    live = [id for id, row in rows.items() if row.status != Status.TERMINAL]
    assert live == list(range(FIRST, FIRST + held - PASS_RECORDS_MAX))
    ends = Ends()
    async with world.open(start=False) as rt:
        unwatched(world)
        rt.session.participants.append(ends)
        rt.start()
        assert (await world.end(FIRST)).result == "level 0"
    assert [id for commit in ends.commits for id in commit] == live[::-1]
    assert len(ends.commits) == -(-len(live) // PASS_RECORDS_MAX)


async def test_an_abort_of_a_held_chain_marks_it_top_down_and_ends_it_bottom_up() -> None:
    """Marks too come at most 500 a commit, each owner before what is below it."""
    # Hard scenario: held chain and wide hold.
    held = 3_000
    world = World()
    plant(world, chain_of(held))
    marked: list[list[int]] = []
    seen: set[int] = set()

    class Marks(Ends):
        def committed(self, tx: Any) -> None:
            super().committed(tx)
            new = [
                row.id
                for op, row in tx.writes
                if op is Op.TASK_STATE and row.abort_us is not None and row.id not in seen
            ]
            seen.update(new)
            if new:
                marked.append(new)

    async with world.open(start=False) as rt:
        unwatched(world)
        ends = Marks()
        rt.session.participants.append(ends)
        await world.abort(FIRST)
        assert (await world.end(FIRST)).result == "level 0"  # a held outcome stays
    assert marked[0] == [FIRST]
    assert [id for commit in marked for id in commit] == list(range(FIRST, FIRST + held + 1))
    assert max(len(commit) for commit in marked) <= PASS_RECORDS_MAX
    assert len(marked) == 1 + -(-held // PASS_RECORDS_MAX)
    ended = [id for commit in ends.commits for id in commit]
    assert ended == list(range(FIRST + held, FIRST - 1, -1))
    assert world.outcome(FIRST + held) == "aborted"
    assert world.log == []


async def calls_to_end(siblings: int) -> int:
    """How many calls the scheduler makes to end so many held siblings, and their owner with them.

    Everything that it calls counts, also what is written in C, so that a scan of a dict or a list
    that looks at its members counts as well.
    """
    world = World()
    go = trio.Event()
    seeds = [Seed(id=FIRST, name="owner", held="completed")]
    for n in range(siblings):
        held = FIRST + 1 + 2 * n
        seeds += [
            Seed(id=held, name=f"held {n}", owner=FIRST, held="completed"),
            Seed(id=held + 1, name="leaf", owner=held),
        ]
    plant(world, seeds)

    async def leaf(at: Any, ctx: Any) -> None:
        await go.wait()
        await ctx.complete("")

    world.scripts["leaf"] = leaf
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        if (
            event != "return"
            and event != "c_return"
            and "pidurable/tasks" in frame.f_code.co_filename
        ):
            calls += 1

    async with world.open(start=False) as rt:
        unwatched(world)
        ends = Ends()
        rt.session.participants.append(ends)
        rt.start()
        await world.quiet()
        assert len(rt.index.running) == siblings
        sys.setprofile(count)
        try:
            go.set()
            await world.end(FIRST)
        finally:
            sys.setprofile(None)
        check_tree(rt, world.base)
        assert not rt.published.nodes
    ended = [id for commit in ends.commits for id in commit]
    assert ended[-1] == FIRST
    assert len(ended) == 1 + 2 * siblings
    for n in range(siblings):
        held = FIRST + 1 + 2 * n
        assert ended.index(held + 1) < ended.index(held)
    return calls


async def test_the_work_to_end_a_wide_hold_grows_with_the_siblings_and_no_faster() -> None:
    """1,000 siblings under one owner cost each what 100 do, and end before their owner."""
    # Hard scenario: held chain and wide hold.
    few = await calls_to_end(100)
    many = await calls_to_end(1_000)
    assert 9 * few < many < 11 * few
