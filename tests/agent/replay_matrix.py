"""The replay matrix: what becomes of a call that a crash interrupts, by policy stored and current.

Each cell is a call of a tool whose policy was one when its intent was stored and is another, or
whose tool is gone, when the store is opened again. The process dies at one of four points. The
tool's effect is a line in a ledger outside of the store; that ledger says what happened, and the
table below, written by hand from the design, says what ought to.

    python tests/agent/replay_matrix.py             80 cells, as a table
    python tests/agent/replay_matrix.py --control   with a planted bug, which must be seen

The last line is the verdict.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import trio
from agent_world import World, ask, calls, odd_tool, results, text_of, verify
from trio.testing import MockClock

from pidurable import Happened, Rerun
from pidurable.agent import _replay
from pidurable.errors import PidurableError
from pidurable.registry import Tool, ToolCall, ToolResult
from pidurable.session._seams import Failpoints

POLICIES = ("safe", "reconcile", "interrupt", "park")
CURRENT = (*POLICIES, "gone")
POINTS = ("CP1", "CP2", "CP3", "CP4")

_AFTER_INTENT = {
    #            now: safe        reconcile      interrupt      park           gone
    "safe": ("again", "asked", "interrupted", "person", "interrupted"),
    # A tool that is `safe` now has nothing that it could be asked by.
    "reconcile": ("interrupted", "asked", "interrupted", "person", "interrupted"),
    "interrupt": ("interrupted", "interrupted", "interrupted", "person", "interrupted"),
    # Gone counts as `interrupt`, so `park` is stricter: a person may still know what happened.
    "park": ("person", "person", "person", "person", "person"),
}
"""Between intent and outcome: the stricter of both policies."""

_EFFECTS: dict[tuple[str, ...], tuple[int, str | None]] = {
    # Effects in all, and the code of the result, by what is expected and where it died.
    ("CP1", "first"): (1, None),
    ("CP1", "unavailable"): (0, "tool_unavailable"),
    ("CP2", "again"): (1, None),
    ("CP3", "again"): (2, None),
    ("CP2", "asked"): (1, None),
    ("CP3", "asked"): (1, None),
    ("CP2", "person"): (1, None),
    ("CP3", "person"): (1, None),
    # It is said to run again, and cannot.
    ("CP2", "person", "gone"): (0, "interrupted"),
    ("CP2", "interrupted"): (0, "interrupted"),
    ("CP3", "interrupted"): (1, "interrupted"),
    ("CP4", "kept"): (1, None),
}


def expected(point: str, stored: str, current: str) -> str:
    """What the design says of one cell."""
    if point == "CP1":
        return "unavailable" if current == "gone" else "first"
    if point == "CP4":
        return "kept"
    return _AFTER_INTENT[stored][CURRENT.index(current)]


@attrs.frozen(kw_only=True)
class Cell:
    """One cell, as it was seen from outside."""

    point: str
    stored: str
    current: str
    seen: str
    effects: int
    code: str | None

    @property
    def problem(self) -> str | None:
        """What is not as the design says."""
        word = expected(self.point, self.stored, self.current)
        usual = _EFFECTS[self.point, word]
        wanted = (word, *_EFFECTS.get((self.point, word, self.current), usual))
        found = (self.seen, self.effects, self.code)
        if found == wanted:
            return None
        return f"{self.point} {self.stored} -> {self.current}: {found}, expected {wanted}"


class _Stop(Failpoints):
    """Let the process die exactly at a point: nothing is stored, and no code runs, after it."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self.struck = False

    def hit(self, name: str) -> None:
        """Die at the first pass of the point."""
        if name == self._name and not self.struck:
            self.struck = True
            self._world.storage.freeze()
            raise OSError(f"died at {name}")


def _tool(world: World, replay: str) -> Tool[..., Any]:
    async def reconcile(arguments: Any, call: ToolCall) -> Any:
        # It looks into the ledger, as at a service that knows the key of the call.
        world.ledger.append("asked")
        return ToolResult("it happened") if call.key("x") in world.ledger else False

    async def body(call: ToolCall) -> str:
        world.ledger.append(call.key("x"))
        return "it happened"

    options: dict[str, Any] = {"reconcile": reconcile} if replay == "reconcile" else {}
    return odd_tool(body, replay=replay, **options)


async def play(point: str, stored: str, current: str) -> Cell:
    """Let one call die, open the store again, and see what became of it."""
    world = World(calls("odd"), "ok")
    world.install(_tool(world, stored))
    stop = _Stop(world, point)
    try:
        async with world.open(failpoints=stop) as harness:
            with trio.fail_after(100):
                await ask(harness, "go")
    except* PidurableError:
        pass
    assert stop.struck, f"{point} was not reached"
    world.install(*([] if current == "gone" else [_tool(world, current)]))
    decided = False
    async with world.open() as harness:
        root = await harness.root()
        submission = await root.submit("go", request_id="r1")
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:

                async def decide() -> None:
                    nonlocal decided
                    while not (found := harness.permissions()):  # noqa: ASYNC110
                        await trio.sleep(1)
                    decided = True
                    (request,) = found
                    assert request.subject == "effect"
                    # A person looks, and says what is so.
                    happened = any(line != "asked" for line in world.ledger)
                    decision = Happened("it happened") if happened else Rerun()
                    await harness.decide(request.id, decision, by="somebody")

                nursery.start_soon(decide)
                outcome = await submission.wait()
                nursery.cancel_scope.cancel()
        await harness.wait_for_idle()
        await verify(world, harness)
        (result,) = await results(harness)
    assert outcome.text == "ok"
    if result.code is None:
        assert text_of(result) == "it happened"
    effects = sum(line != "asked" for line in world.ledger)
    return Cell(
        point=point,
        stored=stored,
        current=current,
        seen=_seen(point, result.code, effects, "asked" in world.ledger, decided),
        effects=effects,
        code=result.code,
    )


def _seen(point: str, code: str | None, effects: int, asked: bool, decided: bool) -> str:
    """Name what was seen."""
    if decided:
        return "person"
    if asked:
        return "asked"
    if code is not None:
        return {"tool_unavailable": "unavailable"}.get(code, code)
    return {"CP1": "first", "CP4": "kept"}.get(point, "again")


async def play_all(points: tuple[str, ...] = POINTS, every: int = 1) -> list[Cell]:
    """Play the cells of some points, all of them or every nth."""
    wanted = [(p, s, c) for p in points for s in POLICIES for c in CURRENT]
    return [await play(*cell) for cell in wanted[::every]]


def table(cells: list[Cell]) -> str:
    """The cells as a table: a row per point and stored policy, a column per current one."""
    lines = ["died at  stored     " + "".join(f"{name:<16}" for name in CURRENT)]
    by = {(cell.point, cell.stored, cell.current): cell for cell in cells}
    for point in POINTS:
        for stored in POLICIES:
            row = [by.get((point, stored, current)) for current in CURRENT]
            shown = ["-" if cell is None else f"{cell.seen} ({cell.effects})" for cell in row]
            lines.append(f"{point:<9}{stored:<11}" + "".join(f"{each:<16}" for each in shown))
    return "\n".join(line.rstrip() for line in lines)


@contextmanager
def planted() -> Iterator[None]:
    """Plant a bug: the laxer of the two policies counts."""
    right = _replay.stricter

    def laxer(stored: str, current: str) -> str:
        return stored if right(stored, current) != stored else current

    _replay.stricter = laxer
    try:
        yield
    finally:
        _replay.stricter = right


def main() -> int:
    """Print the table and the verdict."""
    parser = argparse.ArgumentParser(description="Play the replay matrix.")
    parser.add_argument("--control", action="store_true", help="plant a bug; it must be seen")
    control = parser.parse_args().control
    logging.disable(logging.CRITICAL)
    clock = MockClock(autojump_threshold=0)
    if control:
        with planted():
            cells = trio.run(play_all, clock=clock)
    else:
        cells = trio.run(play_all, clock=clock)
    print(table(cells))
    problems = [cell.problem for cell in cells if cell.problem is not None]
    for problem in problems:
        print(problem)
    counts = Counter(cell.seen for cell in cells)
    words = " ".join(f"{word}={counts[word]}" for word in sorted(counts))
    passed = bool(problems) if control else not problems
    verdict = "PASS" if passed else "FAIL"
    print(f"replay: cells={len(cells)} wrong={len(problems)} {words} {verdict}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
