"""Errors of tasks: stored as plain data, and read back without running anything of theirs."""

# C086: custom constructors, groups, texts that raise, 5 MB, and what is no Exception.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from pidurable import (
    Extension,
    Registry,
    Task,
    TaskContext,
    nothing_to_undo,
    open_harness,
    phase,
)
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX, TRACEBACK_BYTES_MAX
from pidurable.storage import MemoryStorage
from pidurable.testing import InlineBlocking


class Strange(Exception):
    """It cannot be made from its arguments, and its text raises."""

    def __init__(self, needed: int, *, also: str) -> None:
        super().__init__(needed)

    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> Any:
        raise AssertionError("nothing of it is pickled")


ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "custom": (lambda: Strange(1, also="x"), "its text raised ValueError"),
    "group": (lambda: ExceptionGroup("many", [ValueError("a\0"), OSError(5)]), "ValueError: a\\0"),
    "surrogate": (lambda: ValueError("a\ud800"), "a\\ud800"),
    "not text": (lambda: ValueError({"a": {2}}, 7), "({'a': {2}}, 7)"),
    "large": (lambda: ValueError("x" * 5_000_000), "[cut]"),
    "lookalike": (lambda: type("Cancelled", (BaseException,), {})("not trio's"), "not trio's"),
    "recursion": (lambda: RecursionError("deep"), "deep"),
    "stop": (lambda: StopIteration(7), "StopIteration"),
}


@attrs.frozen
class Begin:
    """Nothing has happened yet."""


class Failing(Task[str, Begin, None]):
    """Raises, or fails with, the error of that name."""

    name = "cases.failing"
    abort = nothing_to_undo

    def initial(self, name: str) -> Begin:
        return Begin()

    @phase
    async def begin(self, at: Begin, ctx: TaskContext[str, Begin, None]) -> None:
        name, _, way = ctx.input.partition("/")
        error = ERRORS[name][0]()
        if way == "raised":
            raise error
        await ctx.fail(error)


async def test_an_error_of_any_kind_is_read_back_after_a_restart_as_it_was() -> None:
    """Raised or handed to `fail`: a type, a bounded text and trace, the same in the next life."""
    storage = MemoryStorage()
    registry = Registry()
    registry.install(Extension("cases", tasks=[Failing()]))
    told: dict[str, Any] = {}
    ids: dict[str, Any] = {}
    async with open_harness(storage, registry=registry, blocking=InlineBlocking()) as harness:
        root = await harness.root()
        for name, (_, says) in ERRORS.items():
            for way, status in (("raised", "faulted"), ("given", "failed")):
                id = await root.create_task(Failing, f"{name}/{way}")
                outcome = await harness.wait_for_task(id)
                assert outcome.status == status, (name, outcome)
                error = outcome.error
                assert error is not None
                assert says in f"{error.type}: {error.message}", name
                assert len(error.message.encode()) <= ERROR_MESSAGE_BYTES_MAX
                assert len((error.traceback or "").encode()) <= TRACEBACK_BYTES_MAX
                ids[f"{name}/{way}"], told[f"{name}/{way}"] = id, error
    async with open_harness(storage.reopen(), blocking=InlineBlocking()) as harness:
        for name, id in ids.items():
            stored = harness.task(id).outcome
            assert stored is not None
            assert stored.error == told[name]
