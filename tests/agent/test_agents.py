"""Agents: names that are resolved anew for each request, and a prompt that replays exactly."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from agent_world import MODEL, World, ask, text_of, verify
from hypothesis import HealthCheck, given, settings, strategies as st
from trio.testing import MockClock

from pidurable.agent._models import ModelRequest
from pidurable.agent._prompt import told_by
from pidurable.agent._script import ScriptedCall, Step
from pidurable.agent._selection import Selection
from pidurable.agent._services import AgentChange
from pidurable.errors import InvalidArgumentError, NotJsonError
from pidurable.harness._open import open_harness
from pidurable.records._entries import Edit
from pidurable.records._limits import Settings
from pidurable.records._messages import SystemMessage
from pidurable.registry import Extension, Tool, ToolCall, ToolResult, section, tool
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase


def tool_called(name: str) -> Tool[..., Any]:
    """A tool of a name."""

    @tool(name=name, replay="safe")
    async def named() -> str:
        """Answer."""
        return f"from {name}"

    return named


def extension_called(name: str, *tools: str, text: str = "") -> Extension:
    """An extension with tools, and with a section that is named like it."""
    return Extension(
        name,
        tools=[tool_called(each) for each in tools],
        sections=[section(name, lambda _: text or f"about {name}", tag=False)],
    )


def offered(request: ModelRequest) -> list[str]:
    """The names of the tools of a request that do not leave traces."""
    return [each.name for each in request.tools if each.name in ("a1", "a2", "b1", "c1")]


def world_of(*answers: Any, **options: Any) -> World:
    """A world with two more extensions than it has."""
    world = World(*answers, repeat_last=True, **options)
    world.registry.install(extension_called("a", "a1", "a2"))
    world.registry.install(extension_called("b", "b1"))
    return world


# --- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "change", "expected"),
    [
        (None, AgentChange(), ["a1", "a2", "b1"]),
        (["a", "c"], AgentChange(), ["a1", "a2"]),
        (["a"], AgentChange(extensions=["b"]), ["b1"]),
        (["a"], AgentChange(extensions=[]), []),
        (["a"], AgentChange(extensions=Selection(add=["b", "c"])), ["a1", "a2", "b1"]),
        (["a", "b"], AgentChange(extensions=Selection(remove=["b"])), ["a1", "a2"]),
        (["a"], AgentChange(extensions=Selection(add=["b"], remove=["a", "b"])), []),
        (None, AgentChange(extensions=Selection(remove=["a"])), ["b1"]),
        (None, AgentChange(tools=["a2", "b1", "gone"]), ["a2", "b1"]),
        (None, AgentChange(tools=[]), []),
        (None, AgentChange(tools=Selection(remove=["a1", "gone"])), ["a2", "b1"]),
        (["b"], AgentChange(tools=["a2", "b1"]), ["b1"]),
    ],
)
async def test_a_choice_is_a_list_or_a_difference_from_the_default(
    autojump_clock: MockClock, default: list[str] | None, change: AgentChange, expected: list[str]
) -> None:
    """Tools and sections of a request are those of the extensions and tools that are selected."""
    world = world_of("ok", settings=Settings(extensions=default))

    async with world.open() as harness:
        root = await harness.root()
        await root.configure(change)
        await ask(harness, "go")
        stored = root.agent()
        await verify(world, harness)
    async with world.open() as harness:
        again = (await harness.root()).agent()

    (request,) = world.model.requests
    assert offered(request) == expected
    if change.extensions == []:
        assert request.system == ""
    assert ("about b" in request.system) == ("b1" in expected or change.tools == [])
    assert stored == again


async def test_names_count_as_soon_as_they_are_installed(autojump_clock: MockClock) -> None:
    """A name that is not installed is skipped, kept, and counts again when it is."""
    world = world_of("ok")
    choice = AgentChange(extensions=["a", "c"], tools=["a1", "c1"])

    async with world.open() as harness:
        root = await harness.root()
        await root.configure(choice)
        await ask(harness, "one", "r1")
        world.registry.install(extension_called("c", "c1"))
        await ask(harness, "two", "r2")
        world.registry.uninstall("a")
        await ask(harness, "three", "r3")
        stored = root.agent()
        await verify(world, harness)
    world.registry.install(extension_called("a", "a1"))
    async with world.open() as harness:
        await ask(harness, "four", "r4")
        await verify(world, harness)

    seen = [sorted(offered(request)) for request in world.model.requests]
    assert seen == [["a1"], ["a1", "c1"], ["c1"], ["a1", "c1"]]
    assert (stored["extensions"], stored["tools"]) == (["a", "c"], ["a1", "c1"])


async def test_a_tool_that_was_left_out_is_added_by_a_result(autojump_clock: MockClock) -> None:
    """What a result adds is left out no longer; the choice stays a difference from all tools."""

    @tool(replay="safe")
    async def more() -> ToolResult:
        """Add tools."""
        return ToolResult("added", add_tools=["a1", "b1"])

    world = world_of(Step(calls=(ScriptedCall(name="more"),)), "ok")
    world.install(more)

    async with world.open() as harness:
        root = await harness.root()
        await root.configure(AgentChange(tools=Selection(remove=["a1", "a2"])))
        await ask(harness, "go")
        stored = root.agent()["tools"]
        await verify(world, harness)

    assert [sorted(offered(each)) for each in world.model.requests] == [["b1"], ["a1", "b1"]]
    assert stored == {"add": [], "remove": ["a2"]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (AgentChange(extensions="a"), InvalidArgumentError, "extensions: .*Selection"),  # type: ignore[arg-type]
        (AgentChange(extensions=Selection(add="a")), InvalidArgumentError, r"extensions\.add"),
        (AgentChange(tools=Selection(add=["a1"])), InvalidArgumentError, r"tools\.add"),
        (AgentChange(tools=Selection(remove=[1])), InvalidArgumentError, r"tools\.remove"),  # type: ignore[list-item]
        (AgentChange(extensions=Selection(add=["\0"])), NotJsonError, r"\$\.extensions\.add"),
    ],
)
async def test_a_choice_that_is_none_is_refused(
    autojump_clock: MockClock, change: AgentChange, error: type[Exception], message: str
) -> None:
    """Texts for lists, other things than names, and what could not be stored change nothing."""
    world = world_of("ok")

    async with world.open() as harness:
        root = await harness.root()
        before = root.agent()
        with pytest.raises(error, match=message):
            await root.configure(change)
        assert root.agent() == before


async def test_a_request_keeps_the_agent_that_it_was_made_with(autojump_clock: MockClock) -> None:
    """A change while an answer streams, or a call runs, counts from the next request on."""
    world = world_of(Step(text=("x", "y"), calls=(ScriptedCall(name="a1"),), delay=1.0), "done")

    async with world.open() as harness:
        root = await harness.root()
        first = await root.submit("go")
        await trio.sleep(0.5)
        await root.configure(
            AgentChange(instructions="be brief", extensions=["b"], thinking="high")
        )
        outcome = await first.wait()
        await verify(world, harness)
        codes = [
            message.code  # type: ignore[union-attr]
            for each in await root.history()
            if each.kind == "pi.tool_result"
            for message in each.messages
        ]

    before, after = world.model.requests
    assert outcome.text == "done"
    assert (before.thinking, after.thinking) == (None, "high")
    assert "a1" in offered(before)
    assert offered(after) == ["b1"]
    assert "be brief" not in before.system
    assert "be brief" in str(after.messages)
    # The call resolves its tool when it runs; by then the agent had it no more.
    assert codes == ["tool_unavailable"]


# --- copies -------------------------------------------------------------------------------------


@attrs.frozen
class Start:
    """Nothing yet."""


class Owner(Task[None, Start, list[int]]):
    """Owns a conversation, and a fork."""

    name = "test.owner"
    version = 1

    abort = nothing_to_undo

    def initial(self, input: None) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: TaskContext[None, Start, list[int]]) -> None:
        async with ctx.commit() as tx:
            made = [tx.create_conversation(key="own"), tx.fork(ctx.conversation_id)]
        await ctx.complete(made)


async def test_owned_conversations_start_with_a_copy_of_their_owners_agent(
    autojump_clock: MockClock,
) -> None:
    """However they are made; what the owner chooses later does not reach them, nor theirs it."""

    @tool(replay="safe")
    async def delegate(call: ToolCall) -> str:
        """Ask a child."""
        child = await call.child(agent=AgentChange(instructions="you are the child"))
        plain = await call.child(key="plain")
        return f"{child.id} {plain.id}"

    world = world_of(Step(calls=(ScriptedCall(name="delegate"),)), "ok")
    world.install(delegate, tasks=[Owner()])
    own = AgentChange(instructions="be brief", extensions=Selection(remove=["b"]), turns_max=7)

    async with world.open() as harness:
        root = await harness.root()
        await root.configure(own)
        await ask(harness, "go")
        (result,) = [each for each in await root.history() if each.kind == "pi.tool_result"]
        made = await harness.wait_for_task(await root.create_task(Owner, None))
        copied = root.agent()
        await root.configure(AgentChange(instructions="be long", turns_max=None))
        child, plain = (int(id) for id in text_of(result.messages[0]).split())
        agents = [harness.conversation(id).agent() for id in (child, plain, *made.result)]
        await harness.conversation(plain).configure(AgentChange(model="scripted/other"))
        kept = root.agent()

    assert agents[0] == {**copied, "instructions": "you are the child"}
    assert agents[1:] == [copied] * 3
    assert kept == {**copied, "instructions": "be long", "turns_max": None}
    assert (kept["model"], kept["extensions"]) == (MODEL, {"add": [], "remove": ["b"]})


async def test_a_name_in_the_place_of_an_agent_is_refused_at_every_door() -> None:
    """Who gives the name of a model for an agent is told what is expected; nothing is made."""
    wrong: Any = "openai/gpt-5"
    refused = pytest.raises(InvalidArgumentError, match=r"agent: expected an AgentChange.* got 'op")

    async with open_harness(":memory:") as harness:
        with refused:
            await harness.root(agent=wrong)
        with refused:
            await harness.create_conversation(agent=wrong)
        assert list(harness.session.storage.conversations_by_owner(None)) == []
        root = await harness.root()
        with refused:
            await harness.root(agent=wrong)
        with refused:
            await root.configure(wrong)


async def test_the_agent_of_a_child_is_checked_as_any_other(autojump_clock: MockClock) -> None:
    """What could not be configured is refused where the child would be made."""

    @tool(replay="safe")
    async def delegate(call: ToolCall) -> str:
        """Ask a child."""
        await call.child(agent=AgentChange(thinking="much"))  # type: ignore[arg-type]
        return "made"

    world = world_of(Step(calls=(ScriptedCall(name="delegate"),)), "ok")
    world.install(delegate)

    async with world.open() as harness:
        await ask(harness, "go")
        root = await harness.root()
        (result,) = [each for each in await root.history() if each.kind == "pi.tool_result"]

    assert "thinking" in text_of(result.messages[0])


# --- the prompt ---------------------------------------------------------------------------------

CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.sampled_from(["be brief", "be long", None])),
        st.tuples(st.just("extensions"), st.sets(st.sampled_from("ab")).map(sorted)),
        st.tuples(st.just("tools"), st.sampled_from([None, ["a1"], ["b1", "a2"], []])),
        st.tuples(st.just("install"), st.sampled_from(["one", "two", ""])),
        st.tuples(st.just("uninstall"), st.none()),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("cut"), st.none()),
        st.tuples(st.just("forget"), st.none()),
        st.tuples(st.just("reopen"), st.none()),
        st.tuples(st.just("ask"), st.none()),
    ),
    max_size=8,
)


def told_in(request: ModelRequest) -> str:
    """All that a request says as the system, in order."""
    later = [each.message for each in request.messages]
    return request.system + str([each for each in later if isinstance(each, SystemMessage)])


class Prompted:
    """A conversation that is configured, cut and asked, and what its last request was told."""

    def __init__(self) -> None:
        self.world = world_of("ok")
        self.changes: list[tuple[str, Any]] = []
        self.asked = 0
        self.before: ModelRequest | None = None
        """The last request, as long as nothing has cut or edited the context since."""

    async def live(self) -> None:
        """One harness, until it is closed."""
        async with self.world.open() as harness:
            while self.changes:
                change, value = self.changes.pop(0)
                if change == "reopen":
                    return
                await self.change(harness, change, value)

    async def change(self, harness: Any, change: str, value: Any) -> None:
        root = await harness.root()
        if change == "say":
            await root.configure(AgentChange(instructions=value))
        elif change in ("extensions", "tools"):
            await root.configure(AgentChange(**{change: value}))
        elif change == "install":
            self.world.registry.install(extension_called("b", "b1", text=value or "about b"))
        elif change == "uninstall":
            self.world.registry.uninstall("b")
            self.world.registry.install(extension_called("b", "b1"))
        elif change == "reset":
            await root.reset()
            self.before = None
        elif change == "cut":
            users = [each.id for each in await root.history() if each.kind == "pi.user"]
            if users:
                await root.write(kind="test.cut", head=users[-1])
            self.before = None
        elif change == "forget":
            told = [each.id for each in await root.history() if each.kind == "pi.system"]
            if told:
                await root.write(kind="test.edit", edits=[Edit(target=told[-1])])
            self.before = None
        else:
            await self.ask(harness)

    async def ask(self, harness: Any) -> None:
        self.asked += 1
        root = await harness.root()
        await ask(harness, f"question {self.asked}", f"r{self.asked}")
        agent = harness._services.resolve(root.id)
        context = await root.context()
        told = told_by(context)
        expected = {"instructions": agent.instructions} if agent.instructions else {}
        for each in agent.snapshot.sections(agent.extensions):
            expected[each.key] = await each.render(None)
        assert told.sections == expected
        assert sorted(told.tools) == sorted(each.name for each in agent.tools)
        request = self.world.model.requests[-1]
        assert {each.name for each in request.tools} == set(told.tools)
        for text in expected.values():
            assert text in told_in(request)
        if self.before is not None:
            # What was sent stays byte for byte what the provider has kept.
            assert request.system == self.before.system
            kept = list(self.before.messages)
            assert list(request.messages[: len(kept)]) == kept
        self.before = request


async def play(changes: list[tuple[str, Any]]) -> None:
    """Play changes, with a question after each, over as many harnesses as it takes."""
    prompted = Prompted()
    for change in changes:
        prompted.changes += [change, ("ask", None)]
    prompted.changes.append(("ask", None))
    while prompted.changes:
        await prompted.live()
    prompted.world.model.check()


@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(changes=CHANGES)
def test_what_a_model_was_told_is_what_holds_after_any_changes(
    changes: list[tuple[str, Any]],
) -> None:
    """The transcript replays to what was rendered last, in requests that only ever grow."""
    trio.run(play, changes, clock=MockClock(autojump_threshold=0))


async def test_one_baseline_follows_a_head(autojump_clock: MockClock) -> None:
    """After a reset everything is told again in one entry, in front of all else, and once."""
    world = world_of("ok")

    async with world.open() as harness:
        root = await harness.root()
        await root.configure(AgentChange(instructions="be brief"))
        await ask(harness, "one", "r1")
        await root.configure(AgentChange(instructions="be long"))
        await ask(harness, "two", "r2")
        await root.reset()
        await ask(harness, "three", "r3")
        await ask(harness, "four", "r4")
        told = [each for each in await root.history() if each.kind == "pi.system"]

    first, change, baseline = (each.messages[0] for each in told)
    assert isinstance(first, SystemMessage)
    assert isinstance(change, SystemMessage)
    assert isinstance(baseline, SystemMessage)
    assert change.sections == {"instructions": "be long"}
    assert (change.tools_added, change.tools_removed) == ((), ())
    assert baseline.sections == {**first.sections, "instructions": "be long"}
    assert baseline.tools_added == first.tools_added
    assert world.model.requests[2].system == world.model.requests[3].system
    assert "be long" in world.model.requests[2].system
    assert [text_of(m.message) for m in world.model.requests[2].messages] == ["three"]


@pytest.mark.parametrize("is_new", [True, False])
async def test_without_its_folder_a_run_ends_and_says_how_to_choose_another(
    autojump_clock: MockClock, tmp_path: Path, is_new: bool
) -> None:
    """Found at the start or later: `no_folder`, with the `cwd`, and usable after a change."""
    world = World("one", "two", "three", position="run")
    folder = tmp_path / "work"
    folder.mkdir()

    async with world.open(agent=AgentChange(model=MODEL, cwd=str(folder))) as harness:
        root = await harness.root()
        if not is_new:
            assert (await ask(harness, "a", "r1")).status == "done"
        folder.rmdir()
        gone = await ask(harness, "b", "r2")
        await root.configure(AgentChange(cwd=str(tmp_path)))
        again = await ask(harness, "c", "r3")
        await verify(world, harness)

    assert (gone.status, gone.reason) == ("unanswered", "no_folder")
    assert str(folder) in gone.detail
    assert "configure(AgentChange(cwd=...))" in gone.detail
    assert again.status == "done"


async def test_what_was_installed_is_let_go_of_once_it_is_replaced(
    autojump_clock: MockClock,
) -> None:
    """Conversations that are at rest hold on to no earlier version of an extension."""
    world = World("one", "two", "three")
    made: list[weakref.ref[Any]] = []
    async with world.open() as harness:
        for number in range(3):
            told = extension_called("told", text=f"version {number}")
            if number == 0:
                world.registry.install(told)
            else:
                world.registry.replace(install=[told])
            made.append(weakref.ref(world.registry.snapshot))
            conversation = await harness.create_conversation(agent=AgentChange(model=MODEL))
            await (await conversation.submit("go")).wait()
        sent = [request.system for request in world.model.requests]
        gc.collect()
        left = [each() is not None for each in made]

    assert [f"version {number}" in text for number, text in enumerate(sent)] == [True] * 3
    assert left == [False, False, True]
