"""What a harness gives to the contexts of its tasks: hooks, models, environment, what is stored."""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import pytest
import trio
from agent_world import MODEL, World
from trio.testing import wait_all_tasks_blocked

from pidurable.agent._services import AgentChange
from pidurable.errors import InvalidArgumentError, NotFoundError, UnknownTaskError
from pidurable.harness._open import open_harness
from pidurable.records._entries import entry
from pidurable.registry import Extension, Registry, hook
from pidurable.session._documents import document
from pidurable.storage import MemoryStorage
from pidurable.tasks._context import TaskContext
from pidurable.tasks._definition import Task, nothing_to_undo, phase


@attrs.frozen
class Start:
    """Nothing has happened yet."""


@attrs.frozen
class Again:
    """A second phase."""


Ctx = TaskContext[str, Start | Again, list[str]]


class Questions(Protocol):
    """What the tests ask."""

    async def veto(self, what: str) -> str | None: ...

    async def noted(self, what: str) -> None: ...


class Scripted(Task[str, Start | Again, list[str]]):
    """A definition with hooks, whose phases are given by the test."""

    name = "test.scripted"
    hooks = Questions
    abort = nothing_to_undo

    def __init__(self, first: Any = None, second: Any = None) -> None:
        self.first, self.second = first, second

    def initial(self, input: str) -> Start:
        return Start()

    @phase
    async def start(self, at: Start, ctx: Ctx) -> None:
        await self.first(ctx)

    @phase
    async def again(self, at: Again, ctx: Ctx) -> None:
        await self.second(ctx)


async def run(
    first: Any, second: Any = None, *, registry: Registry | None = None, **options: Any
) -> Any:
    """Run a scripted task in the root conversation of a new store; return its outcome."""
    registry = registry or Registry()
    registry.install(Extension("tests", tasks=[Scripted(first, second)]))
    async with open_harness(MemoryStorage(), registry=registry, **options) as harness:
        root = await harness.root(agent=AgentChange(model=MODEL))
        outcome = await harness.wait_for_task(await root.create_task(Scripted, "x"))
        return outcome.result


# --- hooks ------------------------------------------------------------------------------------


def vetoes(name: str, answer: str | None, heard: list[str]) -> Extension:
    """An extension that answers `veto`, and writes down that it was asked."""

    async def veto(what: str) -> str | None:
        heard.append(name)
        return answer

    return Extension(name, hooks=[hook(Scripted, veto=veto)])


async def ask(ctx: Ctx) -> None:
    hooks: Questions = ctx.hooks
    await ctx.complete([str(await hooks.veto(ctx.input))])


async def test_handlers_are_those_that_the_conversation_selects() -> None:
    """In the order of installation, whatever order the selection names; all, if it names none."""
    heard: list[str] = []
    registry = Registry()
    for each in (vetoes("a", None, heard), vetoes("b", "no", heard), vetoes("c", "never", heard)):
        registry.install(each)
    registry.install(Extension("tests", tasks=[Scripted(ask)]))

    async with open_harness(MemoryStorage(), registry=registry) as harness:
        results = []
        for selected in (None, ["c", "a", "missing"], [], ["tests"]):
            place = await harness.create_conversation(agent=AgentChange(extensions=selected))
            outcome = await harness.wait_for_task(await place.create_task(Scripted, "x"))
            results.append(outcome.result)

    assert results == [["no"], ["never"], ["None"], ["None"]]
    assert heard == ["a", "b", "a", "c"]


async def test_a_phase_keeps_the_handlers_it_began_with() -> None:
    """An extension installed meanwhile is asked from the next phase on, one removed until then."""
    heard: list[str] = []
    registry = Registry()
    registry.install(vetoes("old", None, heard))

    async def first(ctx: Ctx) -> None:
        hooks: Questions = ctx.hooks
        registry.replace(install=[vetoes("new", "no", heard)], remove=["old"])
        assert ctx.registry.extensions == ("old", "tests")
        assert await hooks.veto("first") is None
        assert await ctx.hooks.veto("first") is None
        await ctx.goto(Again())

    async def second(ctx: Ctx) -> None:
        assert ctx.registry.extensions == ("tests", "new")
        await ctx.complete([await ctx.hooks.veto("second")])

    assert await run(first, second, registry=registry) == ["no"]
    assert heard == ["old", "old", "new"]


async def test_a_raising_handler_is_reported_with_task_and_extension(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The report says which hook of which extension raised what, for which task."""

    def noted(what: str) -> None:
        raise RuntimeError("out of ink")

    registry = Registry()
    registry.install(Extension("ink", hooks=[hook(Scripted, noted=noted)]))

    async def script(ctx: Ctx) -> None:
        await ctx.hooks.noted("it")
        await ctx.complete([])

    assert await run(script, registry=registry) == []
    (record,) = [each for each in caplog.records if "hook" in each.getMessage()]
    assert "(test.scripted): the hook noted of the extension 'ink' raised" in record.getMessage()
    assert "RuntimeError: out of ink" in record.getMessage()


async def test_an_abort_ends_a_handler_like_the_code_that_asked() -> None:
    """A handler that hangs is cancelled with the task, and the abort goes on."""
    reached = trio.Event()

    async def veto(what: str) -> None:
        reached.set()
        await trio.sleep_forever()

    registry = Registry()
    registry.install(Extension("slow", hooks=[hook(Scripted, veto=veto)]))
    registry.install(Extension("tests", tasks=[Scripted(ask)]))
    async with open_harness(MemoryStorage(), registry=registry) as harness:
        root = await harness.root()
        task = await root.create_task(Scripted, "x")
        await reached.wait()
        await harness.abort_task(task)
        assert (await harness.wait_for_task(task)).status == "aborted"


async def test_a_definition_may_combine_answers_by_its_own_rule() -> None:
    """`handlers` gives them in order, with the extension of each."""
    heard: list[str] = []
    registry = Registry()
    registry.install(vetoes("a", "no", heard))
    registry.install(vetoes("b", "never", heard))

    async def script(ctx: Ctx) -> None:
        answers = [f"{each.extension}: {await each('x')}" for each in ctx.handlers("veto")]
        await ctx.complete(answers)

    assert await run(script, registry=registry) == ["a: no", "b: never"]


# --- new code ---------------------------------------------------------------------------------


async def test_a_task_goes_on_when_its_definition_is_installed_while_it_is_blocked() -> None:
    """What was blocked for want of code is looked at again when a registry publishes it."""
    storage = MemoryStorage()
    registry = Registry()

    async def script(ctx: Ctx) -> None:
        await ctx.complete(["done"])

    registry.install(Extension("tests", tasks=[Scripted(trio.sleep_forever)]))
    async with open_harness(storage, registry=registry) as harness:
        task = await (await harness.root()).create_task(Scripted, "x")
        registry.uninstall("tests")
    async with open_harness(storage.reopen(), registry=registry) as harness:
        harness.start()
        await wait_all_tasks_blocked()
        assert harness.task(task).blocked == "missing_definition"
        registry.install(Extension("other"))
        await wait_all_tasks_blocked()
        assert harness.task(task).blocked == "missing_definition"
        registry.install(Extension("tests", tasks=[Scripted(script)]))
        outcome = await harness.wait_for_task(task)

    assert outcome.result == ["done"]


# --- models, environment ----------------------------------------------------------------------


async def test_a_task_has_the_models_and_the_environment_of_its_harness() -> None:
    """Models are those of the harness, files those of the conversation's agent."""
    world = World()
    asked: list[Any] = []

    def env_for(conversation_id: int, agent: Any) -> Any:
        asked.append((conversation_id, agent.model))
        return env

    env: Any = object()
    models = world.model.models()

    async def script(ctx: Ctx) -> None:
        assert ctx.models is models
        assert ctx.env() is env
        await ctx.complete([str(ctx.conversation_id)])

    (conversation,) = await run(script, models=models, env=env_for)
    assert asked == [(int(conversation), MODEL)]


async def test_a_harness_without_models_says_so() -> None:
    """The error names the argument that was not given."""

    async def script(ctx: Ctx) -> None:
        with pytest.raises(InvalidArgumentError, match=r"ctx\.models: .* pass open_harness\(mod"):
            ctx.models  # noqa: B018
        await ctx.complete([])

    assert await run(script) == []


# --- what is committed ------------------------------------------------------------------------


@entry("test.note")
@attrs.frozen
class Note:
    text: str


@document("test.counter", scope="task")
@attrs.define
class OfTask:
    count: int = 0


@document("test.talk")
@attrs.define
class OfConversation:
    count: int = 0


@document("test.drawer", scope="session", family=True)
@attrs.define
class OfSession:
    count: int = 0


@document("test.rewindable", history="rewindable")
@attrs.define
class Rewindable:
    count: int = 0


async def test_a_snapshot_reads_records_entries_and_documents() -> None:
    """By default those of the task and its conversation; what this commit stages is not seen."""

    async def script(ctx: Ctx) -> None:
        seen = ctx.snapshot
        assert seen.document(OfTask) is None
        async with ctx.commit() as tx:
            (await tx.document(OfTask, ctx.task_id)).count = 1
            (await tx.document(OfConversation, ctx.conversation_id)).count = 2
            (await tx.document(OfSession, key="top")).count = 3
            (await tx.document(Rewindable, ctx.conversation_id)).count = 4
            noted = tx.append(ctx.conversation_id, Note("first"))
            child = tx.create_task(Scripted, "child", key="child", deadline=ctx.now())
            assert seen.document(OfTask) is None
            with pytest.raises(NotFoundError, match="no entry"):
                seen.entry(noted)
        async with ctx.commit() as tx:
            (await tx.document(Rewindable, ctx.conversation_id)).count = 5
            later = tx.append(ctx.conversation_id, Note("second"))
        assert seen.document(OfTask) == OfTask(1)
        assert seen.document(OfTask, ctx.task_id) == OfTask(1)
        assert seen.document(OfTask, child) is None
        assert seen.document(OfConversation) == OfConversation(2)
        assert seen.document(OfSession, key="top") == OfSession(3)
        assert seen.document(Rewindable) == Rewindable(5)
        assert await seen.document_as_of(Rewindable, noted) == Rewindable(4)
        assert await seen.document_as_of(Rewindable, later) == Rewindable(5)
        assert seen.entry(noted).read(Note) == Note("first")
        assert [each.id for each in await seen.history()] == [noted, later]
        assert [each.id for each in await seen.history(limit=1)] == [later]
        assert [each.id for each in await seen.context()] == [noted, later]
        assert seen.keyed_tasks() == {"child": child}
        assert seen.task(child).owner == ctx.task_id
        assert seen.conversation().key == "root"
        await ctx.complete([])

    assert await run(script) == []


async def test_a_snapshot_refuses_what_does_not_exist() -> None:
    """Unknown ids of every kind, and ids of another kind, raise what the harness raises."""

    async def script(ctx: Ctx) -> None:
        seen = ctx.snapshot
        for id in (10**6, int(ctx.task_id), "1", True, 2**70):
            for read in (seen.conversation, seen.submission, seen.entry):
                with pytest.raises(NotFoundError):
                    read(id)  # type: ignore[operator]
            for read_all in (seen.history, seen.context):
                with pytest.raises(NotFoundError):
                    await read_all(id)  # type: ignore[operator]
        for id in (ctx.conversation_id, 2**70, None):
            with pytest.raises(UnknownTaskError):
                seen.task(id)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="scope_id: expected an id, got 'x'"):
            seen.document(OfTask, "x")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            await seen.document_as_of(OfConversation, 1)
        await ctx.complete([])

    assert await run(script) == []


# --- watching ---------------------------------------------------------------------------------


@document("ctx.progress", scope="task")
@attrs.define
class Progress:
    done: int = 0


async def test_a_task_watches_documents_and_its_own_end_with_it() -> None:
    """A phase may watch; what watches a task's document sees None when the task ends."""
    seen: list[Any] = []

    async def first(ctx: Ctx) -> None:
        async with ctx.watch(Progress) as watch:
            seen.append(watch.value)
            async with ctx.commit() as tx:
                (await tx.document(Progress, ctx.task_id)).done = 1
            seen.append((await anext(watch)).read())
            await ctx.goto(Again())

    started, watched = trio.Event(), trio.Event()

    async def second(ctx: Ctx) -> None:
        started.set()
        await watched.wait()
        await ctx.complete([])

    registry = Registry()
    registry.install(Extension("tests", tasks=[Scripted(first, second)]))
    async with open_harness(MemoryStorage(), registry=registry) as harness:
        root = await harness.root()
        task_id = await root.create_task(Scripted, "x")
        await started.wait()
        async with harness.watch(Progress, task_id) as watch:
            assert watch.read() == Progress(1)
            watched.set()
            assert [frame.value async for frame in watch] == [None]
    assert seen == [None, Progress(1)]


async def test_a_watch_of_what_a_task_never_had_ends_with_the_task() -> None:
    """Whether it began before or after, and of an unknown task there is nothing to watch."""
    going = trio.Event()

    async def first(ctx: Ctx) -> None:
        await going.wait()
        await ctx.complete([])

    registry = Registry()
    registry.install(Extension("tests", tasks=[Scripted(first)]))
    async with open_harness(MemoryStorage(), registry=registry) as harness:
        root = await harness.root()
        task_id = await root.create_task(Scripted, "x")
        other = await root.create_task(Scripted, "y")
        async with (
            harness.watch(Progress, task_id) as watch,
            harness.watch(Progress, task_id) as second,
            harness.watch(Progress, other) as kept,
        ):
            assert watch.value is None
            going.set()
            assert [frame async for frame in watch] == []
            assert [frame async for frame in second] == []
            assert [frame async for frame in kept] == []
        async with harness.watch(Progress, task_id) as late:
            assert late.value is None
            assert [frame async for frame in late] == []
        with pytest.raises(UnknownTaskError):
            async with harness.watch(Progress, 999):
                pass
        watches = harness.session._watches
        assert (watches.hubs, watches._of_tasks) == ({}, {})


async def test_a_phase_cannot_watch_what_is_no_document() -> None:
    """A wrong class or id is refused at the call, before anything is waited for."""

    async def first(ctx: Ctx) -> None:
        with pytest.raises(InvalidArgumentError, match="@document"):
            ctx.watch(str)
        with pytest.raises(InvalidArgumentError, match="scope_id"):
            ctx.watch(Progress, -1)
        await ctx.complete([])

    assert await run(first) == []
