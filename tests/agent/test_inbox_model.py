"""Any series of inputs against a small model of the table of boundaries, entry by entry.

The model knows nothing of the product: a queue, a transcript and a clock. Every stage (an answer
that streams, a round with one call) takes the same time, which no moment of the host is a multiple
of, so both always know what comes first.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from agent_world import World, text_of, verify
from hypothesis import HealthCheck, example, given, settings, strategies as st
from trio.testing import MockClock

from pidurable.agent import _boundaries
from pidurable.agent._script import ScriptedCall, ScriptedError, Step
from pidurable.errors import ConversationBusyError, NothingToContinueError, PidurableError
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness
from pidurable.records._limits import Settings
from pidurable.records._messages import (
    AssistantMessage,
    TextBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.registry import ToolCall, tool

STAGE_SECONDS = 0.7137

# --- the model ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Item:
    """What was handed in."""

    name: str
    mode: str
    status: str = "queued"
    run: int = 0


@attrs.define(eq=False)
class Model:
    """The table of 'Input, runs and boundaries', word for word."""

    plan: list[str]
    """What becomes of each request: "answer", "round" or "fail"; the last one repeats."""
    steers: str
    follow_ups: str
    now: float = 0.0
    due: float | None = None
    stage: str = "idle"
    asked: int = 0
    run: int = 0
    queue: list[Item] = attrs.Factory(list)
    items: dict[str, Item] = attrs.Factory(dict)
    entries: list[str] = attrs.Factory(list)
    asks: bool = False
    """Whether the context ends in something to answer."""

    # --- what the host does ------------------------------------------------------------------

    def submit(self, name: str, mode: str) -> bool:
        if mode == "reject" and self.stage != "idle":
            return False
        item = self.items[name] = Item(name, mode)
        if self.stage != "idle":
            self.queue.append(item)
            return True
        taken, self.queue = [*self.queue, item], []
        self.start(taken)
        return True

    def write(self, name: str, mode: str) -> None:
        item = self.items[name] = Item(name, mode)
        if mode == "unseen" or self.stage == "idle":
            self.place(item)
        else:
            self.queue.append(item)

    def withdraw(self, name: str) -> bool:
        item = self.items.get(name)
        if item is None or item.status not in ("queued", "withdrawn"):
            return False
        item.status = "withdrawn"
        self.queue = [each for each in self.queue if each is not item]
        return True

    def abort(self) -> list[str]:
        taken = [each for each in self.queue if each.mode in ("steer", "follow_up")]
        self.queue = [each for each in self.queue if each not in taken]
        for item in taken:
            item.status = "withdrawn"
        if self.stage == "round":
            self.entries.append("result")
            self.asks = True
        if self.stage != "idle":
            self.end("aborted")
        return [each.name for each in taken]

    def continue_run(self, name: str) -> str:
        if self.stage != "idle":
            return "busy"
        if not self.asks:
            return "terminal"
        self.items[name] = Item(name, "continue", status="placed", run=self.run + 1)
        self.start([])
        return "started"

    def killed(self) -> None:
        if self.stage == "streaming":
            self.request()
        elif self.stage == "round":
            self.due = self.now + STAGE_SECONDS

    # --- what follows ------------------------------------------------------------------------

    def until(self, now: float) -> None:
        while self.due is not None and self.due < now:
            self.now, self.due = self.due, None
            if self.stage == "streaming":
                self.answered()
            else:
                self.entries.append("result")
                self.asks = True
                self.after_round()
        self.now = now

    def start(self, items: list[Item]) -> None:
        self.run += 1
        for item in items:
            self.place(item)
        self.request()

    def request(self) -> None:
        kind = self.outcome()
        self.asked += 1
        self.stage = "streaming"
        if not self.asks:
            self.end("reset", asked=False)
        elif kind == "fail":
            self.end("model_error")
        else:
            self.due = self.now + STAGE_SECONDS

    def outcome(self) -> str:
        return self.plan[min(self.asked, len(self.plan) - 1)]

    def answered(self) -> None:
        kind = self.plan[min(self.asked - 1, len(self.plan) - 1)]
        self.entries.append("answer")
        self.asks = kind == "round"
        if kind == "round":
            self.stage = "round"
            self.due = self.now + STAGE_SECONDS
        else:
            self.end("done")

    def after_round(self) -> None:
        reset = self.place_writes()
        if reset:
            self.end("reset")
            return
        steers = [each for each in self.queue if each.mode == "steer"]
        self.take(steers if self.steers == "all" else steers[:1])
        self.request()

    def end(self, status: str, *, asked: bool = True) -> None:
        if not asked:
            self.asked -= 1
        for item in self.items.values():
            if item.status == "placed" and item.run == self.run:
                item.status = status
        self.stage, self.due = "idle", None
        self.place_writes()
        if status != "done":
            return
        steers = [each for each in self.queue if each.mode == "steer"]
        if steers:
            taken = steers if self.steers == "all" else steers[:1]
        else:
            taken = self.queue[:1] if self.follow_ups == "one" else list(self.queue)
        if taken:
            self.queue = [each for each in self.queue if each not in taken]
            self.start(taken)

    def take(self, items: list[Item]) -> None:
        self.queue = [each for each in self.queue if each not in items]
        for item in items:
            self.place(item)

    def place_writes(self) -> bool:
        writes = [each for each in self.queue if each.mode in ("seen", "reset")]
        self.take(writes)
        return any(each.mode == "reset" for each in writes)

    def place(self, item: Item) -> None:
        self.entries.append(item.name)
        if item.mode in ("seen", "reset", "unseen"):
            item.status = "done"
        else:
            item.status, item.run = "placed", self.run
        if item.mode != "unseen":
            self.asks = item.mode != "reset"


# --- the product, driven in the same way --------------------------------------------------------


def world_of(plan: list[str], limits: Settings) -> World:
    """A world whose requests end as planned, and whose one call takes a stage."""

    def planned(kind: str) -> Any:
        def is_next(_: Any) -> bool:
            return plan[min(len(world.model.requests), len(plan)) - 1] == kind

        return is_next

    call = (ScriptedCall(name="stage"),)
    world = World(
        Step(when=planned("fail"), error=ScriptedError(kind="auth", detail="no")),
        Step(when=planned("round"), calls=call, delay=STAGE_SECONDS / 3),
        Step(when=planned("answer"), text="t", delay=STAGE_SECONDS / 2),
        settings=limits,
    )

    @tool(name="stage", replay="safe")
    async def stage(call: ToolCall) -> str:
        """Take a stage."""
        await trio.sleep(STAGE_SECONDS)
        return "through"

    world.install(stage)
    return world


async def entries_of(root: Conversation) -> list[str]:
    """The transcript in the words of the model."""
    found: list[str] = []
    for each in await root.history(limit=10_000):
        if each.kind in ("test.seen", "test.unseen", "pi.reset"):
            found.append(str(each.data))
        for message in each.messages:
            if isinstance(message, UserMessage) and each.kind == "pi.user":
                found.append(text_of(message))
            elif isinstance(message, ToolResultMessage):
                found.append("result")
            elif isinstance(message, AssistantMessage) and message.status == "complete":
                found.append("answer")
    return found


class Host:
    """Does to a conversation and to the model what it is told, and compares them."""

    def __init__(self, plan: list[str], steers: str, follow_ups: str) -> None:
        self.model = Model(plan, steers, follow_ups)
        limits = Settings(steers=steers, follow_ups=follow_ups, turns_max=1000)
        self.world = world_of(plan, limits)
        self.began = trio.current_time()

    async def live(self, actions: list[tuple[str, Any]]) -> None:
        """One harness, until it is killed."""
        try:
            async with self.world.open() as harness:
                harness.start()
                root = await harness.root()
                while actions:
                    await self.compare(root)
                    self.model.until(trio.current_time() - self.began)
                    name, (action, value) = str(len(actions)), actions.pop(0)
                    if action == "kill":
                        self.world.storage.freeze()
                        self.model.killed()
                        return
                    await self.act(harness, root, name, action, value)
                await self.finish(harness, root)
        except* PidurableError:
            assert self.world.storage.frozen

    async def act(
        self, harness: Harness, root: Conversation, name: str, action: str, value: Any
    ) -> None:
        model = self.model
        said = UserMessage(blocks=(TextBlock(text=name),), at_us=0)
        if action == "submit":
            try:
                await root.submit(name, when_busy=value, request_id=name)
            except ConversationBusyError:
                assert not model.submit(name, value)
            else:
                assert model.submit(name, value)
        elif action == "write":
            model.write(name, value)
            if value == "reset":
                await root.write(name, kind="pi.reset", head=0, request_id=name)
            else:
                shown = [said] if value == "seen" else []
                await root.write(name, kind=f"test.{value}", messages=shown, request_id=name)
        elif action == "withdraw":
            names = list(model.items)
            if names:
                chosen = names[value % len(names)]
                row = harness.session.storage.submission_by_request(root.id, chosen)
                assert row is not None
                taken = await harness.submission(row.id).withdraw()
                assert (taken is not None) == model.withdraw(chosen)
        elif action == "abort":
            taken_back = [each.request_id for each in await root.abort()]
            assert taken_back == model.abort()
        elif action == "continue":
            try:
                await root.continue_run(request_id=name)
            except ConversationBusyError:
                assert model.continue_run(name) == "busy"
            except NothingToContinueError:
                assert model.continue_run(name) == "terminal"
            else:
                assert model.continue_run(name) == "started"
        else:
            await trio.sleep_until(trio.current_time() + value)
            model.until(trio.current_time() - self.began)

    async def compare(self, root: Conversation) -> None:
        # What follows from the last action is committed, and takes no time.
        await trio.testing.wait_all_tasks_blocked(0.0001)
        assert await entries_of(root) == self.model.entries
        queued = [each.name for each in self.model.queue]
        records = [self.record(root, item["submission"]) for item in root.inbox()]
        assert [each.request_id for each in records] == queued
        assert (root.live()["run"] is None) == (self.model.stage == "idle")

    def record(self, root: Conversation, id: int) -> Any:
        return root._harness.session.submission(id)

    async def finish(self, harness: Harness, root: Conversation) -> None:
        """Let all come to rest, and compare how everything ended."""
        await trio.sleep(1_000)
        self.model.until(trio.current_time() - self.began)
        await self.compare(root)
        await verify(self.world, harness)
        for name, item in self.model.items.items():
            row = harness.session.storage.submission_by_request(root.id, name)
            assert row is not None
            ended = row.status if row.status != "unanswered" else row.reason
            assert (name, ended) == (name, item.status)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(["follow_up", "steer", "reject"])),
        st.tuples(st.just("write"), st.sampled_from(["seen", "unseen", "reset"])),
        st.tuples(st.just("withdraw"), st.integers(0, 5)),
        st.tuples(st.just("sleep"), st.sampled_from([0.3, 1.0, 2.0])),
        st.tuples(st.sampled_from(["abort", "continue", "kill"]), st.none()),
    ),
    max_size=14,
)
PLANS = st.lists(st.sampled_from(["answer", "round", "round", "fail"]), max_size=6).map(
    # The last one ends every run, so that all comes to rest.
    lambda plan: [*plan, "answer"]
)
CHOICES = st.sampled_from(["one", "all"])


async def play(
    plan: list[str], steers: str, follow_ups: str, actions: list[tuple[str, Any]]
) -> None:
    """Play a program to its end, over as many harnesses as it takes."""
    host = Host(plan, steers, follow_ups)
    left = list(actions)
    while True:
        kills = sum(action == "kill" for action, _ in left)
        await host.live(left)
        if not kills:
            return


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(plan=PLANS, steers=CHOICES, follow_ups=CHOICES, actions=ACTIONS)
@example(
    plan=["round", "round", "answer"],
    steers="one",
    follow_ups="all",
    actions=[
        ("submit", "follow_up"),
        ("sleep", 1.0),
        ("submit", "steer"),
        ("submit", "follow_up"),
        ("submit", "steer"),
        ("write", "seen"),
        ("kill", None),
        ("sleep", 1.0),
        ("submit", "follow_up"),
    ],
)
def test_every_input_is_placed_where_the_table_says(
    plan: list[str], steers: str, follow_ups: str, actions: list[tuple[str, Any]]
) -> None:
    """Steers, follow-ups, writes, resets, withdrawals, aborts and kills, in any order."""
    # C029, C030, C031, C032
    trio.run(play, plan, steers, follow_ups, actions, clock=MockClock(autojump_threshold=0))


def _misplaced(items: Any, mode: str, most: str) -> list[Any]:
    return [item for item in items if item["mode"] == mode][-1:]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_of_mode", _misplaced),
        ("_place_writes", lambda tx, conversation_id, items: (list(items), False)),
    ],
)
async def test_the_model_notices_what_is_misplaced(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    """With the newest steer first, or writes that are never placed, the comparison fails."""
    monkeypatch.setattr(_boundaries, name, wrong)
    actions: list[tuple[str, Any]] = [
        ("submit", "follow_up"),
        ("sleep", 1.0),
        ("submit", "steer"),
        ("submit", "steer"),
        ("write", "seen"),
        ("sleep", 2.0),
    ]
    with pytest.raises((AssertionError, ExceptionGroup)):
        await play(["round", "answer"], "all", "one", actions)
