"""Plays a program of turns in this process: virtual time, a memory store that dies and is reopened.

A death is a frozen storage: from then on nothing more is stored and nothing outside happens, and
the next life has what was durable. It may be planned for any commit, before or after it, and for
the named points of the loop.
"""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import trio
from agent_world import MODEL, _Ends
from trio.testing import MockClock
from turn_host import Host, told_message
from turn_judge import judge
from turn_outside import BROKEN, CALLED, Book, DrawnScript, Tools

from pidurable.agent._catalogue import ModelInfo
from pidurable.agent._scripted import ScriptedModel
from pidurable.errors import PidurableError
from pidurable.harness._open import Harness, open_harness
from pidurable.records._limits import Settings
from pidurable.registry import Registry
from pidurable.session._seams import Failpoints, InlineBlocking, SeededRandomness, TrioClock
from pidurable.storage import MemoryStorage
from pidurable.testing import FaultyStorage

POINTS = ("commit.before", "commit.after", "CP1", "CP2", "CP3", "CP4", "CP5", "CP6", "CP7")
LIVES_MAX = 60
SECONDS_MAX = 1e9
"""Virtual ones; what takes longer is stuck."""

Program = dict[str, Any]
"""`settings`, `answers` and `ops`, all of them JSON."""

OPERATIONS: dict[str, tuple[float, tuple[int, ...]]] = {
    "send": (9, (2, 4)),
    "burst": (1, (2, 4, 1)),
    "again": (1, (99, 1)),
    "write": (2, (2, 4)),
    "withdraw": (1, (5,)),
    "compact": (1, (2,)),
    "decide": (4, (9, 3, 5)),
    "duel": (1, (9,)),
    "abort": (1.5, (2,)),
    "abort_task": (1.5, (99,)),
    "fork": (0.7, (2, 6)),
    "configure": (1, (2, 6)),
    "reload": (1, (1,)),
    "wait": (7, (6,)),
    "turns": (5, (12,)),
    "crash": (6, (len(POINTS) - 1, 9, 3)),
    "close": (1, ()),
}
"""Its weight, and the largest value of each of its numbers."""

SETTINGS: dict[str, tuple[Any, ...]] = {
    "turns_max": (3, 5, 8),
    "request_tries": (1, 2),
    "owned_depth_max": (2,),
    "recoveries_max": (1000,),
    "limits": ({}, {}, {"pi.tool": 1}),
    "steers": ("all", "one"),
    "follow_ups": ("one", "all"),
    "sequential_tools": (False, False, True),
    "permission_seconds_max": (None, 30.0),
    "reserve_tokens": (60,),
    "keep_recent_tokens": (60, 120),
    "background_tokens": (40, 100),
    "window": (None, None, 500, 1200),
}


# --- drawing --------------------------------------------------------------------------------------


def draw_program(seed: int, length: int) -> Program:
    """The program of a seed."""
    random = Random(f"{seed}/turns")
    names = list(OPERATIONS)
    weights = [OPERATIONS[name][0] for name in names]
    if random.random() < 0.5:
        # Half of the programs have a mind of their own: most operations often, some never.
        weights = [weight * random.choice((0, 1, 1, 2, 4)) for weight in weights]
        weights[names.index("send")] += 5
    chosen = ["send", *random.choices(names, weights, k=length - 1)]
    return {
        "settings": {name: random.choice(values) for name, values in SETTINGS.items()},
        "answers": [_draw_answer(random) for _ in range(random.randint(1, 12))],
        "ops": [[name, *(random.randint(0, m) for m in OPERATIONS[name][1])] for name in chosen],
    }


def _draw_answer(random: Random) -> list[Any]:
    kind = random.choices(
        ("text", "slow text", "calls", "error", "cut", "empty", "deferred"),
        (5, 3, 10, 1.5, 1, 0.5, 1),
    )[0]
    if kind != "calls":
        return [kind, random.randint(0, 4), random.randint(0, 3)]
    calls = [
        [
            random.randrange(len(CALLED)),
            # One call in nine is broken.
            random.randrange(len(BROKEN)) if random.random() < 0.11 else len(BROKEN),
        ]
        for _ in range(random.choice((1, 1, 2, 2, 3, 4)))
    ]
    return [kind, calls, random.randint(0, 1), random.choice((0, 0, 1, 3))]


def settings_of(program: Program) -> Settings:
    """The settings of a program."""
    given = dict(program["settings"])
    given.pop("window", None)
    return Settings(**given)


# --- playing --------------------------------------------------------------------------------------


class Death(Failpoints):
    """Freezes the storage of the life that runs at the planned pass of a point."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._name: str | None = None
        self._left = 0

    def plan(self, name: str, nth: int) -> None:
        self._name, self._left = name, nth

    def hit(self, name: str) -> None:
        """Count, and die if it is time."""
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            self._name = None
            self._player.storage.freeze()
            self._player.deaths.append(name)
            raise OSError(f"died at {name}")


class Player:
    """One program, from its first opening to the judgement."""

    def __init__(self, program: Program, *, seed: int = 0) -> None:
        self.program = program
        self.base = MemoryStorage(uuid="turns", created_us=1)
        self.storage = FaultyStorage(self.base)
        self.book = Book()
        self.script = DrawnScript(program["answers"], window=program["settings"].get("window"))
        self.model = ScriptedModel(())
        self.model._script = self.script  # type: ignore[assignment]
        self.tools = Tools(self.book, dead=lambda: self.storage.frozen)
        self.registry = Registry()
        self.registry.install(self.tools.extension())
        self.host = Host(self.book, self.tools, self.registry, model=MODEL)
        self.clock = TrioClock()
        self.death = Death(self)
        self.deaths: list[str] = []
        self.ends: Counter[int] = Counter()
        self.commits = 0
        self.lives = 0
        self.facts: dict[str, Any] = {}
        self._seed = seed
        self._upgrades = False
        """Whether the next life has another version of the extension."""
        self._left = [list(op) for op in program["ops"]]

    async def run(self) -> None:
        """Live as many lives as it takes."""
        with trio.fail_after(SECONDS_MAX):
            while not self.facts:
                assert self.lives < LIVES_MAX
                await self._live()

    async def _live(self) -> None:
        self.storage = FaultyStorage(self.base.reopen())
        self.lives += 1
        try:
            async with open_harness(
                self.storage,
                registry=self.registry,
                models=self.model.models(
                    catalogue={MODEL: ModelInfo(context_window=self.script.context_window)}
                ),
                settings=settings_of(self.program),
                clock=self.clock,
                blocking=InlineBlocking(),
                randomness=SeededRandomness(self._seed * 1000 + self.lives),
                failpoints=self.death,
            ) as harness:
                harness.session.participants.append(_Ends(self.ends))
                await self._play(harness)
        except* (PidurableError, OSError) as group:
            # A host that died in the middle of a call of its own sees the failpoint itself.
            if not self.storage.frozen:
                raise group.exceptions[0] from None

    async def _play(self, harness: Harness) -> None:
        if self._upgrades and self.deaths:
            self._upgrades = False
            await self.host.act(harness, "reload", 0)
        await self.host.begin(harness)
        while self._left:
            name, *numbers = self._left.pop(0)
            if name == "close":
                return
            if name == "crash":
                point, nth, *upgrade = numbers
                name = POINTS[point % len(POINTS)]
                # Commits are many; the named points are passed a few times in a program.
                self.death.plan(name, 1 + (nth if name.startswith("commit") else nth // 4))
                self._upgrades = upgrade == [0]
            else:
                await self.host.act(harness, name, *numbers)
            if self.storage.frozen:
                return
        self.facts = await self.host.finish(harness, self._calm)

    def _calm(self) -> None:
        self.script.calm = True

    def told_requests(self) -> list[list[dict[str, Any]]]:
        """The messages of each request that the provider got, as JSON."""
        return [
            [told_message(item.message) for item in request.messages]
            for request in self.model.requests
        ]

    def problems(self) -> list[str]:
        """What is wrong, by what the outside and the store say."""
        found = [f"refused: {failure}" for failure in self.model.failures]
        found += [
            f"submission {id} ended {count} times" for id, count in self.ends.items() if count != 1
        ]
        return found + judge(self.book.lines, self.told_requests(), self.script.given, self.facts)


def play(program: Program, *, seed: int = 0) -> Player:
    """Play a program in a loop of its own, with the schedule of a seed."""
    random = trio._core._run._r  # type: ignore[attr-defined]
    state = random.getstate()
    before = trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING  # type: ignore[attr-defined]
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    random.seed(f"{seed}/schedule")
    player = Player(program, seed=seed)
    try:
        trio.run(player.run, clock=MockClock(autojump_threshold=0))
    finally:
        trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[attr-defined]
        random.setstate(state)
    return player


def first_problem(program: Program, seed: int) -> Player | str:
    """Play a program; the player of one that is right, or what is wrong first."""
    try:
        player = play(program, seed=seed)
        found = player.problems()
    except (Exception, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        return f"{type(first).__name__}: {first}"
    return found[0] if found else player


def replay_command(seed: int, program: Program) -> str:
    """What to type to see a program fail again."""
    text = json.dumps(program, separators=(",", ":")).replace("'", "\\u0027")
    return f"python tests/agent/turn_programs.py --seed {seed} --program '{text}'"
