"""Plays a history on the product and on the model, and says where the two first differ.

Commits are staged in the model when their bodies end, and are published or dropped when the session
says so of them. After that everything is judged from outside: what a document is now and was at
each entry, what a conversation says, what a model would be given.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from pathlib import Path
from random import Random
from typing import Any

import trio
from expected_context import derive, first_difference as context_difference, turns_of
from history_actions import Body, BoomError, HistoryError, answer, result
from history_documents import BY_NAME, FAMILY_KEYS, KINDS, VERSIONS
from history_judge import Judge
from history_model import Address, Model, State
from history_stage import Sitter, Stage
from history_steps import Program
from history_watchers import PAGE, GraphWatcher, Target, View, Watcher, drawn_target
from trio.testing import MockClock

from pidurable.errors import (
    SessionPoisonedError,
    StorageRefusedError,
)
from pidurable.records._messages import TextBlock, UserMessage
from pidurable.testing import Fault

HANG_SECONDS = 10_000.0
"""Of the virtual clock: a history that is not at its end by then hangs."""
LOOKS = 6
PLACES = 3
"""How many contexts are judged after each step; all of them at each opening and at the end."""
WATCHERS_MAX = 12
NEED_A_PLACE = ("brim", "task", "flood", "round", "poke", "churn", "watch")
"""Steps that are about a conversation, and are nothing where there is none."""


class Player:
    """One history."""

    def __init__(self, goal: str, seed: int, path: Path | None = None) -> None:
        self.goal = goal
        self.model = Model()
        self.stage = Stage(seed, path)
        self.sqlite = path is not None
        self.versions = dict.fromkeys(BY_NAME, 1)
        self.rare: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.random = Random(f"{seed}/judge")
        self.judge = Judge(goal, self.model, self.stage, self.counts, self.rare, self.random)
        self.step = -1
        self.ids = 0
        self.homes: dict[int, int] = {}
        """The conversations that tasks live in."""
        self.over = False
        self.watchers: list[Watcher] = []
        self.graphs: list[GraphWatcher] = []
        self.closed = trio.Event()
        """Set when the harness of this opening is closed."""
        self.log: list[tuple[int, State, State]] = []
        self.shared: dict[Any, Any] = {}
        self.foreign: deque[Any] = deque(maxlen=50)
        """The last commits that the model did not expect: mostly the scheduler's."""
        self.broken: Exception | None = None
        """What went wrong while the session told of a commit."""
        self.nursery: trio.Nursery

    # --- playing ---------------------------------------------------------------------------

    async def play(self, program: Program) -> None:
        """Play all steps, over as many openings as it takes, and judge the end cold."""
        left = list(enumerate(program))
        while left:
            await self._open(left)
        self.over = True
        await self._open([])

    async def _open(self, left: list[tuple[int, Any]]) -> None:
        """Hold the store until the steps are at their end, or one of them ends the process."""
        self.watchers, self.log, self.shared = [], [], {}
        self.graphs, self.closed = [], trio.Event()
        async with trio.open_nursery() as self.nursery:
            await self._hold(left)
            self.closed.set()
            # Watches outlive the harness that ends them.
            for watcher in self.watchers:
                if watcher.temper != "fast" and not watcher.done:
                    await watcher.drain()
            await trio.testing.wait_all_tasks_blocked()
            for watcher in (*self.watchers, *self.graphs):
                if not watcher.done:
                    raise HistoryError(f"{watcher.target}: does not end with its harness")
            self.nursery.cancel_scope.cancel()

    async def _hold(self, left: list[tuple[int, Any]]) -> None:
        try:
            async with self.stage.open(self._published, self._reverted):
                self.counts["openings"] += 1
                state = self.model.published
                # What a lost batch drew, nobody has seen.
                self.ids = max((0, *state.places, *state.lines, *state.tasks))
                if self.counts["openings"] > 1:
                    await self.judge.judge_whole("after opening", cold=self.over)
                if self.goal == "watches":
                    await self._watch_graph()
                while left:
                    self.step, step = left.pop(0)
                    self.counts["steps"] += 1
                    if step[0] in NEED_A_PLACE and not self.model.published.places:
                        continue
                    if await getattr(self, f"_{step[0]}")(*step[1:]):
                        break
                    await self._judge_step()
                else:
                    await self.judge.judge_whole("at the end", cold=self.over)
        except SessionPoisonedError:
            if self.stage.harness.session.line.poison is None:
                raise

    def _published(self, tx: Any) -> None:
        try:
            self._publish(tx, tx.seq)
        except Exception as error:
            # The session is not to fail for what is wrong here.
            self.broken = self.broken or error

    def _publish(self, tx: Any, seq: int) -> None:
        moved = self.model.publish(seq)
        if moved is None:
            # The scheduler's own: it may have ended a task.
            self.foreign.append(tx)
            before = self.model.published
            after = before.grow(seq)
        else:
            before, after = moved
            self.counts["commits"] += 1
        for id, live in before.tasks.items():
            if live and self.stage.harness.task(id).outcome is not None:
                for state in (after, *self.model.staged):
                    self._retire_task(state, id)
        if moved is None and after.tasks != before.tasks:
            self.model.published = after
            self.model.past.states[seq] = after
        if self.model.published is after:
            self.log.append((seq, before, after))
            for watcher in self.watchers:
                if watcher.watch is not None:
                    watcher.account()

    def _retire_task(self, after: State, task: int) -> None:
        after.tasks[task] = False
        for address in list(after.docs):
            if BY_NAME[address[0]].scope == "task" and address[1] == task:
                del after.docs[address]
                self.rare["retired with its task"] += 1

    def _reverted(self) -> None:
        self.model.revert()

    def _rise(self, id: int) -> None:
        if id <= self.ids:
            raise HistoryError(f"id {id} was drawn after {self.ids}")
        self.ids = id

    def _body(self, tx: Any, *, by_task: int | None = None) -> Body:
        return Body(
            tx=tx,
            by_task=by_task,
            homes=self.homes,
            model=self.model,
            state=self.model.begin(tx.seq),
            versions=self.versions,
            rare=self.rare,
            last_id=self._rise,
        )

    async def _transact(self, opened: Any, actions: list[Any], *, boom: bool = False) -> None:
        """One commit with these actions, on both sides."""
        async with opened as tx:
            body = self._body(tx)
            for action in actions:
                await body.do(action)
            if boom:
                raise BoomError
            staged = body.finish()
            if staged:
                self.model.stage(body.state)
        self._check_published(tx, body.state, staged=staged)

    def _check_published(self, tx: Any, state: State, *, staged: bool) -> None:
        """Refuse a commit that was acknowledged and not published, and one that is no change."""
        if staged and self.model.published.seq < state.seq:
            self.model.revert()
            raise HistoryError(f"commit {state.seq} is a change, and was stored by nobody")
        if not staged and any(tx is other for other in self.foreign):
            raise HistoryError(f"commit {state.seq} changes nothing, and was published")

    # --- steps -----------------------------------------------------------------------------

    async def _commit(self, actions: list[Any]) -> None:
        await self._transact(self.stage.harness.commit(), actions)

    async def _boom(self, actions: list[Any]) -> None:
        try:
            await self._transact(self.stage.harness.commit(), actions, boom=True)
        except BoomError:
            self.rare["body that raises"] += 1

    async def _cancel(self, moment: int, actions: list[Any]) -> None:
        """A commit that is cancelled: in its body, or as the body ends. Cancelled is not stored."""
        state: State | None = None
        with trio.CancelScope() as scope:
            async with self.stage.harness.commit() as tx:
                body = self._body(tx)
                for action in actions:
                    await body.do(action)
                if moment == 0:
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
                if body.finish():
                    state = body.state
                    self.model.stage(state)
                if moment < 3:
                    scope.cancel()
            if state is not None and self.model.published.seq < state.seq:
                raise HistoryError(f"commit {state.seq} was acknowledged and is not published")
        if state is None:
            self.rare["cancelled in its body"] += 1
        elif self.model.published.seq < state.seq:
            self.model.revert()
            self.rare["cancelled as its body ended"] += 1
        else:
            self.rare["stored, then cancelled"] += 1

    async def _group(self, bodies: list[list[Any]]) -> None:
        await self._together(bodies, "")

    async def _retried(self, actions: list[Any]) -> None:
        self.stage.storage.add(Fault.refuse("apply", times=2))
        await self._commit(actions)
        self.stage.storage.clear()
        self.rare["refused, then stored"] += 1

    async def _refused(self, bodies: list[list[Any]]) -> None:
        await trio.testing.wait_all_tasks_blocked()
        self.stage.storage.add(Fault.refuse("apply", times=10_000))
        await self._together(bodies, "refused")
        self.stage.storage.clear()
        if self.random.random() < 0.3:
            # Long enough for a probe to be stored; until then tasks do not begin again.
            await trio.sleep(5.0)

    async def _lost(self, bodies: list[list[Any]]) -> bool:
        return await self._uncertain(bodies, Fault.lose("apply"), "lost")

    async def _stored(self, bodies: list[list[Any]]) -> bool:
        return await self._uncertain(bodies, Fault.store_then_raise("apply"), "stored and raised")

    async def _uncertain(self, bodies: list[list[Any]], fault: Fault, name: str) -> bool:
        """A batch of which the session cannot know whether it is stored: the end of a process."""
        await trio.testing.wait_all_tasks_blocked()
        self.stage.storage.add(fault)
        await self._together(bodies, name)
        poisoned = self.stage.harness.session.line.poison is not None
        self.stage.storage.clear()
        return poisoned

    async def _together(self, bodies: list[list[Any]], fault: str) -> None:
        """Several commits at once: one holds the line until the others wait for it."""
        applies = self.stage.storage.count("apply")
        commits = self.counts["commits"]
        failures: list[str] = []
        staged: list[State] = []

        async def one(number: int, actions: list[Any]) -> None:
            try:
                async with self.stage.harness.commit() as tx:
                    body = self._body(tx)
                    for action in actions:
                        await body.do(action)
                    if not number:
                        await trio.testing.wait_all_tasks_blocked()
                    changes = body.finish()
                    if changes:
                        self.model.stage(body.state)
                        staged.append(body.state)
                self._check_published(tx, body.state, staged=changes)
            except (StorageRefusedError, SessionPoisonedError) as error:
                if not fault:
                    raise
                failures.append(type(error).__name__)

        async with trio.open_nursery() as nursery:
            for number, actions in enumerate(bodies):
                nursery.start_soon(one, number, actions)
                if self.goal == "context" and self.model.published.places:
                    nursery.start_soon(self._read_meanwhile)
                if self.goal == "rewind" and self.model.published.places:
                    nursery.start_soon(self._look_meanwhile)
                if self.goal == "watches" and self.random.random() < 0.3:
                    numbers = [self.random.randrange(10_000) for _ in range(3)]
                    nursery.start_soon(self._watch_meanwhile, *numbers)
                # Each waits for the line before the next one comes.
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
        published = self.counts["commits"] - commits
        if published > self.stage.storage.count("apply") - applies:
            self.rare["commits that share a batch"] += 1
        if failures:
            self.rare[f"batch {fault}"] += 1
            if fault != "refused":
                # A batch that was stored counts, whatever its callers were told.
                self.model.revert()
                self._adopt(staged)
        if fault == "refused" and staged and not failures:
            raise HistoryError("a batch that the storage refused was acknowledged")

    def _adopt(self, staged: list[State]) -> None:
        """Take over what the storage has stored of commits that were never acknowledged."""
        storage = self.stage.storage.inner
        stored = storage.head().seq
        for state in staged:
            if state.seq <= stored:
                self.model.past.states[state.seq] = state
                self.model.published = state

    async def _crash(self) -> bool:
        self.stage.storage.freeze()
        self.rare["crash"] += 1
        session = self.stage.harness.session
        session.line.set_poison(SessionPoisonedError("history", "killed by the player"))
        return True

    async def _reopen(self) -> bool:
        self.rare["reopened"] += 1
        if self.sqlite:
            self.rare["reopened from a file"] += 1
        return True

    async def _upgrade(self, kind: int, *_: int) -> None:
        name = KINDS[kind % len(KINDS)].name
        watched = self._watched(kind)
        if watched is not None and kind % 3:
            name = watched[0]
        self.versions[name] = min(VERSIONS, self.versions[name] + 1)

    async def _task(self, conversation: int, *_: int) -> None:
        place = self._place(conversation)
        if self.model.published.places[place].owner is not None:
            # Below a task that may have ended nothing is begun.
            return
        async with self.stage.harness.commit() as tx:
            state = self.model.begin(tx.seq)
            made = int(tx.create_task(Sitter, "x", conversation=place))
            self._rise(made)
            state.tasks[made] = True
            self.homes[made] = place
            self.model.stage(state)

    def _live(self, number: int) -> int | None:
        live = [id for id, is_live in self.model.published.tasks.items() if is_live]
        return live[number % len(live)] if live else None

    async def _desk(self, task: int, actions: list[Any]) -> None:
        """A commit inside of a task: mostly to its own documents."""
        await self._ordered(task, actions, end=False)

    async def _ordered(self, number: int, actions: list[Any], *, end: bool) -> None:
        found = self._live(number)
        if found is None:
            return
        seat = await self.stage.seat(found)
        done = trio.Event()
        raised: list[BaseException] = []

        async def order(ctx: Any) -> bool:
            try:
                async with ctx.commit() as tx:
                    body = self._body(tx, by_task=found)
                    for action in actions:
                        await body.do(action)
                    desk = BY_NAME["histories.desk"]
                    for key in FAMILY_KEYS:
                        if self.random.random() < 0.7 and not end:
                            address: Address = (desk.name, found, key)
                            version = self.versions[desk.name]
                            how = self.random.randrange(6)
                            await body.write(desk, address, version, how, self.random)
                    if end:
                        tx.complete("done")
                    if body.finish() or end:
                        self.model.stage(body.state)
            except Exception as error:
                raised.append(error)
                raise
            finally:
                done.set()
            return end

        seat.give(order)
        await done.wait()
        if raised:
            raise raised[0]
        await trio.testing.wait_all_tasks_blocked()

    async def _end(self, number: int, *_: int) -> None:
        await self._ordered(number, [], end=True)

    async def _abort(self, number: int, *_: int) -> None:
        found = self._live(number)
        if found is not None:
            await self.stage.harness.abort_task(found)
            await self.stage.harness.wait_for_task(found)  # type: ignore[arg-type]
            self.rare["aborted task"] += 1

    async def _round(self, conversation: int, seed: int, *_: int) -> None:
        """A question, an answer with calls, and some of the results, as an agent leaves them."""
        random = Random(seed)
        place = self._place(conversation)

        async def entry(*messages: Any) -> int:
            made = 0
            async with self.stage.harness.commit() as tx:
                body = self._body(tx)
                made = body.append(place, 0, random, messages=messages)
                body.finish()
                self.model.stage(body.state)
            return made

        text = (TextBlock(text=f"question {seed}"),)
        await entry(UserMessage(blocks=text, at_us=1))
        calls = [random.choice("abc") for _ in range(random.randint(1, 3))]
        asked = await entry(answer((), calls))
        order = list(range(len(calls)))
        random.shuffle(order)
        for index in order[: random.randint(0, len(order))]:
            if random.random() < 0.2:
                await entry(UserMessage(blocks=text, at_us=1))
                self.rare["something said inside a round"] += 1
            await entry(result((asked, index), text))

    async def _poke(self, first: int, second: int, seed: int) -> None:
        """One commit that changes a few of the documents that are watched, or ends one."""
        random = Random(seed)
        async with self.stage.harness.commit() as tx:
            body = self._body(tx)
            for number in (first, second)[: random.randint(1, 2)]:
                address = self._watched(number)
                if address is None:
                    continue
                if address in body.state.docs and random.random() < 0.08:
                    body.retire(address)
                    continue
                kind = BY_NAME[address[0]]
                how = random.randrange(6)
                await body.write(kind, address, self.versions[kind.name], how, random)
            staged = body.finish()
            if staged:
                self.model.stage(body.state)
        self._check_published(tx, body.state, staged=staged)

    def _watched(self, number: int) -> Address | None:
        """The address of a document that is watched and may be written."""
        tasks = self.model.published.tasks
        found = [
            watcher.target.address
            for watcher in self.watchers
            if isinstance(watcher.target, Target)
            if BY_NAME[watcher.target.address[0]].scope != "task"
            or tasks.get(watcher.target.address[1])
        ]
        return found[number % len(found)] if found else None

    async def _flood(self, number: int, many: int, each: int) -> None:
        """Many entries in a conversation that is watched, some of them per commit."""
        places = [w.target.place for w in self.watchers if isinstance(w.target, View)]
        if not places:
            return
        place, left = places[number % len(places)], many
        while left > 0:
            async with self.stage.harness.commit() as tx:
                body = self._body(tx)
                for _ in range(min(each, left)):
                    head = 10 if left == many // 2 else 0
                    body.append(place, 8 if left % 3 else 0, Random(left), head=head)
                left -= each
                body.finish()
                self.model.stage(body.state)
            self._check_published(tx, body.state, staged=True)
        if many > PAGE:
            self.rare["view of more than a page"] += 1
            if each > PAGE:
                self.rare["more than a page in one commit"] += 1

    async def _brim(self, number: int, beyond: int, seed: int) -> None:
        """Exactly as many changes as a watcher may hold, or one more; then some are taken."""
        writable = [
            watcher
            for watcher in self.watchers
            if watcher.temper == "slow" and not watcher.done and watcher.room
            if isinstance(watcher.target, Target)
            and BY_NAME[watcher.target.address[0]].scope != "task"
            if watcher.target.version >= self.versions[watcher.target.address[0]]
        ]
        if not writable:
            return
        watcher = writable[number % len(writable)]
        assert isinstance(watcher.target, Target)
        await self._change_often(watcher.target.address, watcher.room + beyond % 2)
        self.rare["a hundred frames and one more" if beyond % 2 else "a hundred frames"] += 1
        await watcher.take(seed % 5 + 1)

    async def _change_often(self, address: Address, many: int) -> None:
        """So many commits, each of which changes a document by a little."""
        kind = BY_NAME[address[0]]
        for number in range(many):
            async with self.stage.harness.commit() as tx:
                body = self._body(tx)
                how = 2 if number == 0 else 4
                await body.write(kind, address, self.versions[kind.name], how, Random(number))
                staged = body.finish()
                if staged:
                    self.model.stage(body.state)
            self._check_published(tx, body.state, staged=staged)

    async def _churn(self, kind: int, owner: int, key: int, many: int) -> None:
        """Many small changes of one document, one commit each; of one that is watched if any is."""
        address = self._watched(owner)
        if address is None:
            found = KINDS[kind % len(KINDS)]
            async with self.stage.harness.commit() as tx:
                address = self._body(tx).address(found, owner, key)
        if address is None:
            return
        await self._change_often(address, many)
        if many > 256:
            self.rare["more changes than deltas stand on a base"] += 1

    # --- watching --------------------------------------------------------------------------

    async def _watch(self, first: int, second: int, third: int) -> None:
        if len(self.watchers) >= WATCHERS_MAX:
            return
        target = drawn_target(self.model.published, (first, second), self.versions)
        for number in range(third % 3 + 1):
            temper = ("fast", "slow", "stalled", "stalled")[(third // 3 + number) % 4]
            watcher = Watcher(
                target=target,
                temper=temper,
                counts=self.counts,
                rare=self.rare,
                shared=self.shared,
                state_at=self._state_at,
                poisoned=lambda: self.stage.harness.session.line.poison is not None,
                log=self.log,
            )
            refused = target.refused(self.model.published)
            await self.nursery.start(watcher.run, self.stage.harness)
            if watcher.end == "refused":
                if not refused and not target.refused(self.model.published):
                    raise HistoryError(f"{target} was refused as too new")
                self.rare["watch refused: too new"] += 1
                return
            self.watchers.append(watcher)

    async def _watch_meanwhile(self, *numbers: int) -> None:
        """A watch that is opened while commits are on their way."""
        try:
            await self._watch(*numbers)
        except SessionPoisonedError:
            return
        self.rare["watch opened among commits"] += 1

    async def _watch_graph(self) -> None:
        """Two watches of the task graph for as long as the store is held."""
        for fast in (True, False):
            watcher = GraphWatcher(
                fast=fast, counts=self.counts, live=self._live_ids, over=self.closed
            )
            self.graphs.append(watcher)
            await self.nursery.start(watcher.run, self.stage.harness)

    def _live_ids(self) -> set[str]:
        return {str(id) for id, live in self.model.published.tasks.items() if live}

    def _state_at(self, seq: int) -> State:
        """The state that the newest commit up to a number has left."""
        for number, _, after in reversed(self.log):
            if number <= seq:
                return after
        return self.log[0][1] if self.log else self.model.published

    def _watcher(self, number: int, *tempers: str) -> Watcher | None:
        found = [each for each in self.watchers if each.temper in tempers and not each.done]
        return found[number % len(found)] if found else None

    async def _take(self, number: int, many: int, *_: int) -> None:
        watcher = self._watcher(number, "slow")
        if watcher is not None:
            await watcher.take(many % 8 + 1)

    async def _leave(self, number: int, *_: int) -> None:
        watcher = self._watcher(number, "fast", "slow", "stalled")
        if watcher is not None:
            watcher.leave()
            await trio.testing.wait_all_tasks_blocked()
            self.watchers.remove(watcher)
            self.rare[f"left: {watcher.temper}"] += 1

    def _place(self, number: int) -> int:
        places = list(self.model.published.places)
        return places[number % len(places)]

    # --- judging ---------------------------------------------------------------------------

    async def _look(self, *_: int) -> None:
        await self.judge.look()

    async def _judge_step(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.goal == "context":
            places = list(self.model.published.places)
            some = self.random.sample(places, min(PLACES, len(places)))
            await self.judge.judge_contexts(some, cutoffs=1)

    async def _look_meanwhile(self) -> None:
        """The past is what it was, also while commits are on their way."""
        try:
            await self.judge.look_back()
        except SessionPoisonedError:
            return
        self.rare["past read among commits"] += 1

    async def _read_meanwhile(self) -> None:
        """A context that is read while commits are on their way is that of one moment."""
        first, state = len(self.log), self.model.published
        place = self.random.choice(list(state.places))
        try:
            found = turns_of(await self.judge.context(place, None))
        except SessionPoisonedError:
            return
        moments = [state, *(after for _, _, after in self.log[first:])]
        told = [context_difference(derive(each.history(place)), found) for each in moments]
        if all(told):
            raise HistoryError(f"the context of conversation {place}, read meanwhile: {told[-1]}")
        self.rare["context read among commits"] += 1


def first_difference(
    goal: str, program: Program, seed: int, path: Path | None = None
) -> Player | str:
    """The player of a history that shows no difference, or where the first one is.

    The seed is that of the schedule too, so that the same history is played the same way again.
    """
    player = Player(goal, seed, path)

    async def main() -> None:
        with trio.fail_after(HANG_SECONDS):
            await player.play(program)

    schedule = trio._core._run._r  # type: ignore[attr-defined]
    before = schedule.getstate()
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    schedule.seed(f"{seed}/schedule")
    try:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        step = program[player.step] if 0 <= player.step < len(program) else "the end"
        return f"step {player.step} {json.dumps(step)}: {_told(error)}"
    finally:
        schedule.setstate(before)
    return player


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None and not isinstance(error, HistoryError):
        place = f" (at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"


def quiet_logs() -> None:
    """Refusals and deaths on purpose are no news."""
    logging.getLogger("pidurable").setLevel(logging.CRITICAL)
