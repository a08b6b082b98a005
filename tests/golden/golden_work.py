"""The work inside the golden stores: what writes them, what reads them, and what ends them.

See `golden_tasks` for what it is made of. Three lives write a store (`begin`, `grow`, `cut`), each
ended by SIGKILL; `found_in` says what a reader sees in it, `end` brings all of it to its end, and
`ended_in` says how that was.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import trio
from golden_tasks import (
    HOUR_US,
    LARGE,
    MODEL,
    PICTURE,
    RELEASES,
    START_US,
    Ahead,
    Asking,
    DiaryOne,
    Failing,
    Faulting,
    Gone,
    Holding,
    Lethal,
    Listener,
    Lost,
    Moved,
    Note,
    Parent,
    Parking,
    Past,
    Payment,
    Queued,
    Retrying,
    Scratch,
    Shaped,
    Shared,
    Timer,
    World,
)

from pidurable import (
    AgentChange,
    AssistantMessage,
    Conversation,
    Edit,
    Extension,
    Harness,
    Models,
    Registry,
    Settings,
    TextBlock,
    ToolCall,
    UserMessage,
    open_harness,
    open_reader,
    tool,
)
from pidurable.errors import ConversationBusyError
from pidurable.testing import (
    ScriptedCall,
    ScriptedError,
    ScriptedModel,
    SeededRandomness,
    Stall,
    Step,
    TrioClock,
    When,
)

# --- the agent ----------------------------------------------------------------------------------


def tools_of(world: World) -> list[Any]:
    @tool(replay="safe")
    async def look(what: str, call: ToolCall) -> str:
        """Look at something; it may be looked at twice.

        Args:
            what: Which.
        """
        await call.output(f"looking at {what}\n")
        world.book(call.key("look"), f"look {what}")
        await world.stop(f"look {what}")
        return f"saw {what}"

    @tool
    async def send(what: str, call: ToolCall) -> str:
        """Send something, which must not happen twice.

        Args:
            what: Which.
        """
        await call.output(f"sending {what}\n")
        world.book(call.key("send"), f"send {what}")
        if what != "first":
            await world.stop(f"send {what}")
        return f"sent {what}"

    return [look, send]


def models_of(world: World) -> Models:
    work = (
        ScriptedCall(name="send", arguments={"what": "first"}),
        ScriptedCall(name="look", arguments={"what": "second"}),
        ScriptedCall(name="send", arguments={"what": "third"}),
        ScriptedCall(name="nowhere", arguments={}),
    )
    stall = Stall(after=2) if world.hold else None
    return ScriptedModel(
        [
            Step(when=When(user="hello"), text="Hello there.", thinking="A greeting."),
            Step(when=When(user="fail"), error=ScriptedError(kind="auth", detail="no such key")),
            Step(when=When(user="work", turn=0), calls=work),
            Step(when=When(user="work"), text="The work is done."),
            Step(
                when=When(user="stream"),
                text=("A long ", "answer ", "in pieces", "."),
                stall=stall,
                times=None if stall is None else 1_000,
            ),
            Step(when=When(user="later"), text="An answer to what came later."),
        ],
    ).models()


def registry_of(world: World, release: str) -> Registry:
    registry = Registry()
    tasks = [each(world) for each in RELEASES[release]]
    registry.install(Extension("golden", tasks=tasks, tools=tools_of(world)))
    return registry


def opened(
    folder: Path,
    world: World,
    release: str,
    *,
    life: int,
    failpoints: Any = None,
    blocking: Any = None,
    **options: Any,
) -> Any:
    """Open the store of a folder as one of its lives does, an hour or more after the last one."""
    limits = {"golden.queued": 0} if world.hold else {}
    return open_harness(
        folder / "golden.sqlite",
        registry=registry_of(world, release),
        models=models_of(world),
        settings=Settings(limits=limits, progress_seconds=0.002, **options),
        # Shared: else a copy could not tell that the holder, which was killed, is dead.
        clock=TrioClock(START_US + life * 2 * HOUR_US, shared=True),
        randomness=SeededRandomness(life),
        failpoints=failpoints,
        blocking=blocking,
    )


# --- lives --------------------------------------------------------------------------------------


async def begin(folder: Path) -> None:
    """Life 0: a task that kills the process which runs it."""
    world = World(folder, hold=True, lethal=True)
    async with opened(folder, world, "first", life=0) as harness:
        root = await harness.root(agent=AgentChange(model=MODEL, instructions="be brief"))
        await root.create_task(Lethal, "lethal", key="lethal")
        await trio.sleep(30)


async def grow(folder: Path) -> None:
    """Life 1: every kind of task is created and brought where it shall be."""
    world = World(folder, hold=True)
    async with opened(folder, world, "first", life=1, recoveries_max=1) as harness:
        root = await harness.root()
        await _records(harness, root)
        simple = (Payment, Queued, Listener, Timer, Holding, Retrying, Parking, Faulting, Failing)
        for each in (*simple, Gone, Lost, Ahead, Moved, Shaped):
            word = each.name.partition(".")[2]
            await root.create_task(each, word, key=word)
        for policy in ("all_settled", "fail_fast", "first_success"):
            await root.create_task(Parent, policy, key=policy)
        for what in ("submission", "idle"):
            await root.create_task(Asking, what, key=f"asking {what}")
        await root.create_task(Listener, "background", key="background", background=True)
        await root.create_task(Payment, "waits", key="waits", on_restart="wait")
        await root.create_task(Payment, "aborts", key="aborts", on_restart="abort")
        await root.create_task(Payment, "undone", key="undone")
        passed = datetime.fromtimestamp(START_US / 1e6, UTC)
        await root.create_task(Payment, "too late", key="too late", deadline=passed)
        await root.create_task(Timer, "due", key="due", deadline=passed + timedelta(days=30))
        await world.until(("payment", "waits", "aborts", "undone", "gone", "lost", "ahead"))
        await world.until(("moved", "shaped"))
        await _settled_down(harness)
        listener = next(each.id for each in harness.tasks() if each.key == "listener")
        await harness.signal(listener, "word", {"n": 1}, key="word 1")
        await _waits_again(harness, listener, 2)
        timer = next(each.id for each in harness.tasks() if each.key == "timer")
        await harness.signal(timer, "unread", "nobody asked", key="unread")
        await _settled_down(harness)
        _die()


async def _records(harness: Harness, root: Conversation) -> None:
    """Entries, edits, heads, documents, forks and blobs, a commit for each step."""
    settled = await (await root.submit("hello", request_id="r-hello")).wait()
    assert settled.status == "done"
    assert (await (await root.submit("fail", request_id="r-fail")).wait()).status == "unanswered"
    async with harness.commit() as tx:
        first = tx.append(root.id, Note("first", 1.25))
        said = tx.append(root.id, kind="golden.said", messages=[_user("something secret")])
        tx.append(root.id, {"large": LARGE}, kind="golden.large")
        shared = await tx.document(Shared)
        shared.names["first"] = first
        (await tx.document(DiaryOne, root.id)).text = "begun\n"
        (await tx.document(Scratch, root.id)).text = "not for forks"
        (await tx.document(Past, root.id, key="ended")).value = 1
        (await tx.document(Past, root.id, key="twice")).value = 1
    for number in range(1, 9):
        async with harness.commit() as tx:
            tx.append_text(DiaryOne, root.id, "/text", f"line {number}\n")
            (await tx.document(Past, root.id, key="counted")).value = number
            tx.append(root.id, {"number": number}, kind="golden.number")
    early = await root.fork(at=first, key="early")
    async with harness.commit() as tx:
        tx.retire(Past, root.id, key="ended")
        tx.retire(Past, root.id, key="twice")
    async with harness.commit() as tx:
        (await tx.document(Past, root.id, key="twice")).value = 2
        place = tx.append(root.id, kind="golden.said", messages=[_user("[left out]")])
        tx.append(
            root.id,
            kind="golden.edit",
            edits=[Edit(target=said, messages=(_user("something harmless"),))],
        )
        tx.append(root.id, kind="golden.head", messages=[_user("from here on")], head=place)
    late = await root.fork(key="late")
    async with harness.commit() as tx:
        tx.append_text(DiaryOne, late.id, "/text", "in the fork\n")
        tx.append(early.id, Note("in the early fork"))
    await early.fork(key="fork of a fork")
    if hasattr(harness.session, "blobs") or hasattr(harness, "blob"):
        async with harness.commit() as tx:
            name = tx.put_blob(PICTURE)
            tx.append(root.id, {"picture": name}, kind="golden.picture")


def _user(text: str) -> UserMessage:
    return UserMessage(blocks=(TextBlock(text=text),), at_us=START_US)


async def cut(folder: Path) -> None:
    """Life 2: under other code; runs are cut in mid-stream and in mid-call, others are queued."""
    world = World(folder, hold=True)
    async with opened(folder, world, "last", life=2) as harness:
        harness.start()
        await world.until(("payment", "undone"))
        found = {each.key: each.id for each in harness.tasks()}
        await harness.abort_task(found["lost"], "no longer wanted")
        await harness.abort_task(found["undone"], "changed my mind")
        await world.until(("abort undone",))
        async with harness.commit() as tx:
            working = tx.create_conversation(key="working", principal="somebody")
            streaming = tx.create_conversation(key="streaming")
        for id in (working, streaming):
            change = AgentChange(model=MODEL, instructions="be brief")
            await harness.conversation(id).configure(change)
        await harness.conversation(working).submit("work", request_id="r-work")
        await harness.conversation(working).submit(
            "later, steered", request_id="r-steer", when_busy="steer"
        )
        await harness.conversation(streaming).submit("stream", request_id="r-stream")
        await harness.conversation(streaming).submit("later", request_id="r-queued")
        try:
            await harness.conversation(streaming).submit("no", when_busy="reject")
        except ConversationBusyError:
            world.reached.add("rejected")
        await world.until(("look second", "send third", "rejected"))
        await _settled_down(harness)
        assert "A long answer" in json.dumps(harness.conversation(streaming).live(), default=str)
        _die()


async def _settled_down(harness: Harness) -> None:
    """Wait until nothing is committed any more: all that can happen has happened."""
    seen, quiet = -1, 0
    with trio.fail_after(60):
        while quiet < 30:
            now = harness.session.storage.head().seq
            quiet = quiet + 1 if now == seen else 0
            seen = now
            await trio.sleep(0.01)


async def _waits_again(harness: Harness, task_id: int, invocations: int) -> None:
    with trio.fail_after(60):
        while True:
            task = harness.task(task_id)
            if task.invocations >= invocations and task.wait is not None:
                return
            await trio.sleep(0.005)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- ending -------------------------------------------------------------------------------------


async def end(folder: Path) -> None:
    """Bring everything in the store to its end: first without one definition, then with all."""
    world = World(folder, hold=False)
    async with opened(folder, world, "without", life=20) as harness:
        harness.start()
        found = {each.key: each.id for each in harness.tasks(limit=1_000)}
        await harness.resume_task(found["waits"])
        for key in ("parking", "lethal"):
            await harness.retry_task(found[key])
        for task in harness.tasks(limit=1_000):
            # The other one of this pair is aborted by its policy, in whatever order they run.
            if task.key == "first_success 1":
                continue
            if task.kind == "golden.listener" and task.outcome is None:
                await harness.signal(task.id, "last", task.key, key="the last")
        with trio.fail_after(60):
            while live := [t for t in harness.tasks(limit=1_000) if t.outcome is None]:
                if [t.kind for t in live] == ["golden.gone"]:
                    break
                await trio.sleep(0.01)
        assert live[0].blocked == "missing_definition"
    async with opened(folder, world, "whole", life=21) as harness:
        assert (await harness.wait_for_task(found["gone"], timeout=60)).result == "back again"
        await _caught_up(harness, folder)


async def _caught_up(harness: Harness, folder: Path) -> None:
    """Wait for what goes on by itself, where the schema has it: removals, and what others ask."""
    storage: Any = harness.session.storage
    if not hasattr(storage, "removals"):
        return
    box = folder / "golden.sqlite.commands"
    with trio.fail_after(60):
        # Nobody tells when: it is looked at.
        while storage.removals() or [  # noqa: ASYNC110
            path for path in box.rglob("*") if path.is_file()
        ]:
            await trio.sleep(0.01)


# --- looking ------------------------------------------------------------------------------------


async def found_in(folder: Path) -> dict[str, Any]:
    """Everything that a reader shows of the store, as plain JSON, with ids and times."""
    async with open_reader(folder / "golden.sqlite") as reader:
        tasks = await reader.tasks(limit=1_000)
        conversations = await every_conversation(reader, tasks)
        said: dict[str, Any] = {
            "tasks": [plain(each) for each in tasks],
            "conversations": [plain(each) for each in conversations],
            "entries": [],
            "open": [],
            "documents": [],
        }
        for each in conversations:
            rows = await reader.entries(each.id, limit=1_000)
            said["entries"] += [plain(row) for row in rows]
            said["open"] += [plain(row) for row in await reader.open_submissions(each.id)]
            for name, key in DOCUMENTS:
                value = await reader.document(name, each.id, key=key)
                said["documents"].append([each.id, name, key, plain(value)])
    return said


DOCUMENTS = (
    *(("golden.diary", ""), ("golden.scratch", ""), ("golden.past", "counted")),
    *(("golden.past", "ended"), ("golden.past", "twice"), ("pi.agent", ""), ("pi.inbox", "")),
    *(("pi.live", ""), ("pi.usage", "")),
)


async def every_conversation(reader: Any, tasks: list[Any]) -> list[Any]:
    """All conversations, the owned ones too: their tasks and keys name them."""
    found = {each.id: each for each in await reader.conversations()}
    for task in tasks:
        if task.conversation_id not in found:
            found[task.conversation_id] = await reader.conversation(task.conversation_id)
    return [found[id] for id in sorted(found)]


async def ended_in(folder: Path) -> dict[str, Any]:
    """How everything ended, without the ids and times that a schedule decides."""
    async with open_reader(folder / "golden.sqlite") as reader:
        tasks = await reader.tasks(limit=1_000)
        conversations = await every_conversation(reader, tasks)
        owners = {each.id: each.key for each in tasks}
        names = {
            each.id: f"{each.key or ''} of {owners.get(each.owner, '')}" for each in conversations
        }
        entries, documents = [], []
        for each in conversations:
            for row in await reader.entries(each.id, limit=1_000):
                entries.append([names[each.id], row.kind, _said(row)])
            for name, key in DOCUMENTS[:5]:
                value = plain(await reader.document(name, each.id, key=key))
                documents.append([names[each.id], name, key, value])
        submissions = []
        for each in conversations:
            for request in REQUESTS:
                record = await reader.find_request(each.id, request)
                if record is not None:
                    where = [names[each.id], request, record.status, record.reason]
                    submissions.append(where)
    return {
        "tasks": _sorted(
            [each.kind, each.key or "", each.blocked or "", *_ending(each)] for each in tasks
        ),
        "entries": _sorted(entries),
        "documents": _sorted(documents),
        "submissions": _sorted(submissions),
        "ledger": sorted(World(folder, hold=False).lines()),
    }


STORE = "golden.sqlite"
REQUESTS = ("r-hello", "r-fail", "r-work", "r-steer", "r-stream", "r-queued", "question")


def _sorted(rows: Iterable[list[Any]]) -> list[list[Any]]:
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def _ending(task: Any) -> list[Any]:
    outcome = task.outcome
    if outcome is None:
        return ["live"]
    error = None if outcome.error is None else [outcome.error.type, outcome.error.message]
    result = plain(outcome.result)
    if task.kind.startswith("pi.") and result is not None:
        result = [result.get("is_error"), result.get("code")]
    return [outcome.status, outcome.reason, result, error]


def _said(row: Any) -> list[Any]:
    """The messages of an entry; their calls by index, as ids differ between schedules."""
    said: list[Any] = []
    for message in row.messages:
        blocks = getattr(message, "blocks", ())
        texts = [block.text for block in blocks if isinstance(block, TextBlock)]
        status = message.status if isinstance(message, AssistantMessage) else ""
        said.append([type(message).__name__, status, getattr(message, "code", None), texts])
    data = plain(row.data) if row.kind.startswith("golden.") else None
    return [said, data]


def plain(value: Any) -> Any:
    """Make JSON of records, recursively; what is neither is an error."""
    if attrs.has(type(value)):
        return {
            # What is private is shown by a property, which has the name that made it.
            field.alias: plain(getattr(value, field.alias))
            for field in attrs.fields(type(value))
            if field.alias != "decode"
        }
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple) or type(value).__name__ == "JsonArray":
        return [plain(each) for each in value]
    if isinstance(value, str) and len(value) > 1_000:
        return f"{len(value)} characters, sha256 {hashlib.sha256(value.encode()).hexdigest()}"
    if isinstance(value, bool | int | float | str) or value is None:
        return int(value) if type(value).__name__ == "Status" else value
    raise TypeError(f"{type(value)}: {value!r}")


def live(run: Callable[[Path], Any], folder: Path) -> int:
    """Live one life in a process of its own; 0, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            trio.run(run, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
