"""Large values in a file: every reader gets them whole, or is told what is gone."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import attrs
import pytest

from pidurable import (
    Extension,
    Registry,
    Settings,
    Task,
    TaskContext,
    nothing_to_undo,
    open_harness,
    phase,
)
from pidurable.errors import NotJsonError, SessionClosedError, StorageCorruptError
from pidurable.harness._reader import open_reader
from pidurable.records import _codec
from pidurable.records._entries import entry
from pidurable.records._limits import BLOB_BYTES_MIN
from pidurable.session._seams import InlineBlocking

KIB, MIB = 1 << 10, 1 << 20
LARGE = "l" * BLOB_BYTES_MIN


@entry("test.scan")
@attrs.frozen
class Scan:
    text: str


@attrs.frozen
class Begin:
    """Nothing was read."""


EchoContext = TaskContext[str, Begin, str]


class Echo(Task[str, Begin, str]):
    """Gives its input back."""

    name = "test.echo"
    version = 1
    abort = nothing_to_undo

    def initial(self, input: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: EchoContext) -> None:
        async with ctx.commit() as tx:
            tx.append(ctx.conversation_id, Scan(ctx.input))
            tx.complete(ctx.input + "!")


def registry() -> Registry:
    made = Registry()
    made.install(Extension("test", tasks=[Echo()]))
    return made


async def echo(store: Path) -> tuple[int, int]:
    """Run one task with a large input; return the root and the task."""
    async with open_harness(store, registry=registry(), blocking=InlineBlocking()) as harness:
        root = await harness.root()
        task = await root.create_task(Echo, LARGE)
        outcome = await harness.wait_for_task(task)
        assert outcome.result == LARGE + "!"
        return root.id, int(task)


async def test_a_large_input_and_outcome_are_whole_for_every_reader(tmp_path: Path) -> None:
    """After reopening, and for somebody who only reads; the file has each of them once."""
    store = tmp_path / "s"
    root, task = await echo(store)

    async with open_harness(store, registry=registry(), blocking=InlineBlocking()) as harness:
        again = await harness.wait_for_task(task)  # type: ignore[arg-type]
        (kept,) = await (await harness.root()).history()
        in_session = kept.read(Scan)
    async with open_reader(store) as reader:
        record = await reader.task(task)
        (read,) = await reader.entries(root)
        shown = read.data
    with sqlite3.connect(store) as raw:
        names = [name for (name,) in raw.execute("select sha256 from blobs order by sha256")]
        inputs = list(raw.execute("select value from inputs"))
    raw.close()

    assert again.result == LARGE + "!"
    assert in_session == Scan(LARGE)
    assert (record.input, shown) == (LARGE, {"text": LARGE})
    assert record.outcome is not None
    assert len(names) == 3
    assert inputs[0][0][1:] in names


async def test_what_was_not_looked_at_before_the_end_is_told_so(tmp_path: Path) -> None:
    """A large value is read when it is looked at: after the harness has closed that is refused."""
    store = tmp_path / "s"
    await echo(store)
    async with open_harness(store, registry=registry(), blocking=InlineBlocking()) as harness:
        root = await harness.root()
        (looked_at,) = await root.history()
        (other,) = await root.history()
        assert looked_at.read(Scan) == Scan(LARGE)

    assert looked_at.data == {"text": LARGE}
    assert "data=<not read>" in repr(other)
    with pytest.raises(SessionClosedError):
        _ = other.data


async def test_a_reader_is_told_what_is_gone(tmp_path: Path) -> None:
    """Without its blobs a task and an entry are damaged and named; a page of entries is not."""
    # C078
    store = tmp_path / "s"
    root, task = await echo(store)
    with sqlite3.connect(store) as raw:
        raw.execute("delete from blobs")
    raw.close()

    async with open_reader(store) as reader:
        with pytest.raises(StorageCorruptError, match=f"the input of task {task}: blob .* missing"):
            await reader.task(task)
        (read,) = await reader.entries(root)
        with pytest.raises(StorageCorruptError, match=f"the data of entry {read.id}: blob"):
            _ = read.data
    async with open_harness(store, registry=registry(), blocking=InlineBlocking()) as harness:
        with pytest.raises(StorageCorruptError, match=f"the outcome of task {task}"):
            await harness.wait_for_task(task)  # type: ignore[arg-type]
        # The session goes on, and nothing was written over what is damaged.
        next_task = await (await harness.root()).create_task(Echo, "small")
        assert (await harness.wait_for_task(next_task)).result == "small!"


@attrs.frozen
class Held:
    """What was given, as far as it was read."""

    value: Any = None


class Keep(Task[Any, Held, Any]):
    """Has its input in a checkpoint and in its outcome, whatever that is."""

    name = "test.keep"
    version = 1
    abort = nothing_to_undo

    def initial(self, input: Any) -> Held:
        return Held()

    @phase
    async def begin(self, at: Held, ctx: TaskContext[Any, Held, Any]) -> None:
        async with ctx.commit() as tx:
            if at.value is None:
                tx.goto(Held({"input": ctx.input}))
            else:
                tx.complete(at.value)


async def test_a_larger_setting_lets_larger_values_of_any_type_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As input, checkpoint, outcome and entry; what is larger still is told that limit."""
    monkeypatch.setattr(_codec, "VALUE_BYTES_MAX", 16 * KIB)  # megabytes take seconds
    made = Registry()
    made.install(Extension("test", tasks=[Keep()]))
    large = ["x" * 17 * KIB]
    settings = Settings(value_bytes_max=18 * KIB)
    async with open_harness(":memory:", registry=made, settings=settings) as harness:
        root = await harness.root()
        outcome = await harness.wait_for_task(await root.create_task(Keep, large))
        await root.write(large, kind="test.large")
        with pytest.raises(NotJsonError, match=f"at most {18 * KIB} bytes .*value_bytes_max"):
            await root.create_task(Keep, large + large)
        (kept,) = await root.history()
        assert kept.data == large

    assert outcome.result == {"input": large}


async def test_a_larger_setting_lets_a_larger_prompt_in() -> None:
    """It is stored, and not refused by the limit that counts where nobody has set another one."""
    settings = Settings(value_bytes_max=17 * MIB, body_report_seconds=60.0)
    async with open_harness(":memory:", settings=settings) as harness:
        root = await harness.root()
        settled = await (await root.submit("x" * (16 * MIB + 1))).wait()

    assert settled.reason == "no_model"
