"""Random interleavings: the ledger only ever holds what some decision covered.

The oracle is outside of the product. The tool writes down what ran (task, arguments, version of the
tool, directory); the policy, which is asked last, writes down what it was shown; the host writes
down what it decided about what. Neither digests nor states of requests are looked at.
"""

from __future__ import annotations

import fnmatch
import math
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from agent_world import World, verify
from hypothesis import HealthCheck, given, settings, strategies as st
from trio.testing import MockClock

from pidurable import (
    AgentChange,
    Ask,
    BeforeTool,
    BlockCall,
    Deny,
    Once,
    Pattern,
    PermissionRequest,
    Rewrite,
    ToolTask,
)
from pidurable.agent import _grants, _permissions, _tool_call
from pidurable.agent._script import ScriptedCall, Step
from pidurable.errors import AlreadyDecidedError, InvalidArgumentError, PidurableError
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.registry import Extension, Tool, ToolCall, hook, tool

RISKS = ["low", "medium", "high"]
ACTS = ["list a", "list b", "list a; drop", "drop"]


@attrs.frozen
class Shown:
    """What the policy was shown of a call when it was asked last, and how it answered."""

    what: str
    version: int
    risk: str
    asked_at: int
    """How often the policy had been asked before."""


@attrs.frozen
class Ran:
    """What really ran."""

    task: int
    what: str
    version: int
    directory: str
    shown: Shown


@attrs.frozen
class Yes:
    """A yes of a person to what was shown then."""

    task: int
    shown: Shown
    directory: str
    pattern: str | None
    ran_before: int
    """How many calls had run before it was said."""
    revoked_at: float = math.inf
    """How often the policy had been asked when the pattern was revoked."""


class Office:
    """The outside of one world: its policy, its tool, its person, and what each wrote down."""

    def __init__(self, world: World, folders: list[Path]) -> None:
        self.world = world
        self.folders = [str(folder) for folder in folders]
        self.risk: str = "medium"
        self.blocks = False
        self.suffix = ""
        self.asked = 0
        self.shown: dict[int, Shown] = {}
        self.ran: list[Ran] = []
        self.said: list[Yes] = []
        self.install(1)

        async def rewrite(call: BeforeTool) -> Any:
            return Rewrite({"what": call.arguments["what"] + self.suffix}) if self.suffix else None

        async def policy(call: BeforeTool) -> Any:
            what = call.arguments["what"]
            self.shown[call.task] = Shown(what, call.tool.version, self.risk, self.asked)
            self.asked += 1
            return BlockCall("blocked") if self.blocks else Ask(self.risk)  # type: ignore[arg-type]

        for name, asked in (("rewrite", rewrite), ("policy", policy)):
            world.registry.install(Extension(name, hooks=[hook(ToolTask, before_tool=asked)]))

    def install(self, version: int) -> None:
        """Install the tool, or reload it as another version."""
        self.world.install(self._act(version))

    def _act(self, version: int) -> Tool[..., Any]:
        @tool(version=version, permission_text=lambda arguments: str(arguments["what"]))
        async def act(what: str, call: ToolCall) -> str:
            """Act.

            Args:
                what: Which act.
            """
            shown = self.shown[call.id]
            self.ran.append(Ran(call.id, what, version, str(call.env.root), shown))
            await call.sleep(0.01)
            return what

        return act

    async def decide(self, harness: Harness, request: PermissionRequest, how: str) -> None:
        """A person says something about a request, by what the policy was shown of it."""
        pattern = {"all": "*", "list": "list *"}.get(how)
        decision = Deny("no") if how == "no" else Once() if pattern is None else Pattern(pattern)
        # Shown before it is said: whoever reads the request knows what is asked now.
        shown, ran = self.shown[request.task], len(self.ran)
        try:
            await harness.decide(request.id, decision)
        except (AlreadyDecidedError, InvalidArgumentError):
            return
        if how != "no":
            self.said.append(Yes(request.task, shown, request.directory, pattern, ran))

    def revoked(self, pattern: str) -> None:
        """A pattern was taken back: no call that is asked for from now on may use it."""
        self.said = [
            attrs.evolve(yes, revoked_at=min(yes.revoked_at, self.asked))
            if yes.pattern == pattern
            else yes
            for yes in self.said
        ]

    def problems(self) -> list[str]:
        """What ran without a yes that covers it, or more than once."""
        found = [
            f"{ran} was not approved"
            for place, ran in enumerate(self.ran)
            if not any(covered(place, ran, yes) for yes in self.said)
        ]
        tasks = [ran.task for ran in self.ran]
        return found + [f"{task} ran twice" for task in set(tasks) if tasks.count(task) > 1]


def covered(place: int, ran: Ran, yes: Yes) -> bool:
    """Whether what ran is what a yes was said to, or what its pattern allows for later."""
    if (
        place < yes.ran_before
        or yes.shown.version != ran.version
        or yes.directory != ran.directory
        or RISKS.index(ran.shown.risk) > RISKS.index(yes.shown.risk)
    ):
        return False
    if yes.task == ran.task and yes.shown.what == ran.what:
        return True
    return (
        yes.pattern is not None
        and ran.shown.asked_at < yes.revoked_at
        and ";" not in ran.what
        and fnmatch.fnmatchcase(ran.what, yes.pattern)
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("decide"), st.tuples(st.integers(0, 3), st.sampled_from(["no", "once"]))),
        st.tuples(
            st.just("decide"), st.tuples(st.integers(0, 3), st.sampled_from(["all", "list"]))
        ),
        st.tuples(st.just("both"), st.integers(0, 3)),
        st.tuples(st.just("risk"), st.sampled_from(RISKS)),
        st.tuples(st.just("block"), st.booleans()),
        st.tuples(st.just("rewrite"), st.sampled_from(["", " now", "; drop"])),
        st.tuples(st.just("reload"), st.integers(1, 2)),
        st.tuples(st.just("move"), st.integers(0, 1)),
        st.tuples(st.just("revoke"), st.none()),
        st.tuples(st.just("abort"), st.none()),
        st.tuples(st.just("steer"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.005, 1.0, 40.0])),
        st.tuples(st.just("close"), st.none()),
        st.tuples(st.just("crash"), st.none()),
    ),
    min_size=3,
    max_size=25,
)


async def operate(office: Office, harness: Harness, name: str, value: Any) -> None:
    """Do one thing to a harness, or to its surroundings."""
    root = await harness.root()
    found = harness.permissions()
    if name == "decide" and found:
        await office.decide(harness, found[value[0] % len(found)], value[1])
    elif name == "both" and found:
        request = found[value % len(found)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(office.decide, harness, request, "no")
            nursery.start_soon(office.decide, harness, request, "once")
    elif name == "risk":
        office.risk = value
    elif name == "block":
        office.blocks = value
    elif name == "rewrite":
        office.suffix = value
    elif name == "reload":
        office.install(value)
    elif name == "move":
        await root.configure(AgentChange(cwd=office.folders[value]))
    elif name == "revoke":
        for grant in harness.grants():
            await harness.revoke(grant.id)
            office.revoked(grant.pattern)
    elif name == "abort":
        await root.abort()
        await root.submit("go on")
    elif name == "steer":
        await root.submit("and this", when_busy="steer")
    elif name == "wait":
        await trio.sleep(value)


async def play(operations: list[tuple[str, Any]], folders: list[Path]) -> Office:
    """Play a program, in as many lives as it takes, then deny the rest; what the outside knows."""
    calls = [
        Step(calls=tuple(ScriptedCall(name="act", arguments={"what": what}) for what in acts))
        for acts in (ACTS[:3], ACTS[1:], ACTS)
    ]
    limits = Settings(permission_seconds_max=100, turns_max=4)
    world = World(*calls, *calls, settings=limits, repeat_last=True)
    office = Office(world, folders)
    rest = list(operations)
    first = True
    while rest:
        try:
            async with world.open() as harness:
                root = await harness.root()
                if first:
                    await root.configure(AgentChange(cwd=office.folders[0]))
                    await root.submit("go", request_id="r")
                    first = False
                harness.start()
                await trio.sleep(0.1)
                while rest:
                    name, value = rest.pop(0)
                    if name == "crash":
                        world.storage.freeze()
                    if name in ("close", "crash"):
                        break
                    await operate(office, harness, name, value)
        except* PidurableError:
            assert name == "crash"
    async with world.open() as harness:
        harness.start()
        for _ in range(100):
            for request in harness.permissions():
                await office.decide(harness, request, "no")
            if not harness.permissions() and not [t for t in harness.tasks() if not t.outcome]:
                break
            await trio.sleep(1)
        await harness.wait_for_idle()
        await (await harness.root()).abort()
        await verify(world, harness)
        assert harness.permissions() == []
    return office


def run(operations: list[tuple[str, Any]]) -> Office:
    """Play a program in folders of its own, by a clock of its own."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name).resolve() for name in ("here", "there")]
        for each in folders:
            each.mkdir()
        return trio.run(play, operations, folders, clock=MockClock(autojump_threshold=0))


RANDOM = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}


@settings(max_examples=5, **RANDOM)  # type: ignore[arg-type]
@given(operations=OPERATIONS, order=st.random_module())
def test_what_runs_is_what_was_approved(operations: list[tuple[str, Any]], order: Any) -> None:
    """Decisions, changes of policy, tool and place, aborts, expiry and crashes in any order."""
    assert run(operations).problems() == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_runs_is_what_was_approved_in_a_thousand_programs(
    slow_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same a thousand times, or `APPROVAL_PROGRAMS`, with what was met on the way."""
    if not slow_run:
        pytest.skip("takes minutes; run it with -m slow")
    met: Counter[str] = Counter()

    many = int(os.environ.get("APPROVAL_PROGRAMS", "1000"))

    @settings(max_examples=many, database=None, **RANDOM)  # type: ignore[arg-type]
    @given(operations=OPERATIONS, order=st.random_module())
    def programs(operations: list[tuple[str, Any]], order: Any) -> None:
        office = run(operations)
        assert office.problems() == []
        decided = {yes.task for yes in office.said}
        met["programs"] += 1
        met["yes"] += len(office.said)
        met["ran"] += len(office.ran)
        met["by_pattern"] += sum(ran.task not in decided for ran in office.ran)

    programs()
    with capsys.disabled():
        found = " ".join(f"{name}={count}" for name, count in sorted(met.items()))
        print(f"\napprovals: {found} uncovered=0 PASS")
    assert min(met["ran"], met["yes"], met["by_pattern"]) > 0


# Each of these is one step short of a call that may not run as it was approved.
CONTROLS = {
    "covers": [("reload", 2), ("decide", (0, "once")), ("wait", 1.0)],
    "rewrite": [("rewrite", " now"), ("decide", (0, "once")), ("wait", 1.0)],
    "risk": [("risk", "high"), ("decide", (0, "once")), ("wait", 1.0)],
    "move": [("move", 1), ("decide", (0, "once")), ("wait", 1.0)],
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_yes_that_covers_whatever_runs_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the comparison of what was approved planted away, the judge finds what ran wrongly."""
    operations: list[tuple[str, Any]] = [("wait", 1.0), *CONTROLS[name]]
    assert run(operations).problems() == []

    monkeypatch.setattr(_tool_call, "covers", lambda given, asked: True)

    assert any("was not approved" in each for each in run(operations).problems())


def test_a_pattern_that_matches_everything_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the look at chained commands planted away, the judge finds what a pattern let by."""
    operations: list[tuple[str, Any]] = [
        ("wait", 1.0),
        *[("decide", (place, "all")) for place in range(3)],
        ("wait", 1.0),
        *[("decide", (0, "no"))] * 3,
        ("wait", 1.0),
    ]
    assert run(operations).problems() == []

    monkeypatch.setattr(_grants, "chains", lambda text: False)
    monkeypatch.setattr(_permissions, "chains", lambda text: False)

    assert any("was not approved" in each for each in run(operations).problems())


def test_a_grant_that_outlives_its_end_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With revoking planted away, the judge finds the call that a revoked pattern let by."""
    operations: list[tuple[str, Any]] = [
        ("wait", 1.0),
        *[("decide", (place, "list")) for place in range(3)],
        *[("decide", (0, "no"))] * 3,
        ("revoke", None),
        ("wait", 1.0),
    ]
    assert run(operations).problems() == []

    put = _grants._put

    def put_no_end(tx: Any, principal: str, grants: list[Any]) -> None:
        if grants:
            put(tx, principal, grants)

    monkeypatch.setattr(_grants, "_put", put_no_end)

    assert any("was not approved" in each for each in run(operations).problems())
