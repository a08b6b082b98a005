"""What the end of one of many awaited tasks costs does not depend on how many there are."""

from __future__ import annotations

from typing import Any

from worlds import Watcher, World, done, parent_of


class Counter(Watcher):
    """Counts, for each accepted commit, how many awaited tasks it left staged."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.staged: list[int] = []

    def joined(self, tx: Any) -> None:
        cycles = self.world.rt.cycles
        # As a wait in the same batch would do.
        cycles._sort()
        self.staged.append(len(cycles._staged_waiters))


async def test_the_end_of_a_child_stages_nothing_of_its_siblings() -> None:
    """Only the commit that makes a wait stages what it waits for, once."""
    world = World()
    names = [f"kid {n}" for n in range(200)]
    world.scripts.update(dict.fromkeys(names, done))
    world.scripts["parent"] = parent_of(*names)
    counter = Counter(world)
    async with world.open() as rt:
        rt.session.participants.append(counter)
        assert (await world.end(await world.create("parent"))).status == "completed"
    first = counter.staged.index(200)
    assert len(counter.staged) > 200
    # Bodies that share the batch of the wait see it staged; every later batch stages none.
    later = counter.staged[first:]
    assert set(later[later.index(0) :]) == {0}
