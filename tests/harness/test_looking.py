"""Looking at tasks through the harness and beside it: explain, inspect, retry and signal."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from pidurable import (
    AgentChange,
    Extension,
    Harness,
    Registry,
    Settings,
    Task,
    TaskContext,
    nothing_to_undo,
    open_harness,
    open_reader,
    phase,
)
from pidurable.errors import (
    InvalidArgumentError,
    NotFoundError,
    NotJsonError,
    SessionPoisonedError,
    TaskEndedError,
    UnknownTaskError,
)
from pidurable.harness import _stored_facts
from pidurable.records import _codec, _json
from pidurable.records._tasks import Status, Wait
from pidurable.storage import Batch, HolderClaim, Op, SqliteStorage, TaskStateRow


@attrs.frozen
class Begin:
    pass


@attrs.frozen
class Later:
    pass


Ctx = TaskContext[str, Begin | Later, str]


class Job(Task[str, Begin | Later, str]):
    """Does what its input says."""

    name = "look.job"

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: Ctx) -> None:
        if ctx.input == "wait":
            await ctx.wait(then=Later(), signals=True)
        elif ctx.input == "own":
            async with ctx.commit() as tx:
                tx.wait(then=Later(), on=[tx.create_task(Job, "hold", key="child")])
        elif ctx.input == "hand over":
            async with ctx.commit() as tx:
                below = tx.create_conversation(key="below")
            async with ctx.commit() as tx:
                tx.create_task(Job, "hold", conversation=below)
                tx.complete("handed over")
        elif ctx.input == "hold":
            await trio.sleep_forever()
        else:
            await ctx.complete(ctx.input)

    @phase
    async def later(self, at: Later, ctx: Ctx) -> None:
        await ctx.complete("later")

    async def abort(self, at: Begin | Later, ctx: Ctx) -> None:
        if ctx.input == "stubborn":
            await trio.sleep_forever()
        await ctx.end_aborted()


def registry(*tasks: Task[Any, Any, Any]) -> Registry:
    made = Registry()
    made.install(Extension("look", tasks=list(tasks or (Job(),))))
    return made


async def make(harness: Harness, *inputs: str) -> list[int]:
    """Create a job for each input, and wait until all of them have come as far as they can."""
    root = await harness.root()
    ids = [await root.create_task(Job, input) for input in inputs]
    await settle(harness, {"hold": "running", "wait": "waiting", "own": "waiting"}, ids)
    return ids


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again; what is waited for is committed by another task of this process."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - no event tells of a state of the store
            await trio.sleep(0.001)


async def settle(harness: Harness, wanted: dict[str, str], ids: list[int]) -> None:
    for id in ids:
        words = (wanted.get(harness.task(id).input, "terminal"), "completing")
        await until(lambda id=id, words=words: harness.task(id).status.word in words)  # type: ignore[misc]
    await until(lambda: all(t.status.word != "pending" or t.blocked for t in harness.tasks()))


def child(harness: Harness, owner: int) -> int:
    return next(task.id for task in harness.tasks() if task.owner == owner)


# --- explain ----------------------------------------------------------------------------------


async def test_the_reader_explains_beside_the_holder_what_the_holder_explains(
    tmp_path: Path,
) -> None:
    """Code and way down agree, except that queues are the holder's alone."""
    async with open_harness(tmp_path / "s", registry=registry()) as harness:
        ids = await make(harness, "hold", "wait", "own", "hand over", "done")
        async with open_reader(tmp_path / "s") as reader:
            pairs = [(harness.explain(id), await reader.explain(id)) for id in ids]
            below = child(harness, ids[2])

    assert [own.code for own, _ in pairs] == [
        "running",
        "waiting",
        "waiting",
        "completing",
        "ended",
    ]
    for own, seen in pairs:
        assert (own.code, own.path, own.phase) == (seen.code, seen.path, seen.phase)
        assert (own.outcome, own.invocations) == (seen.outcome, seen.invocations)
    assert pairs[0][1].text.startswith(f"runs its code in process {os.getpid()} on ")
    assert pairs[2][1].path == (below,)
    assert pairs[2][1].text.startswith(
        f"waits for 1 of 1 (all_settled): {below} look.job, which runs its code in process "
    )
    assert pairs[3][1].text.startswith("holds its outcome, completed, for 1 live task below: ")


async def test_a_ready_task_is_held_elsewhere_for_the_reader(tmp_path: Path) -> None:
    """Nobody outside sees the queue: the reader names the process that decides."""
    settings = Settings(limits={"look.job": 1})
    async with open_harness(tmp_path / "s", registry=registry(), settings=settings) as harness:
        root = await harness.root()
        await root.create_task(Job, "hold")
        second = await root.create_task(Job, "hold")
        await until(lambda: harness.explain(second).code == "limit_reached")
        async with open_reader(tmp_path / "s") as reader:
            found = await reader.explain(second)

    assert found.code == "held_elsewhere"
    assert f"process {os.getpid()} on " in found.text


async def test_without_a_holder_the_reader_says_that_nobody_runs_it(tmp_path: Path) -> None:
    """After a clean close, and after a death, work is `not_started` and the way out is named."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        held, owner = await make(harness, "hold", "own")
    async with open_reader(store) as reader:
        closed, waits = await reader.explain(held), await reader.explain(owner)
    storage = SqliteStorage(store)
    claim = HolderClaim(holder_id="x", host="elsewhere", pid=77, at_us=1, lease_seconds=15)
    storage.acquire(claim, takeover=False)
    storage.close()
    async with open_reader(store) as reader:
        dead = await reader.explain(held)

    assert (closed.code, waits.code) == ("not_started", "waiting")
    assert closed.text == "is ready, but no process holds the session"
    assert closed.remedy == "go on with `pidurable resume`"
    assert waits.text.endswith("which is ready, but no process holds the session")
    assert dead.code in ("not_started", "held_elsewhere")
    assert "process 77 on elsewhere" in dead.text


async def test_a_silent_holder_is_named_with_how_long_it_was_silent(tmp_path: Path) -> None:
    """One that still has its lock and shows no sign of life may hang, and that is said."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        held, waits = await make(harness, "hold", "wait")
    storage = SqliteStorage(store)
    claim = HolderClaim(
        holder_id="x", host=socket.gethostname(), pid=os.getpid(), at_us=1, lease_seconds=15
    )
    head = storage.acquire(claim, takeover=False)
    row = storage.task(waits)
    assert row is not None
    running = TaskStateRow(*row[3:4], int(Status.RUNNING), *row[11:], waits)
    storage.apply(
        Batch(
            epoch=head.epoch,
            seq=head.seq + 1,
            next_id=head.next_id,
            flush=True,
            writes=[(Op.TASK_STATE, running)],
        )
    )
    async with open_reader(store) as reader:
        ready, runs = await reader.explain(held), await reader.explain(waits)
    storage.close()

    assert ready.code == runs.code == "held_elsewhere"
    assert "holds the session and has been silent for " in ready.text
    assert ready.remedy == "look whether that process hangs"
    assert runs.text.startswith(f"runs its code in process {os.getpid()} on ")
    assert runs.text.endswith(", which is silent")


async def test_the_reader_finds_the_owner_that_is_being_aborted(tmp_path: Path) -> None:
    """Above a ready task, over an ended one, the marked owner is found from rows alone."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        owner, *_ = await make(harness, "own")
        below = child(harness, owner)
        harness._runtime.closing = True
        await harness.abort_task(owner, "too late")
    async with open_reader(store) as reader:
        found = await reader.explain(below)
        above = await reader.explain(owner)

    assert found.code == "owner_cancelling"
    assert f"is below task {owner} (look.job), which is to be aborted (too late)" in found.text
    assert (above.code, above.path) == ("aborting", (below,))


async def test_the_reader_looks_through_a_bounded_part_of_the_live_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what holds a task was not among those looked at, the answer says that there is more."""
    monkeypatch.setattr(_stored_facts, "LIVE_ROWS_MAX", 2)
    async with open_harness(tmp_path / "s", registry=registry()) as harness:
        (owner,) = await make(harness, "hand over")
        await make(harness, "hold", "hold")
        async with open_reader(tmp_path / "s") as reader:
            found = await reader.explain(owner)

    assert found.code == "completing"
    assert "more than 1 live task below" in found.text


async def test_a_long_way_down_costs_the_same_at_every_step(tmp_path: Path) -> None:
    """Of a chain of 200 owners each is read a few times, not once for everything below it."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        (first,) = await make(harness, "wait")
    storage = SqliteStorage(store)
    claim = HolderClaim(holder_id="x", host="here", pid=1, at_us=1, lease_seconds=15)
    head = storage.acquire(claim, takeover=False)
    row = storage.task(first)
    assert row is not None
    ids = range(first + 100, first + 300)
    writes: list[Any] = []
    for id in ids:
        on = (id + 1,) if id + 1 in ids else None
        wait = _json.dumps(_codec.encode_wait(Wait(on=on, signals=on is None)))
        owner = id - 1 if id - 1 in ids else None
        writes += [(Op.TASK, row._replace(id=id, owner=owner)), (Op.WAIT, (id, wait))]
    next_id = first + 300
    storage.apply(
        Batch(epoch=head.epoch, seq=head.seq + 1, next_id=next_id, flush=True, writes=writes)
    )
    storage.release(head.epoch)
    storage.close()
    calls: Counter[str] = Counter()
    async with open_reader(store) as reader:

        class Counting:
            def __getattr__(self, name: str) -> Any:
                calls[name] += 1
                return getattr(inner, name)

        inner = reader._storage
        reader._storage = Counting()  # type: ignore[assignment]
        found = await reader.explain(ids[0])
        reader._storage = inner

    assert len(found.path) == 199
    assert found.text.endswith("which waits for a signal")
    assert calls["task"] < 8 * 200


async def test_what_is_no_task_is_not_explained(tmp_path: Path) -> None:
    """Each side refuses an unknown id with its own kind of not-found error."""
    async with open_harness(tmp_path / "s", registry=registry()) as harness:
        await harness.root()
        for id in (99, 1, 0, 2**70):
            with pytest.raises(UnknownTaskError):
                harness.explain(id)
        async with open_reader(tmp_path / "s") as reader:
            for id in (99, 1, 0, 2**70):
                with pytest.raises(NotFoundError, match="task list"):
                    await reader.explain(id)


async def test_what_no_task_can_have_is_not_looked_for(tmp_path: Path) -> None:
    """A value that the storage cannot take is refused with its name; a blob of it is not there."""
    odd: list[dict[str, Any]] = [
        {"conversation": 2**63},
        {"conversation": "1"},
        {"kind": "\ud800"},
        {"kind": ""},
        {"after": 2**63},
        {"after": -1},
        {"limit": 0},
        {"limit": 2**63},
    ]
    async with open_harness(tmp_path / "s.sqlite") as harness:
        for arguments in odd:
            (name,) = arguments
            with pytest.raises((InvalidArgumentError, NotJsonError), match=name):
                harness.tasks(**arguments)
        assert harness.tasks(conversation=7, kind="no.such", after=3, limit=1) == []
        async with harness.commit() as tx:
            assert [tx.has_blob(name) for name in ("\ud800", "", "ab", None)] == [False] * 4  # type: ignore[arg-type]


async def test_a_poisoned_session_explains_nothing(tmp_path: Path) -> None:
    """What it remembers may be wrong, so it says that it is over."""
    with pytest.raises(SessionPoisonedError):  # noqa: PT012 - leaving raises it too
        async with open_harness(tmp_path / "s", registry=registry()) as harness:
            (task,) = await make(harness, "wait")
            harness.session.line.set_poison(SessionPoisonedError("s", "a test"))
            harness.explain(task)


# --- inspect ----------------------------------------------------------------------------------


class Untouched(Task[str, Begin | Later, str]):
    """A newer version of the same kind whose code must never be called."""

    name = "look.job"
    version = 3
    abort = nothing_to_undo

    def initial(self, input: str) -> Begin:
        raise AssertionError

    @phase
    async def begin(self, at: Begin, ctx: Ctx) -> None:
        raise AssertionError

    @phase
    async def later(self, at: Later, ctx: Ctx) -> None:
        raise AssertionError

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
        raise AssertionError


class Renamed(Task[str, Later, str]):
    """The same version without the phase that most tasks are in."""

    name = "look.job"
    abort = nothing_to_undo

    def initial(self, input: str) -> Later:
        return Later()

    @phase
    async def later(self, at: Later, ctx: TaskContext[str, Later, str]) -> None:
        await ctx.complete("")


async def test_inspect_says_what_starting_would_do(tmp_path: Path) -> None:
    """Each live task with what becomes of it under what is installed now."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        held, waits, over = await make(harness, "hold", "wait", "hand over")
        harness._runtime.closing = True
        await harness.abort_task(waits, "enough")

    async def fates(*tasks: Task[Any, Any, Any]) -> dict[int, tuple[str, str | None]]:
        async with open_harness(store, registry=registry(*tasks)) as harness:
            harness._runtime.closing = True
            return {each.id: (each.fate, each.blocked) for each in harness.inspect()}

    same = await fates(Job())
    renamed = await fates(Renamed())
    async with open_harness(store, registry=Registry()) as harness:
        harness._runtime.closing = True
        missing = {each.id: each for each in harness.inspect()}
    below = next(id for id in same if id not in (held, waits, over))

    assert same[held] == same[below] == ("runs", None)
    assert same[waits][0] == "aborting"
    assert same[over] == ("completing", None)
    assert renamed[held] == ("blocked", "checkpoint_unreadable")
    assert (missing[held].fate, missing[held].blocked) == ("blocked", "missing_definition")
    assert missing[held].installed_version is None
    assert missing[waits].abort_reason == "enough"


async def test_inspect_runs_no_code_of_what_it_would_migrate(tmp_path: Path) -> None:
    """A newer definition that can migrate is named, and none of its methods is called."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        held, waits = await make(harness, "hold", "wait")
    async with open_harness(store, registry=registry(Untouched())) as harness:
        found = {each.id: each for each in harness.inspect()}

    assert (found[held].fate, found[waits].fate) == ("migrates", "waits")
    assert (found[held].version, found[held].installed_version) == (1, 3)
    assert found[waits].wait is not None
    assert found[waits].wait.signals
    assert found[waits].phase == "later"


async def test_inspect_pages_through_live_work_by_id(tmp_path: Path) -> None:
    """Page after page gives each live task once; a limit out of range is refused."""
    async with open_harness(tmp_path / "s", registry=registry()) as harness:
        ids = await make(harness, *["wait"] * 5, "done")
        pages: list[int] = []
        after = 0
        while page := harness.inspect(after=after, limit=2):
            pages += [each.id for each in page]
            after = pages[-1]
        for limit in (0, 10_001, True, "2"):
            with pytest.raises(InvalidArgumentError, match="limit"):
                harness.inspect(limit=limit)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="after"):
            harness.inspect(after=-1)

    assert pages == ids[:5]


# --- retry, signal, waiting without starting ---------------------------------------------------


async def test_retry_task_lifts_what_blocks_and_tells_whether_it_did(tmp_path: Path) -> None:
    """A blocked task runs again once its code is there; others are left alone."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        (task,) = await make(harness, "wait")
        assert await harness.retry_task(task) is False
    empty = Registry()
    async with open_harness(store, registry=empty) as harness:
        await harness.signal(task, "go")
        harness.start()
        await until(lambda: harness.explain(task).code == "missing_definition")
        lifted = await harness.retry_task(task)
        await until(lambda: harness.task(task).blocked is not None)
        with pytest.raises(UnknownTaskError):
            await harness.retry_task(99)
    async with open_harness(store, registry=registry()) as harness:
        outcome = await harness.wait_for_task(task)  # type: ignore[arg-type]
        assert await harness.retry_task(task) is False

    assert lifted is True
    assert outcome.status == "completed"


async def test_resume_task_lets_what_a_restart_interrupted_go_on(tmp_path: Path) -> None:
    """Resumed, it and what is below it run again; a second time there is nothing to resume."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        root = await harness.root()
        owner = await root.create_task(Job, "own", on_restart="wait")
        await settle(harness, {"own": "waiting"}, [owner])
        below = child(harness, owner)
    async with open_harness(store, registry=registry()) as harness:
        inspected = {each.id: each for each in harness.inspect()}
        found = harness.explain(owner)
        async with open_reader(store) as reader:
            seen = await reader.explain(owner)
        with pytest.raises(InvalidArgumentError, match="resume that one"):
            await harness.resume_task(below)
        resumed = [await harness.resume_task(owner) for _ in range(2)]
        harness.start()
        await until(lambda: harness.task(below).status.word == "running")
        with pytest.raises(UnknownTaskError):
            await harness.resume_task(99)

    assert found.code == seen.code == "interrupted"
    assert (inspected[owner].interrupted, inspected[owner].fate) == (True, "blocked")
    assert resumed == [True, False]


async def test_a_signal_with_a_key_is_stored_once_and_refused_at_the_end(tmp_path: Path) -> None:
    """The same key twice is one signal; an ended task takes none."""
    async with open_harness(tmp_path / "s", registry=registry()) as harness:
        (task,) = await make(harness, "hold")
        for _ in range(3):
            await harness.signal(task, "note", {"n": 1}, key="once")
        unread = harness.explain(task).unread_signals
        await harness.abort_task(task)
        await harness.wait_for_task(task)  # type: ignore[arg-type]
        with pytest.raises(TaskEndedError):
            await harness.signal(task, "note")

    assert unread == 1


async def test_waiting_for_an_abort_needs_no_start(tmp_path: Path) -> None:
    """With start=False an abort is waited for, and other work is left where it is."""
    store = tmp_path / "s"
    async with open_harness(store, registry=registry()) as harness:
        first, second = await make(harness, "hold", "hold")
    async with open_harness(store, registry=registry()) as harness:
        await harness.abort_task(first)
        outcome = await harness.wait_for_task(first, start=False)  # type: ignore[arg-type]
        code = harness.explain(second).code

    assert outcome.status == "aborted"
    assert code == "not_started"


async def test_what_a_host_is_given_is_its_own() -> None:
    """Changing it changes neither what is committed nor what others are given."""
    async with open_harness(":memory:") as harness:
        root = await harness.root(agent=AgentChange(model="a/b", tools=["read"]))
        async with harness.commit() as tx:
            tx.append(root.id, {"items": [1]}, kind="note")
        async with root.watch() as watch:
            (entry,) = watch.value.history
            entry.data["items"].append(2)
            root.agent()["tools"].append("write")
            root.inbox().append("x")
            root.usage()["models"]["m"] = {}
            root.live()["calls"].append("x")

            assert watch.value.history[0].data == {"items": [1]}
            assert [each.data for each in await root.history()] == [{"items": [1]}]
        assert root.agent()["tools"] == ["read"]
        assert (root.inbox(), root.usage()["models"], root.live()["calls"]) == ([], {}, [])
