"""Plays a program on a stage and compares, at rest, with what the model computes alone."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trio
from oracle import live
from programs import (
    BESIDES,
    DEADLINES,
    DEATHS,
    ENDS,
    ON_RESTART,
    POLICIES,
    REPLACEMENTS,
    SLACK,
    Program,
)
from stage import ENDED, KINDS, ROOT, Box, Next, Stage, kind_of
from telling import state_of, wait_of
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable.errors import PidurableError

sys.path.append(str(Path(__file__).resolve().parents[1] / "tasks"))
from recount import check_tree

SECONDS = (0.3, 1.5, 5.0, 61.0, 1000.0)
STEPS = (3, 60, -3, -60, 1000)


class Difference(AssertionError):
    """The product and the model disagree: where, what was expected, what was found."""


def quiet_logs() -> None:
    """Faults, retries and deaths are what programs are made of; nobody wants to read of them."""
    logging.getLogger("pidurable").setLevel(logging.CRITICAL + 1)


recounts = True
"""Whether the counters and indexes of the runtime are made anew from the rows at each rest."""


class Player:
    """One program, from its first opening to its last."""

    def __init__(self, program: Program, *, seed: int = 0, path: Path | None = None) -> None:
        self.program = program
        self.stage = Stage(seed=seed, path=path)
        self.model = self.stage.model
        self.ledger = self.stage.ledger
        self.clock = MockClock()
        self.steps = 0
        self._left = list(program)
        self.reopen: dict[str, Any] = {}
        self._nursery: trio.Nursery
        self._running = 0
        self._signals = 0

    # --- the whole -----------------------------------------------------------------------

    async def run(self) -> None:
        left = self._left
        start = True
        async with trio.open_nursery() as self._nursery:
            while True:
                over = await self._opening(left, start=start)
                await self._all_answered()
                if over:
                    return
                start = self.reopen.get("start", True)

    async def _opening(self, left: Program, *, start: bool) -> bool:
        """Play until the process ends; True once the program is over."""
        stage = self.stage
        async with stage.open(start=start):
            try:
                return await self._played(left)
            except BaseException:
                # A close waits for what is held.
                stage.blocking.release()
                raise

    async def _played(self, left: Program) -> bool:
        self._look()
        while left:
            name, *numbers, slack = left.pop(0)
            self.steps += 1
            self.ledger.trace.append(f"--- {name} {numbers}")
            await getattr(self, f"_do_{name}")(*numbers)
            await self._let_run(SLACK[slack])
            self._look()
            if self.stage.storage.frozen or name == "close":
                return False
        await self._finish()
        return not self.stage.storage.frozen

    def _look(self) -> None:
        if self.ledger.problems:
            raise Difference(self.ledger.problems[0])

    async def _let_run(self, turns: int) -> None:
        if turns < 0:
            await wait_all_tasks_blocked()
        for _ in range(turns):
            await trio.lowlevel.checkpoint()

    async def _all_answered(self) -> None:
        """Nobody waits any more for a process that is gone."""
        await wait_all_tasks_blocked()
        if self._running:
            raise Difference(f"{self._running} callers wait for a session that has ended")
        if self.stage.boxes:
            raise Difference(f"handlers were left behind: {sorted(self.stage.boxes)}")
        self._look()

    def _spawn(self, call: Callable[[], Awaitable[Any]]) -> None:
        async def run() -> None:
            self._running += 1
            try:
                await call()
            finally:
                self._running -= 1

        self._nursery.start_soon(run)

    # --- at rest -------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Let everything come to rest, then compare."""
        stage = self.stage
        stage.blocking.release()
        await wait_all_tasks_blocked()
        self._look()
        if stage.storage.frozen:
            return
        invocations = {
            id: "abort" if each.aborting else "phase" for id, each in stage.rt.invocations.items()
        }
        due = self.model.due(stage.clock.now_us(), int(trio.current_time() * 1e6), invocations)
        if due:
            raise Difference(f"at rest: {due[0]}")
        self._compare_rows()
        base = stage.memory()
        if recounts and base is not None:
            check_tree(stage.rt, base)

    def _compare_rows(self) -> None:
        """What is stored is what the model was told, and nothing besides."""
        storage = self.stage.storage
        for id, task in self.model.tasks.items():
            row = storage.task(id)
            if row is None:
                raise Difference(f"task {id}: expected a row, found none")
            found = {**state_of(row), "wait": wait_of(storage.task_wait(id))}
            for name, value in found.items():
                if task[name] != value and not (name == "wait" and not live(task)):
                    raise Difference(
                        f"row of task {id}.{name}: expected {task[name]}, found {value}"
                    )
            unread = [signal.id for signal in storage.signals(id)]
            if unread != list(self.model.signals.get(id, ())):
                raise Difference(
                    f"signals of task {id}: expected {self.model.signals.get(id)}, found {unread}"
                )

    async def _finish(self) -> None:
        """Faults stop: everything is started, aborted and ended, and nothing is left."""
        stage = self.stage
        stage.start()
        await self._settle()
        self.clock.jump(2000)
        await self._settle()
        await self._do_abort_all()
        for _ in range(100):
            await self._settle()
            if stage.storage.frozen:
                return
            handlers = [box for _, box in sorted(stage.boxes.items()) if box.idle]
            for box in handlers:
                box.give(_end_aborted)
            if not any(live(task) for task in self.model.tasks.values()):
                break
            if not handlers:
                # A handler that was parked, or waits to be tried again.
                await self._do_abort_all()
                self.clock.jump(100)
        self._all_ended()

    async def _do_abort_all(self) -> None:
        ids = [id for id, task in self.model.tasks.items() if live(task)]
        await self._host(lambda tx: [self._ask_abort(tx, id) for id in ids])

    def _all_ended(self) -> None:
        stuck = [f"{id}: {task}" for id, task in self.model.tasks.items() if live(task)]
        if stuck:
            raise Difference(f"after an abort of everything: {stuck[0]}")
        index = self.stage.rt.index
        left = {
            "live": index.live,
            "nodes": list(self.stage.rt.published.nodes),
            "waiters": dict(index.waiters),
            "blocked": dict(index.blocked),
            "invocations": dict(self.stage.rt.invocations),
        }
        for name, value in left.items():
            if value:
                raise Difference(
                    f"index.{name} after everything ended: expected none, found {value}"
                )

    # --- choosing ------------------------------------------------------------------------

    def _pick(self, n: int, among: list[Any]) -> Any:
        return among[n % len(among)] if among else None

    def _phase(self, n: int) -> Box | None:
        idle = [b for _, b in sorted(self.stage.boxes.items()) if b.idle and b.handler == "phase"]
        found: Box | None = self._pick(n, idle)
        return found

    def _handler(self, n: int) -> Box | None:
        idle = [b for _, b in sorted(self.stage.boxes.items()) if b.idle and b.handler == "abort"]
        found: Box | None = self._pick(n, idle)
        return found

    def _task(self, n: int, *, ended: bool = False) -> int | None:
        """A task, most of the time a live one."""
        among = sorted(id for id, task in self.model.tasks.items() if ended or live(task))
        found: int | None = self._pick(n, among)
        return found

    def _deadline(self, seconds: float | None) -> datetime | None:
        if seconds is None:
            return None
        now = datetime.fromtimestamp(self.stage.clock.now_us() / 1e6, UTC)
        return now + timedelta(seconds=seconds)

    # --- the host ------------------------------------------------------------------------

    async def _host(
        self, body: Callable[[Any], Any], expected: Callable[[], set[str]] = lambda: {""}
    ) -> None:
        self._spawn(lambda: self.stage.host(body, expected))

    def _ask_abort(self, tx: Any, id: int) -> None:
        tx.asked.requests[id] = "user"
        tx.abort_task(id)

    async def _do_create(
        self, kind: int, where: int, manual: int, background: int, deadline: int, restart: int
    ) -> None:
        conversations = sorted(self.model.conversations)
        # Most work stands at the root, so that not everything is below everything.
        conversation = conversations[where % len(conversations)] if where % 3 == 0 else ROOT
        name = KINDS[kind]
        moment = self._deadline(DEADLINES[deadline])

        def body(tx: Any) -> None:
            tx.create_task(
                kind_of(name),
                "manual" if manual else "auto",
                conversation=conversation,
                background=background == 0,
                deadline=moment,
                on_restart=ON_RESTART[restart],
            )

        await self._host(body, lambda: self._known(name))

    def _known(self, name: str) -> set[str]:
        return {"" if name in self.ledger.definitions else "UnknownDefinitionError"}

    async def _do_abort(self, n: int) -> None:
        id = self._task(n)
        if id is not None:
            await self._host(lambda tx: self._ask_abort(tx, id))

    async def _do_abort_many(self, n: int, m: int) -> None:
        ids = [id for id in (self._task(n, ended=True), self._task(m)) if id is not None]
        await self._host(lambda tx: [self._ask_abort(tx, id) for id in ids])

    async def _do_signal(self, n: int, key: int) -> None:
        id = self._task(n, ended=n % 7 == 0)
        if id is None:
            return
        name = None if key == 0 else f"key {key}"

        def expected() -> set[str]:
            return {"" if live(self.model.tasks[id]) else "TaskEndedError"}

        await self._host(lambda tx: tx.signal(id, "go", key, key=name), expected)

    async def _do_retry_task(self, n: int) -> None:
        await self._renew(n, lambda tx, id: tx.retry_task(id))

    async def _do_resume_task(self, n: int) -> None:
        await self._renew(n, lambda tx, id: tx.resume_task(id))

    async def _renew(self, n: int, call: Callable[[Any, int], None]) -> None:
        blocked = sorted(id for id, task in self.model.tasks.items() if task["blocked"])
        id = self._pick(n, blocked)
        if id is None:
            return

        def body(tx: Any) -> None:
            tx.asked.renewed.add(id)
            call(tx, id)

        def expected() -> set[str]:
            task = self.model.tasks[id]
            below = task["blocked"] == "interrupted" and self.model.halted(id)
            return {"InvalidArgumentError" if below else ""}

        await self._host(body, expected)

    async def _do_watch(self, n: int) -> None:
        """Wait, as a host, for the end of a task."""
        id = self._task(n)
        if id is None:
            return
        self.model.started = True

        async def watch() -> None:
            if self.ledger.at_published(lambda: id not in self.model.tasks):
                return  # Nobody can have heard of it yet.
            try:
                outcome = await self.stage.rt.wait_for_task(id)
            except PidurableError as error:
                self._may_end(type(error).__name__, f"wait for {id}")
                return
            task = self.ledger.at_published(lambda: self.model.tasks[id])
            if live(task) or task["outcome"] != outcome.status:
                self.ledger.wrong(f"wait for {id}: expected {task}, found {outcome.status}")

        self._spawn(watch)

    async def _do_idle(self, n: int) -> None:
        conversation = self._pick(n, sorted(self.model.conversations))
        self.model.started = True

        async def watch() -> None:
            if self.ledger.at_published(lambda: conversation not in self.model.conversations):
                return  # Nobody can have heard of it yet.
            try:
                await self.stage.rt.wait_for_idle(conversation)
            except PidurableError as error:
                self._may_end(type(error).__name__, f"idle {conversation}")

        self._spawn(watch)

    def _may_end(self, got: str, what: str) -> None:
        dead = self.stage.storage.frozen
        ended = got in ENDED and (self.stage.ending or dead)
        if not ended and not (dead and got == "StorageAccessError"):
            self.ledger.wrong(f"{what}: raised {got}")

    # --- time, process, definitions ------------------------------------------------------

    async def _do_advance(self, n: int) -> None:
        self.clock.jump(SECONDS[n])

    async def _do_step_clock(self, n: int) -> None:
        self.stage.clock.step_us += STEPS[n] * 1_000_000

    async def _do_hold(self) -> None:
        self.stage.blocking.hold()

    async def _do_release(self) -> None:
        self.stage.blocking.release()

    async def _do_crash(self, how: int, start: int) -> None:
        self.reopen["start"] = start != 0
        death = DEATHS[how]
        if death != "now":
            # The process dies around the next batch, whatever that will be.
            self.stage.storage.dies = death
            return
        self.stage.die()
        self.stage.blocking.release()

    async def _do_close(self, turns: int, start: int) -> None:
        stage = self.stage
        self.reopen["start"] = start != 0
        if not stage.blocking.held:
            return
        if stage.blocking.inside:
            self.model.rare["close during a held commit"] += 1

        async def release() -> None:
            await self._let_run(turns)
            stage.blocking.release()

        self._spawn(release)

    async def _do_start(self) -> None:
        self.stage.start()

    async def _do_replace(self, kind: int, how: int) -> None:
        await self.stage.replace(KINDS[kind], REPLACEMENTS[how])

    async def _do_settle(self) -> None:
        await self._settle()

    # --- what running tasks are told -----------------------------------------------------

    def _give(self, box: Box | None, order: Callable[[Box], Awaitable[bool]]) -> None:
        if box is not None:
            box.give(order)

    async def _do_goto(self, n: int) -> None:
        async def order(box: Box) -> bool:
            await box.commit(lambda tx: tx.goto(Next(box.n + 1)), lambda: {""})
            return True

        self._give(self._phase(n), order)

    def _owned(self, box: Box) -> Callable[[], set[str]]:
        """What an attempt to create owned work may be answered with: judged by the model."""

        def expected() -> set[str]:
            task = self.model.tasks[box.task]
            return {"OwnerEndedError"} if task["mark"] else {""}

        return expected

    async def _do_child(self, n: int, kind: int, manual: int, deadline: int, restart: int) -> None:
        name = KINDS[kind]

        async def order(box: Box) -> bool:
            moment = self._deadline(DEADLINES[deadline])

            def body(tx: Any) -> None:
                tx.create_task(
                    kind_of(name),
                    "manual" if manual else "auto",
                    deadline=moment,
                    on_restart=ON_RESTART[restart],
                )

            await box.commit(body, lambda: self._known(name))
            return False

        self._give(self._phase(n), order)

    async def _do_conversation(self, n: int, kind: int, how: int) -> None:
        """An owned conversation with a task in it; a background task for one `how`."""
        name = KINDS[kind]

        async def order(box: Box) -> bool:
            def body(tx: Any) -> None:
                made = tx.create_conversation()
                for background in ((False,), (True,), (True, False), ())[how]:
                    tx.create_task(kind_of(name), "auto", conversation=made, background=background)

            await box.commit(body, lambda: self._known(name) if how < 3 else {""})
            return False

        self._give(self._phase(n), order)

    async def _do_work(self, n: int, where: int, kind: int, background: int) -> None:
        """New work in any conversation, also one whose owner has ended."""
        name = KINDS[kind]
        conversation = self._pick(where, sorted(self.model.conversations))

        async def order(box: Box) -> bool:
            def body(tx: Any) -> None:
                tx.create_task(
                    kind_of(name), "auto", conversation=conversation, background=background == 0
                )

            await box.commit(body, lambda: self._known(name))
            return False

        self._give(self._phase(n), order)

    async def _do_wait(
        self, n: int, on: int, target: int, policy: int, deadline: int, signals: int, caught: int
    ) -> None:
        seconds = (None, None, 0, 5, 100)[deadline]
        awaited: tuple[int, ...] | None = None
        if on == 1:
            awaited = ()
        elif on >= 2:
            chosen = (self._task(target, ended=True), self._task(target + on))
            awaited = tuple(id for id in chosen if id is not None)
        if on == 4:
            # Its own conversations are the ones that are worth waiting for.
            awaited = (self._pick(target, sorted(self.model.conversations)),)
            box = self._phase(n)
            own = [id for id, by in self.model.conversations.items() if box and by == box.task]
            awaited = (own[target % len(own)],) if own else awaited
        if awaited is None and seconds is None:
            signals = 1
        self._give(self._phase(n), self._wait_order(awaited, policy, seconds, signals == 1, caught))

    async def _do_join(self, n: int, policy: int, more: int) -> None:
        """Wait for everything that a task owns."""
        box = self._phase(n)
        if box is None:
            return
        owned = tuple(id for id, task in self.model.tasks.items() if task["owner"] == box.task)
        # Duplicates count once.
        seconds = 40 if more == 0 else None
        given = (*owned, *owned[:1])
        self._give(box, self._wait_order(given, policy, seconds, more == 1, 0))

    def _wait_order(
        self,
        awaited: tuple[int, ...] | None,
        policy: int,
        seconds: float | None,
        signals: bool,
        caught: int,
    ) -> Callable[[Box], Awaitable[bool]]:
        async def order(box: Box) -> bool:
            moment = self._deadline(seconds)

            def expected() -> set[str]:
                if POLICIES[policy] != "all_settled":
                    tasks = self.model.tasks
                    owners = [tasks[id]["owner"] if id in tasks else None for id in awaited or ()]
                    if any(owner != box.task for owner in owners):
                        return {"InvalidArgumentError"}
                if awaited and seconds is None and not signals:
                    return self._cyclic(box.task, awaited)
                return {""}

            def body(tx: Any) -> None:
                tx.wait(
                    then=Next(box.n + 1),
                    on=awaited,
                    policy=POLICIES[policy],
                    deadline=moment,
                    signals=signals,
                )

            refused = await box.commit(body, expected)
            if refused == "WaitCycleError":
                self._count_cycle(box.task, awaited or ())
                if not caught:
                    raise ValueError(refused)
            return refused == ""

        return order

    def _cyclic(self, waiter: int, awaited: tuple[int, ...]) -> set[str]:
        """Whether a wait is refused; what is marked leaves its wait, and may count or not."""
        strict = self.model.cycle(waiter, awaited, marked_too=False)
        loose = self.model.cycle(waiter, awaited, marked_too=True)
        return {"WaitCycleError" if each else "" for each in (strict, loose)}

    def _count_cycle(self, waiter: int, awaited: tuple[int, ...]) -> None:
        explicit = waiter in awaited or self.model.cycle(
            waiter, awaited, marked_too=True, owned=False
        )
        kind = "explicit" if explicit else "by ownership"
        self.model.rare[f"wait cycle refused: {kind}"] += 1

    async def _do_hold_task(self, n: int, target: int, caught: int) -> None:
        """Wait in memory, inside the handler, for the end of another task."""
        id = self._task(target)
        model = self.model
        if id is None:
            return

        async def order(box: Box) -> bool:
            published = self.ledger.at_published(lambda: model.tasks.get(id))
            if published is None:
                return False  # Nobody can have heard of it yet.
            allowed = self._cyclic(box.task, (id,))
            if not live(published) or not live(model.tasks[id]):
                allowed = allowed | {""}
            before = model.held.get(box.task, ())
            model.held[box.task] = (*before, id)
            try:
                outcome = await box.ctx.wait_for_task(id)
            except PidurableError as error:
                got = self.stage.judge(box, allowed, type(error).__name__, error)
                if got == "WaitCycleError":
                    model.rare["wait cycle refused: in memory"] += 1
                    if not caught:
                        raise
                return False
            finally:
                model.held[box.task] = before
            task = self.ledger.at_published(lambda: model.tasks[id])
            if task["outcome"] != outcome.status or live(task):
                self.ledger.wrong(f"held wait for {id}: expected {task}, found {outcome.status}")
            return False

        self._give(self._phase(n), order)

    async def _do_end(self, n: int, how: int, besides: int, other: int) -> None:
        end, beside = ENDS[how], BESIDES[besides]
        target = self._task(other)

        async def order(box: Box) -> bool:
            if end == "raise":
                raise ValueError("told to")
            if end == "oserror":
                raise OSError("told to")
            if end == "nothing":
                return True

            def body(tx: Any) -> None:
                if other % 2:
                    self._beside(tx, box, beside, target)
                tx.complete("done") if end == "complete" else tx.fail("told to")
                if not other % 2:
                    self._beside(tx, box, beside, target)

            def expected() -> set[str]:
                if beside in ("own", "work") and "sim.plain" not in self.ledger.definitions:
                    return {"UnknownDefinitionError"}
                if beside == "signal" and target and not live(self.model.tasks[target]):
                    return {"TaskEndedError"}
                if beside == "abort" and target == box.task:
                    return {"", "AbortRequestedError"}
                return {"OwnerEndedError"} if beside == "own" else {""}

            refused = await box.commit(body, expected)
            if refused == "OwnerEndedError":
                self.model.rare["commit refused below an ended owner"] += 1
            return refused == ""

        self._give(self._phase(n), order)

    def _beside(self, tx: Any, box: Box, what: str, target: int | None) -> None:
        """What a deciding commit writes besides its outcome."""
        if what == "own":
            tx.create_task(kind_of("sim.plain"), "auto")
        elif what == "work":
            made = self._conversation_of(box.task)
            tx.create_task(kind_of("sim.plain"), "auto", conversation=made)
        elif what == "abort" and target is not None:
            self._ask_abort(tx, target)
        elif what == "signal" and target is not None:
            tx.signal(target, "go")

    def _conversation_of(self, task: int) -> int:
        """A conversation that a task owns, else the one that it lives in."""
        owned = [id for id, owner in self.model.conversations.items() if owner == task]
        return owned[0] if owned else int(self.model.tasks[task]["conversation"])

    async def _do_complete_and_abort(self, n: int, m: int) -> None:
        """Complete, and mark the owner of one who waits for this very task."""
        box = self._phase(n)
        if box is None:
            return
        model = self.model
        above = [
            owner
            for id, task in model.tasks.items()
            if task["status"] == "waiting" and box.task in (task["wait"]["on"] or ())
            for owner in model.above(id)
            if live(model.tasks[owner])
        ]
        target = self._pick(m, above or [id for id in (self._task(m),) if id is not None])

        async def order(box: Box) -> bool:
            def body(tx: Any) -> None:
                tx.complete("done")
                if target is not None:
                    self._ask_abort(tx, target)

            both = {"", "AbortRequestedError"} if target == box.task else {""}
            refused = await box.commit(body, lambda: both)
            return refused == ""

        self._give(box, order)

    async def _do_revive(self, n: int, m: int) -> None:
        """New work below a held owner, queued behind the end of the last work that it had."""
        model = self.model
        working = model.working()
        last = [
            (box, owner)
            for _, box in sorted(self.stage.boxes.items())
            if box.idle and box.handler == "phase" and not working[box.task]
            for owner in model.above(box.task)
            if model.tasks[owner]["status"] == "completing" and working[owner] == 1
        ]
        if not last:
            return
        box, owner = last[n % len(last)]
        # Any conversation below the owner will do; most often it is the one of the last work.
        below = [
            id
            for id, by in sorted(model.conversations.items())
            if by is not None and (by == owner or owner in model.above(by))
        ]
        if not below:
            return
        conversation = below[m % len(below)]
        model.rare["work added below a held owner while its last ends"] += 1
        await self._end_and_create(box, conversation)

    async def _do_dependency(self, n: int, m: int) -> None:
        """One task waits for another, which then ends in the commit that aborts the owner."""
        model, boxes = self.model, sorted(self.stage.boxes.items())
        idle = [box for _, box in boxes if box.idle and box.handler == "phase"]
        pairs = [
            (waiter, owner)
            for waiter in idle
            for owner in model.above(waiter.task)
            if live(model.tasks[owner]) and model.tasks[owner]["mark"] is None
        ]
        if not pairs:
            return
        waiter, owner = pairs[n % len(pairs)]
        others = [box for box in idle if box.task not in (waiter.task, owner)]
        if not others:
            return
        other = others[m % len(others)]
        waiter.give(self._wait_order((other.task,), 0, None, False, 1))
        await wait_all_tasks_blocked()

        async def order(box: Box) -> bool:
            def body(tx: Any) -> None:
                tx.complete("done")
                self._ask_abort(tx, owner)

            return await box.commit(body, lambda: {""}) == ""

        if other.idle and self.stage.boxes.get(other.task) is other:
            other.give(order)

    async def _do_held_decider(self, n: int, ended: int) -> None:
        """What decides a join holds its outcome for work in a conversation of its own."""
        model = self.model
        found = [
            (box, task["wait"]["policy"])
            for _, box in sorted(self.stage.boxes.items())
            for task in model.tasks.values()
            if box.idle
            and box.handler == "phase"
            and task["status"] == "waiting"
            and task["wait"]["policy"] != "all_settled"
            and box.task in (task["wait"]["on"] or ())
        ]
        if not found:
            return
        box, policy = found[n % len(found)]
        made: list[int] = []

        async def order(box: Box) -> bool:
            # A conversation may not be made by the commit that ends its owner.
            if await box.commit(lambda tx: made.append(tx.create_conversation()), lambda: {""}):
                return False

            def body(tx: Any) -> None:
                tx.create_task(kind_of("sim.plain"), "auto", conversation=made[0])
                if (policy == "first_success") == (ended == 0):
                    tx.complete("done")
                else:
                    tx.fail("told to")

            return await box.commit(body, lambda: self._known("sim.plain")) == ""

        box.give(order)

    async def _do_busy_again(self, n: int) -> None:
        """A conversation whose idleness is waited for gets new work while its last work ends."""
        model, working = self.model, self.model.working()
        idle = [
            box
            for _, box in sorted(self.stage.boxes.items())
            if box.idle and box.handler == "phase"
        ]
        found = [
            (waiter, box, conversation)
            for box in idle
            for conversation in model.nodes_above(box.task)
            if conversation in model.conversations and working[conversation] == 1
            for waiter in idle
            if conversation not in model.nodes_above(waiter.task)
        ]
        if not found:
            return
        waiter, box, conversation = found[n % len(found)]
        waiter.give(self._wait_order((conversation,), 0, None, False, 1))
        await wait_all_tasks_blocked()
        if box.idle and self.stage.boxes.get(box.task) is box:
            await self._end_and_create(box, conversation)

    async def _do_all_due(self, n: int) -> None:
        """A wait for tasks, a signal and a deadline that are all there when it begins."""
        box = self._phase(n)
        if box is None:
            return
        id = box.task

        def expected() -> set[str]:
            return {"" if live(self.model.tasks[id]) else "TaskEndedError"}

        await self._host(lambda tx: tx.signal(id, "go"), expected)
        await wait_all_tasks_blocked()
        if box.idle and self.stage.boxes.get(id) is box:
            box.give(self._wait_order((), 0, 0, True, 1))

    async def _end_and_create(self, box: Box, conversation: int) -> None:
        """A task completes inside the storage, and a host's new task queues behind it."""
        self.stage.blocking.hold()

        async def order(box: Box) -> bool:
            return await box.commit(lambda tx: tx.complete("done"), lambda: {""}) == ""

        box.give(order)
        await wait_all_tasks_blocked()

        def body(tx: Any) -> None:
            tx.create_task(kind_of("sim.plain"), "auto", conversation=conversation)

        await self._host(body, lambda: self._known("sim.plain"))
        await wait_all_tasks_blocked()
        self.stage.blocking.release()

    async def _do_handover_and_abort(self, n: int, newer: int) -> None:
        """A task moves to new code, and an abort lands behind the commit that hands it over."""
        box = self._phase(n)
        if box is None:
            return
        await self.stage.replace(self.model.tasks[box.task]["kind"], ("same", "newer")[newer])
        await self._do_goto(n)
        self.stage.blocking.hold_after(1)
        await wait_all_tasks_blocked()
        await self._host(lambda tx: self._ask_abort(tx, box.task))
        await wait_all_tasks_blocked()
        self.stage.blocking.release()

    async def _do_crash_again(self, times: int, minutes: int) -> None:
        """Die several times in a row, after so many minutes each: what runs becomes suspect."""
        quiet = SLACK.index(-1)
        one: Program = [("settle", quiet), *[("advance", 3, quiet)] * minutes, ("crash", 0, 7, 0)]
        self._left[:0] = one * (times + 1)

    async def _do_end_handler(self, n: int, how: int) -> None:
        async def order(box: Box) -> bool:
            if how == 0:
                raise ValueError("told to")
            if how == 1:
                raise OSError("told to")
            if how == 2:
                return True
            if how == 3:
                await box.commit(lambda tx: tx.goto(Next(box.n + 1)), lambda: {""})
                return True
            ends: tuple[Callable[[Any], None], ...] = (
                lambda tx: tx.complete("done"),
                lambda tx: tx.fail("told to"),
                lambda tx: tx.end_aborted("undone"),
            )
            await box.commit(ends[how - 4], lambda: {""})
            return True

        self._give(self._handler(n), order)

    async def _do_receive(self, n: int, limit: int) -> None:
        async def order(box: Box) -> bool:
            def body(tx: Any) -> None:
                taken = tx.receive(limit=limit + 1)
                tx.asked.received = len(taken)
                unread = len(self.model.signals.get(box.task, ()))
                # A read sees what is durable; of that it takes the oldest.
                if len(taken) > min(unread, limit + 1):
                    self.ledger.wrong(f"task {box.task} received {taken}, unread are {unread}")

            await box.commit(body, lambda: {""})
            return False

        self._give(self._phase(n), order)

    async def _do_leak(self, n: int) -> None:
        """Keep a context beyond its phase, for a commit that comes too late."""
        box = self._phase(n)
        if box is None:
            return
        self.stage.leaked.append(box)
        await self._do_goto(n)

    async def _do_late(self, n: int) -> None:
        box: Box | None = self._pick(n, self.stage.leaked)
        if box is not None and self.stage.boxes.get(box.task) is not box:
            self._spawn(
                lambda: box.commit(
                    lambda tx: tx.goto(Next(99)),
                    lambda: {"InvocationEndedError", "AbortRequestedError"},
                )
            )


async def _end_aborted(box: Box) -> bool:
    if box.handler == "abort":
        await box.commit(lambda tx: tx.end_aborted("undone"), lambda: {""})
    return True


def play(
    program: Program, *, seed: int = 0, path: Path | None = None, kind: type[Player] = Player
) -> Player:
    """Play a program in a loop of its own, with the schedule of a seed.

    Raises:
        Difference: The product and the model disagree.
    """
    random = trio._core._run._r  # type: ignore[attr-defined]
    state = random.getstate()
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    random.seed(f"{seed}/schedule")
    player = kind(program, seed=seed, path=path)
    try:
        trio.run(player.run, clock=player.clock)
    except BaseException as error:
        error.player = player  # type: ignore[attr-defined]
        raise
    finally:
        random.setstate(state)
    return player


def first_difference(
    program: Program, seed: int, path: Path | None = None, *, kind: type[Player] = Player
) -> Player | str:
    """Play a program; the player of one that agrees, or what it found first."""
    try:
        return play(program, seed=seed, path=path, kind=kind)
    except (Exception, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        known = isinstance(first, Difference)
        return str(first) if known else f"{type(first).__name__}: {first}"


def replay_command(seed: int, program: Program) -> str:
    """What to type to see a program fail again."""
    return (
        f"python tests/simulation/run_programs.py --seed {seed} --program '{json.dumps(program)}'"
    )


__all__ = ["Difference", "Player", "first_difference", "play", "quiet_logs", "replay_command"]
