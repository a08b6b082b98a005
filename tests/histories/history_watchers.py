"""Watchers of a history, each beside what the model expects it to be given.

What a watcher is to be given is worked out from the published states alone: one frame for each
commit that changed what it watches, at most 100 of them kept, one whole value in their place when
there would be more, None at the retirement. Every frame is held against that, against the patch
applied by code of our own, and against the object that other watchers of the same thing were given.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import attrs
import trio
from history_documents import AGENT, BY_NAME, VERSIONS, plain
from history_model import Address, Line, State
from history_values import difference, patched_in_place

from pidurable.errors import DocumentTooNewError, SessionPoisonedError
from pidurable.patch import lower
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)

LOWERED_EVERY = 5
"""Every so many frames the patch is also tried as plain RFC 6902."""
FRAMES_MAX = 100
"""01-kernel 4: at most 100 undelivered frames are kept."""


class WatchError(AssertionError):
    """A watcher was given something else than the model expects."""


@attrs.frozen
class Target:
    """A document as the code of one version sees it, or the view of a conversation."""

    address: Address
    version: int

    def __str__(self) -> str:
        name, owner, key = self.address
        return f"the watch of {name} of {owner} {key!r} (v{self.version})"

    def opened(self, harness: Any) -> Any:
        name, owner, key = self.address
        return getattr(harness, "watch", harness.session.watch)(
            BY_NAME[name].classes[self.version - 1], owner, key=key
        )

    def value(self, state: State) -> Any:
        return state.shown(self.address, self.version)

    def seen(self, value: Any) -> Any:
        return value

    def checked_every(self, frame: Any) -> int:
        return 1

    def says_less(self, before: State, after: State) -> bool:
        """Where nothing is made anew or migrated, the patch is of what changed."""
        old, new = before.docs.get(self.address), after.docs.get(self.address)
        return old is not None and new is not None and old.version == new.version == self.version

    def refused(self, state: State) -> bool:
        return state.too_new(self.address, self.version)

    def change(self, before: State, after: State) -> str:
        """What a commit is to this watch: "" nothing, a "frame", "retired", or "too new"."""
        old, new = before.docs.get(self.address), after.docs.get(self.address)
        if old is new:
            return ""
        if old is not None and (new is None or new.life != old.life):
            return "retired"
        assert new is not None
        return "too new" if new.version > self.version else "frame"


@attrs.frozen
class View:
    """The view of a conversation, as much of it as the model knows."""

    place: int

    def __str__(self) -> str:
        return f"the view of conversation {self.place}"

    @property
    def address(self) -> Address:
        return (AGENT.name, self.place, "")

    def opened(self, harness: Any) -> Any:
        return harness.conversation(self.place).watch()

    def value(self, state: State) -> Any:
        place, history = state.places[self.place], state.history(self.place)
        agent = state.docs.get(self.address)
        heads = [line for line in history if line.head is not None]
        return {
            "conversation": [place.id, place.parent, place.parent_entry],
            "entries": [_line_json(line) for line in history[-PAGE:]],
            "earlier": len(history) > PAGE,
            "head": {"entry": heads[-1].id, "start": heads[-1].head} if heads else None,
            "documents": {
                "pi.agent": None if agent is None else agent.value,
                "pi.live": None,
                "pi.inbox": None,
                "pi.usage": None,
            },
        }

    def seen(self, value: Any) -> Any:
        record = value["conversation"]
        entries = [dict(entry) for entry in value["history"]["entries"]]
        for entry in entries:
            del entry["at_us"]
            entry["messages"] = [_message_seen(message) for message in entry["messages"]]
            entry["edits"] = [
                [edit["target"], None if edit["messages"] is None else len(edit["messages"])]
                for edit in entry["edits"]
            ]
        return {
            "conversation": [record["id"], record["parent"], record["parent_entry"]],
            "entries": entries,
            "earlier": value["history"]["earlier"],
            "head": value["head"],
            "documents": value["documents"],
        }

    def checked_every(self, frame: Any) -> int:
        """Looking at a whole page of entries costs what a page costs."""
        return 1 if len(frame.value.history) < 20 else 30

    def says_less(self, before: State, after: State) -> bool:
        return True

    def refused(self, state: State) -> bool:
        return False

    def change(self, before: State, after: State) -> str:
        same = before.places[self.place] is after.places[self.place] and before.docs.get(
            self.address
        ) is after.docs.get(self.address)
        return "" if same else "frame"


PAGE = 200
"""Limits: `view_page_entries`."""


def _line_json(line: Line) -> Any:
    return {
        "id": line.id,
        "conversation_id": line.conversation,
        "seq": line.seq,
        "kind": "histories.line",
        "messages": [_message_json(message) for message in line.messages],
        "data": line.data,
        "head": line.head,
        "edits": [
            [target, None if messages is None else len(messages)] for target, messages in line.edits
        ],
        "by_task": line.by_task,
    }


def _message_json(message: Any) -> list[Any]:
    """Who speaks, and what in short."""
    if isinstance(message, SystemMessage):
        return ["system", message.sections]
    role = {UserMessage: "user", AssistantMessage: "assistant", ToolResultMessage: "tool"}
    blocks = [_block_json(block) for block in message.blocks]
    call = list(message.call) if isinstance(message, ToolResultMessage) else None
    return [role[type(message)], blocks, call]


def _block_json(block: Any) -> list[Any]:
    if isinstance(block, ToolCallBlock):
        return ["tool_call", block.name]
    if isinstance(block, ImageBlock):
        return ["image", block.blob]
    return ["text" if isinstance(block, TextBlock) else "thinking", block.text]


SAID = {"text": "text", "thinking": "text", "tool_call": "name", "image": "blob"}
"""By the type of a block, the field that tells it from others."""


def _message_seen(message: Any) -> list[Any]:
    if message["role"] == "system":
        return ["system", message["sections"]]
    blocks = [[block["type"], block[SAID[block["type"]]]] for block in message["blocks"]]
    return [message["role"], blocks, message.get("call")]


@attrs.frozen
class Due:
    """A frame that is to be delivered."""

    seq: int
    state: State | None
    """What the commit left; None for a retirement."""
    whole: bool = False
    exact: bool = True
    """Whether its patch may not replace everything: what changed can be said in less."""


@attrs.define(eq=False)
class Watcher:
    """One watch and its consumer."""

    target: Target | View
    temper: str
    """fast: takes at once, in a task of its own; slow: when the history says so; stalled: last."""
    counts: Counter[str]
    rare: Counter[str]
    shared: dict[tuple[Target | View, int], Any]
    """The frame of each commit and target, whoever was given it first."""
    state_at: Callable[[int], State]
    poisoned: Callable[[], bool]
    log: list[tuple[int, State, State]]
    """Every commit published in this opening: its number, the states before and after it."""
    watch: Any = None
    value: Any = None
    end: str = ""
    """Why no more frames are due: retired, too new, left; refused at its beginning."""
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    told: str = ""
    """The first difference."""
    done: bool = False
    _due: deque[Due] = attrs.Factory(deque)
    _since: int = 0
    """Frames whose values were not looked at, since the last one whose value was."""
    _unchecked: tuple[Any, Due] | None = None
    _seen: int = 0
    """How many commits of the log are accounted for."""
    _last: int = 0
    _kept: list[tuple[Any, Any]] = attrs.Factory(list)
    _left: trio.Event = attrs.Factory(trio.Event)

    # --- what is due -------------------------------------------------------------------------

    def account(self) -> None:
        """Work out what the commits since the last look are to this watch."""
        while self._seen < len(self.log):
            seq, before, after = self.log[self._seen]
            self._seen += 1
            if seq <= self._last or self.end:
                continue
            change = self.target.change(before, after)
            if not change:
                continue
            if change == "too new":
                self.end = change
                self.rare["watch ended: too new"] += 1
                continue
            if change == "retired":
                self.end = change
                self.counts["retirements"] += 1
            state = None if change == "retired" else after
            due = Due(seq, state, exact=bool(state) and self.target.says_less(before, after))
            if self._due and self._due[0].whole:
                self.counts["folds"] += 1
                if change == "retired":
                    self.rare["retired while folding"] += 1
                self._due[0] = Due(seq, state, whole=True)
            elif len(self._due) == FRAMES_MAX:
                self.counts["overflows"] += 1
                self._due.clear()
                self._due.append(Due(seq, state, whole=True))
            else:
                self._due.append(due)

    @property
    def room(self) -> int:
        """How many more frames may be kept for it; 0 also while it has fallen behind."""
        self.account()
        behind = bool(self._due) and self._due[0].whole
        return 0 if behind or self.end else FRAMES_MAX - len(self._due)

    # --- consuming ---------------------------------------------------------------------------

    async def run(
        self, harness: Any, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Hold the watch open until it is left; a fast one takes its frames here."""
        try:
            with self.scope:
                async with self.target.opened(harness) as watch:
                    self._begin(watch)
                    task_status.started()
                    if self.temper == "fast":
                        await self.drain()
                    await self._left.wait()
        except DocumentTooNewError:
            if self.watch is not None:
                raise
            self.end = "refused"
            task_status.started()

    def _begin(self, watch: Any) -> None:
        self.watch, self._last = watch, watch.seq
        then = self.state_at(watch.seq)
        self.value = watch.json()
        self.counts["watches"] += 1
        told = difference(self.target.value(then), self.target.seen(self.value))
        if told:
            raise WatchError(f"{self.target} begins at {watch.seq} with another value: {told}")
        if self.target.refused(then):
            raise WatchError(f"{self.target}: code that is too old was given a value")
        self.account()

    async def take(self, many: int) -> None:
        """Take some of the frames that are due, which must be there, and nothing else."""
        for _ in range(many):
            self.account()
            if not self._due:
                await self._take_nothing()
                return
            with trio.move_on_after(1):
                self._judge(await self.watch.__anext__())
                continue
            raise WatchError(f"{self.target}: {len(self._due)} frames are due, and none comes")

    async def _take_nothing(self) -> None:
        if self.end:
            return
        with trio.move_on_after(1):
            try:
                frame = await self.watch.__anext__()
            except StopAsyncIteration:
                raise WatchError(f"{self.target}: ended, and nothing has ended it") from None
            raise WatchError(f"{self.target}: frame {frame.seq} comes, and none is due")
        self.rare["waited, cancelled, taken up again"] += 1

    async def drain(self) -> None:
        """Take everything to the end, whatever it is."""
        found = "closed"
        try:
            async for frame in self.watch:
                self.account()
                self._judge(frame)
        except SessionPoisonedError:
            found = "poisoned"
        except DocumentTooNewError:
            found = "too new"
        self.account()
        if self._due:
            raise WatchError(f"{self.target}: ends ({found}) with {len(self._due)} frames due")
        expected = self.end or ("poisoned" if self.poisoned() else "closed")
        if found != {"retired": "closed"}.get(expected, expected):
            raise WatchError(f"{self.target}: ends with {found!r}, expected {expected!r}")
        self.done = True
        self._check_value()
        self._check_kept()

    def _judge(self, frame: Any) -> None:
        self.counts["frames"] += 1
        if isinstance(self.target, View):
            self.rare["frame of a view"] += 1
        if not self._due:
            raise WatchError(f"{self.target}: frame {frame.seq} comes, and none is due")
        due = self._due.popleft()
        if (frame.seq, frame.whole) != (due.seq, due.whole):
            found, wanted = (frame.seq, frame.whole), (due.seq, due.whole)
            raise WatchError(f"{self.target}: (seq, whole) expected {wanted}, found {found}")
        patch = frame.patch
        if isinstance(self.target, Target) and self.counts["frames"] % LOWERED_EVERY == 0:
            self._check_lowered(frame)
        try:
            self.value = patched_in_place(self.value, copy.deepcopy(patch))
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise WatchError(
                f"{self.target}, the patch of frame {frame.seq}: {told}: {patch}"
            ) from error
        if due.whole and [op["op"] for op in patch] != ["replace"]:
            raise WatchError(f"{self.target}, the patch of a whole frame is {patch}")
        if due.exact and not due.whole and any(op["path"] == "" for op in patch):
            raise WatchError(f"{self.target}, frame {frame.seq}: the patch replaces everything")
        if self.watch.seq != frame.seq or self.watch.value is not frame.value:
            raise WatchError(f"{self.target}: it does not stand where frame {frame.seq} does")
        self._since += 1
        self._unchecked = (frame, due)
        if due.whole or self._since >= self.target.checked_every(frame):
            self._check_value()
        if not due.whole:
            first = self.shared.setdefault((self.target, frame.seq), frame)
            if first is not frame:
                raise WatchError(f"{self.target}: two frame objects of commit {frame.seq}")

    def _check_lowered(self, frame: Any) -> None:
        """For a client that knows RFC 6902 alone the same patch can be said in it."""
        plain_ops = lower(frame.patch, self.value)
        told = difference(frame.json(), patched_in_place(copy.deepcopy(self.value), plain_ops))
        if told or any(op["op"] == "append" for op in plain_ops):
            raise WatchError(f"{self.target}, frame {frame.seq} lowered: {told or plain_ops}")

    def _check_value(self) -> None:
        """Hold the frame that was taken last against the model, and against the patches."""
        if self._unchecked is None:
            return
        frame, due = self._unchecked
        self._unchecked, self._since = None, 0
        value = frame.json()
        expected = None if due.state is None else self.target.value(due.state)
        told = difference(expected, None if value is None else self.target.seen(value))
        if told:
            raise WatchError(f"{self.target}, frame {frame.seq}: {told}")
        if isinstance(self.target, Target):
            told = difference(expected, plain(frame.read()))
            if told:
                raise WatchError(f"{self.target}, frame {frame.seq} as its class: {told}")
        told = difference(value, self.value)
        if told:
            raise WatchError(f"{self.target}, the patches up to frame {frame.seq}: {told}")
        if len(self._kept) < 3:
            self._kept.append((frame, value))

    def _check_kept(self) -> None:
        """Frames that were delivered long ago still say what they said."""
        for frame, value in self._kept:
            told = difference(value, frame.json())
            if told:
                raise WatchError(f"{self.target}: frame {frame.seq} has changed: {told}")

    def leave(self) -> None:
        if not self.end:
            self.end = "left"
        self.done = True
        self._left.set()
        self.scope.cancel()


@attrs.define(eq=False)
class GraphWatcher:
    """A watch of the task graph, held against its own patches, and at its end against the model.

    What the scheduler does in between is the subject of other tests: here each frame must be what
    the patches so far make of the first value, and the last one must show the tasks that are live.
    """

    fast: bool
    counts: Counter[str]
    live: Callable[[], set[str]]
    over: trio.Event
    """Set once the harness is closed: a watch that is not fast takes all its frames then."""
    target: str = "the task graph"
    done: bool = False
    _value: Any = None
    _seq: int = 0

    async def run(
        self, harness: Any, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with harness.watch_tasks() as watch:
            self._value, self._seq = watch.json(), watch.seq
            if set(self._value["tasks"]) != self.live():
                raise WatchError(f"the task graph begins with {sorted(self._value['tasks'])}")
            task_status.started()
            if not self.fast:
                await self.over.wait()
            try:
                async for frame in watch:
                    self._judge(frame)
            except SessionPoisonedError:
                self.counts["poisoned graphs"] += 1
        if set(self._value["tasks"]) != self.live():
            found, live = sorted(self._value["tasks"]), sorted(self.live())
            raise WatchError(f"the task graph ends with {found}, and {live} are live")
        self.done = True

    def _judge(self, frame: Any) -> None:
        self.counts["graph frames"] += 1
        if frame.seq <= self._seq:
            raise WatchError(f"frame {frame.seq} of the task graph comes after {self._seq}")
        self._seq = frame.seq
        self._value = patched_in_place(self._value, copy.deepcopy(frame.patch))
        told = difference(frame.json(), self._value)
        if told:
            raise WatchError(f"the patches of the task graph up to {frame.seq}: {told}")


def drawn_target(state: State, numbers: tuple[int, int], versions: dict[str, int]) -> Target | View:
    """Something to watch: mostly a document that is there, else one that may come, or a view."""
    first, second = numbers
    if second % 4 == 1:
        places = list(state.places)
        return View(places[first % len(places)])
    addresses = [address for address in state.docs if address[0] != AGENT.name]
    if addresses and first % 4:
        address = addresses[first // 4 % len(addresses)]
    else:
        kinds = [kind for kind in BY_NAME.values() if kind.scope != "task" and kind is not AGENT]
        kind = kinds[first // 4 % len(kinds)]
        places = list(state.places)
        owner = 0 if kind.scope == "session" else places[first // 64 % len(places)]
        address = (kind.name, owner, "one" if kind.family else "")
    version = versions[address[0]]
    if second % 3 == 0:
        version = second // 3 % VERSIONS + 1
    return Target(address, version)
