"""Mistakes in the code of a definition that show when it runs: one function each, by its name.

A function is a phase, an abort handler, or an `initial` of `Payment`; it does one thing wrong. What
is said of it is kept in `tests/public/snapshots/running_errors.txt`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import attrs
import trio

from pidurable import Extension, Registry, Task, TaskContext, nothing_to_undo, phase

Script = Callable[[Any, Any], Awaitable[object]]

PHASES: dict[str, Script] = {}
"""Phases that are wrong."""
ABORTS: dict[str, Script] = {}
"""Abort handlers that are wrong."""
STARTS: dict[str, Callable[[Any], object]] = {}
"""What `initial` returns that is wrong."""
MIGRATIONS: dict[str, Callable[[Any, Any], object]] = {}
"""What `migrate` returns that is wrong."""


def running(script: Script) -> Script:
    PHASES[script.__name__] = script
    return script


def aborting(script: Script) -> Script:
    ABORTS[script.__name__] = script
    return script


def starting(make: Callable[[Any], object]) -> Callable[[Any], object]:
    STARTS[make.__name__] = make
    return make


def migrating(make: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    MIGRATIONS[make.__name__] = make
    return make


@attrs.frozen
class Card:
    number: str
    """The name of the mistake."""


@attrs.frozen
class Prepare:
    tries: list[int] = attrs.Factory(list)


@attrs.frozen
class Charge:
    key: str


@attrs.frozen
class Elsewhere:
    pass


@attrs.frozen
class Receipt:
    id: str


class Payment(Task[Card, Prepare | Charge, Receipt]):
    name = "shop.payment"

    def initial(self, card: Card) -> Any:
        make = STARTS.get(card.number)
        return make(card) if make is not None else Prepare()

    @phase
    async def prepare(self, at: Prepare, ctx: Any) -> None:
        script = PHASES.get(ctx.input.number, parked)
        return await script(at, ctx)  # type: ignore[return-value]

    @phase
    async def charge(self, at: Charge, ctx: Any) -> None:
        await PHASES[ctx.input.number](at, ctx)

    async def abort(self, at: Any, ctx: Any) -> None:
        return await ABORTS.get(ctx.input.number, undone)(at, ctx)  # type: ignore[return-value]


class Migrating(Payment):
    name = "shop.payment"
    version = 2

    def __init__(self, make: Callable[[Any, Any], object]) -> None:
        self.make = make

    def migrate(self, input: Any, checkpoint: Any, from_version: int) -> Any:
        return self.make(input, checkpoint)


class Newer(Payment):
    """A version that nobody taught to read the one before."""

    name = "shop.payment"
    version = 2


class Refund(Task[Card, Prepare, None]):
    name = "shop.refund"
    abort = nothing_to_undo

    def initial(self, card: Card) -> Prepare:
        return Prepare()

    @phase
    async def prepare(self, at: Prepare, ctx: TaskContext[Card, Prepare, None]) -> None:
        await trio.sleep_forever()


class Paiment(Refund):
    """Installed nowhere, and its name is nearly that of one which is."""

    name = "shop.paiment"


def registry(*tasks: Task[Any, Any, Any]) -> Registry:
    made = Registry()
    made.install(Extension("shop", tasks=[*(tasks or (Payment(),)), Refund()]))
    return made


async def parked(at: Any, ctx: Any) -> None:
    """No mistake: what has to be aborted, or migrated, waits here."""
    await ctx.wait(then=Charge("k"), signals=True)


async def undone(at: Any, ctx: Any) -> None:
    await ctx.end_aborted("undone")


# --- no way on ----------------------------------------------------------------------------------


@running
async def returns_without_progress(at: Any, ctx: Any) -> None:
    pass


@running
async def returns_its_next_checkpoint(at: Any, ctx: Any) -> object:
    return Charge("k")


@running
async def returns_without_awaiting(at: Any, ctx: Any) -> object:
    return ctx.goto(Charge("k"))


@running
async def goes_to_where_it_is(at: Any, ctx: Any) -> None:
    await ctx.goto(Prepare())


@running
async def leaves_only_a_memo(at: Any, ctx: Any) -> None:
    await ctx.memo("a", 1)


@running
async def creates_and_forgets(at: Any, ctx: Any) -> None:
    await ctx.create_task(Refund, Card("1"))


# --- wrong ways on ------------------------------------------------------------------------------


@running
async def goes_to_the_class(at: Any, ctx: Any) -> None:
    await ctx.goto(Charge)


@running
async def goes_to_a_name(at: Any, ctx: Any) -> None:
    await ctx.goto("charge")


@running
async def goes_to_a_foreign_checkpoint(at: Any, ctx: Any) -> None:
    await ctx.goto(Elsewhere())


@running
async def goes_with_a_field_of_the_wrong_type(at: Any, ctx: Any) -> None:
    await ctx.goto(Charge(key=5))  # type: ignore[arg-type]


@running
async def changes_its_checkpoint(at: Any, ctx: Any) -> None:
    at.tries = [1]


@running
async def completes_with_another_type(at: Any, ctx: Any) -> None:
    await ctx.complete("r1")


@running
async def completes_with_nothing(at: Any, ctx: Any) -> None:
    await ctx.complete(None)


@running
async def completes_twice(at: Any, ctx: Any) -> None:
    await ctx.complete(Receipt("1"))
    await ctx.complete(Receipt("2"))


@running
async def appends_after_its_end(at: Any, ctx: Any) -> None:
    await ctx.complete(Receipt("1"))
    async with ctx.commit() as tx:
        tx.append(ctx.conversation_id, "text")


@running
async def goes_on_after_a_wait(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), signals=True)
    await ctx.goto(Charge("z"))


@running
async def raises_after_its_end(at: Any, ctx: Any) -> None:
    await ctx.complete(Receipt("1"))
    raise KeyError("cents")


@running
async def goes_on_after_the_end_in_one_commit(at: Any, ctx: Any) -> None:
    async with ctx.commit() as tx:
        tx.complete(Receipt("1"))
        tx.goto(Charge("k"))


@running
async def ends_aborted_in_a_phase(at: Any, ctx: Any) -> None:
    await ctx.end_aborted("no")


@running
async def fails_with_a_number(at: Any, ctx: Any) -> None:
    await ctx.fail(404)


@running
async def fails_with_a_class(at: Any, ctx: Any) -> None:
    await ctx.fail(ValueError)


@running
async def fails_with_a_result_of_another_type(at: Any, ctx: Any) -> None:
    await ctx.fail("declined", result=3)


@running
async def raises_a_cancellation_of_its_own(at: Any, ctx: Any) -> None:
    kept: list[BaseException] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:  # noqa: ASYNC103 - the mistake
            kept.append(cancelled)
    raise kept[0]


# --- waits --------------------------------------------------------------------------------------


@running
async def waits_for_nothing(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"))


@running
async def waits_for_a_task_that_is_not_there(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), on=[4242])


@running
async def waits_for_one_task_without_a_list(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), on=await ctx.create_task(Refund, Card("1")))


@running
async def waits_for_itself(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), on=[ctx.task_id])


@running
async def waits_with_an_unknown_policy(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), on=[], policy="any")


@running
async def waits_for_so_many_seconds(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), deadline=60)


@running
async def waits_for_a_timedelta(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), deadline=timedelta(seconds=60))


@running
async def waits_until_a_moment_without_a_zone(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("k"), deadline=datetime(2027, 1, 1))


@running
async def takes_the_outcome_of_what_runs(at: Any, ctx: Any) -> None:
    await ctx.outcomes([await ctx.create_task(Refund, Card("1"))])


@running
async def takes_one_outcome_without_a_list(at: Any, ctx: Any) -> None:
    await ctx.outcomes(await ctx.create_task(Refund, Card("1")))


# --- commits ------------------------------------------------------------------------------------


@running
async def awaits_a_commit(at: Any, ctx: Any) -> None:
    await ctx.commit()


@running
async def awaits_a_transition(at: Any, ctx: Any) -> None:
    async with ctx.commit() as tx:
        await tx.goto(Charge("k"))


@running
async def enters_a_commit_with_a_plain_with(at: Any, ctx: Any) -> None:
    with ctx.commit() as tx:
        tx.goto(Charge("k"))


@running
async def uses_the_context_inside_of_a_commit(at: Any, ctx: Any) -> None:
    async with ctx.commit():
        await ctx.goto(Charge("k"))


@running
async def uses_a_commit_after_its_block(at: Any, ctx: Any) -> None:
    async with ctx.commit() as tx:
        pass
    tx.goto(Charge("k"))


@running
async def receives_without_a_commit(at: Any, ctx: Any) -> None:
    ctx.receive()


@running
async def calls_what_is_not_there(at: Any, ctx: Any) -> None:
    await ctx.go_to(Charge("k"))


@running
async def appends_what_is_no_entry(at: Any, ctx: Any) -> None:
    async with ctx.commit() as tx:
        tx.append(ctx.conversation_id, Receipt("1"))


@running
async def uses_the_context_of_an_earlier_phase(at: Any, ctx: Any) -> None:
    if isinstance(at, Prepare):
        KEPT.append(ctx)
        await ctx.goto(Charge("k"))
    else:
        await KEPT.pop().complete(Receipt("1"))


KEPT: list[Any] = []


@running
async def keeps_a_memo_that_is_too_large(at: Any, ctx: Any) -> None:
    await ctx.memo("page", "x" * 9000)


# --- owned work ---------------------------------------------------------------------------------


@running
async def creates_a_task_that_is_not_installed(at: Any, ctx: Any) -> None:
    await ctx.create_task(Paiment, Card("1"))


@running
async def creates_a_task_by_its_name(at: Any, ctx: Any) -> None:
    await ctx.create_task("shop.refund", Card("1"))


@running
async def creates_a_task_with_another_input(at: Any, ctx: Any) -> None:
    await ctx.create_task(Refund, "4242")


@running
async def creates_a_task_in_its_last_commit(at: Any, ctx: Any) -> None:
    async with ctx.commit() as tx:
        tx.create_task(Refund, Card("1"))
        tx.complete(Receipt("1"))


@running
async def creates_a_background_task_of_its_own(at: Any, ctx: Any) -> None:
    async with ctx.commit() as tx:
        tx.create_task(Refund, Card("1"), background=True)


@running
async def creates_a_task_whose_initial_is_wrong(at: Any, ctx: Any) -> None:
    await ctx.create_task(Payment, Card("starts_elsewhere"))


# --- abort handlers -----------------------------------------------------------------------------


@aborting
async def aborts_without_an_outcome(at: Any, ctx: Any) -> None:
    pass


@aborting
async def aborts_and_goes_to_where_it_is(at: Any, ctx: Any) -> None:
    await ctx.goto(at)


@aborting
async def aborts_and_waits(at: Any, ctx: Any) -> None:
    await ctx.wait(then=Charge("z"), signals=True)


@aborting
async def aborts_and_creates_a_task(at: Any, ctx: Any) -> None:
    await ctx.create_task(Refund, Card("1"))


@aborting
async def aborts_and_creates_a_conversation(at: Any, ctx: Any) -> None:
    async with ctx.commit() as tx:
        tx.create_conversation()


@aborting
async def aborts_without_awaiting(at: Any, ctx: Any) -> object:
    return ctx.end_aborted("undone")


# --- initial ------------------------------------------------------------------------------------


@starting
def starts_elsewhere(card: Card) -> object:
    return Elsewhere()


@starting
def starts_nowhere(card: Card) -> object:
    return None


@starting
def starts_at_the_class(card: Card) -> object:
    return Prepare


@starting
def starts_by_awaiting(card: Card) -> object:
    async def first() -> Prepare:
        return Prepare()

    return first()


@starting
def starts_with_a_field_of_the_wrong_type(card: Card) -> object:
    return Charge(key=5)  # type: ignore[arg-type]


@starting
def starts_with_an_error(card: Card) -> object:
    raise KeyError("cents")


# --- migrate ------------------------------------------------------------------------------------


@migrating
def migrates_to_nothing(input: Any, checkpoint: Any) -> object:
    return None


@migrating
def migrates_to_the_input_alone(input: Any, checkpoint: Any) -> object:
    return input


@migrating
def migrates_to_a_class(input: Any, checkpoint: Any) -> object:
    return input, Charge("k")


@migrating
def migrates_to_an_unknown_phase(input: Any, checkpoint: Any) -> object:
    return input, {"phase": "settle", "value": {}}


@migrating
def migrates_to_what_is_no_json(input: Any, checkpoint: Any) -> object:
    return Card("1"), checkpoint


@migrating
def migrates_to_a_field_of_the_wrong_type(input: Any, checkpoint: Any) -> object:
    return input, {"phase": "charge", "value": {"key": 5}}


@migrating
def migrates_without_a_field(input: Any, checkpoint: Any) -> object:
    return {}, checkpoint


@migrating
def migrates_with_an_error(input: Any, checkpoint: Any) -> object:
    raise KeyError("cents")
