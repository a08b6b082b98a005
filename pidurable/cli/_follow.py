"""Following a run on the screen: a live tree on a terminal, plain lines everywhere else.

Everything goes to stderr. On a terminal the lines that stay scroll by above a small tree of what
happens right now, with elapsed times, redrawn eight times a second; it disappears at the end. What
is shown is committed: the display lives on the conversation's events and documents.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from pidurable.agent._permissions import PermissionRequest
from pidurable.cli._display import REDRAW_SECONDS, Display
from pidurable.cli._host import Host
from pidurable.cli._render import clean_line, cut, duration, wrapped_tail
from pidurable.cli._signals import Interrupts
from pidurable.cli._story import RunningCall, Story
from pidurable.harness._conversation import Conversation
from pidurable.harness._event_json import event_json
from pidurable.harness._events import Event
from pidurable.harness._open import Harness

__all__ = [
    "OWNED_DEPTH_MAX",
    "OWNED_MAX",
    "Watched",
    "following",
    "live_lines",
    "owned_call_line",
    "owned_line",
    "working_calls",
]

TRAILING_SECONDS_MAX = 0.5
TEXT_LINES = 6
OUTPUT_LINES = 3
OWNED_DEPTH_MAX = 3
OWNED_MAX = 20
"""So many conversations below one call are shown."""


def _no_display(quiet: bool) -> None:
    """Nothing is to be taken away."""


@attrs.define(eq=False)
class Watched:
    """What a display has been told so far."""

    story: Story
    pause: Callable[[bool], None] = _no_display
    """Takes the display away while somebody types, and gives it back."""
    _moved: trio.Event = attrs.Factory(trio.Event)

    @property
    def moved(self) -> trio.Event:
        """Set, and replaced, whenever there is something new."""
        return self._moved

    async def caught_up(self, submissions: Iterable[int]) -> None:
        """Wait a moment, until the end of these submissions has been shown."""
        with trio.move_on_after(TRAILING_SECONDS_MAX):
            while not all(id in self.story.settled for id in submissions):
                await self._moved.wait()

    def tell(self, batch: tuple[Event, ...]) -> list[str]:
        """Take the events of one commit and return the lines that stay."""
        lines = self.story.tell(batch)
        self._moved.set()
        self._moved = trio.Event()
        return lines


@asynccontextmanager
async def following(
    host: Host,
    harness: Harness,
    conversation: Conversation,
    interrupts: Interrupts,
    asked: Callable[[PermissionRequest], list[str]],
) -> AsyncIterator[Watched]:
    """Show what happens in a conversation while the block lasts.

    Args:
        host, harness, conversation, interrupts: Of the command.
        asked: What is said where a call begins to wait for a person.
    """
    watched = Watched(Story(asked=asked))
    async with conversation.events() as events, trio.open_nursery() as nursery:
        if host.is_terminal(host.stderr) and not host.events:
            await nursery.start(_show_live, host, harness, watched, events, interrupts)
        else:
            nursery.start_soon(_show_lines, host, watched, events)
        yield watched
        nursery.cancel_scope.cancel()


async def _show_lines(
    host: Host, watched: Watched, events: AsyncIterator[tuple[Event, ...]]
) -> None:
    async for batch in events:
        host.out_events(map(event_json, batch))
        lines = watched.tell(batch)
        if lines:
            host.err(lines)


async def _show_live(
    host: Host,
    harness: Harness,
    watched: Watched,
    events: AsyncIterator[tuple[Event, ...]],
    interrupts: Interrupts,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    def owned(task_id: int) -> list[str]:
        return _owned_lines(harness, task_id, OWNED_DEPTH_MAX)

    def picture(cells: int) -> list[str]:
        return live_lines(watched.story, cells, host.now_us(), owned) or ["…"]

    display = Display(host, picture)
    with display:
        interrupts.terminal = True
        host.above = display.above
        watched.pause = display.pause
        try:
            async with trio.open_nursery() as nursery:

                async def redraw() -> None:
                    while True:
                        display.draw()
                        await trio.sleep(REDRAW_SECONDS)

                nursery.start_soon(redraw)
                task_status.started()
                async for batch in events:
                    lines = watched.tell(batch)
                    if lines:
                        host.err(lines)
                        display.draw()
        finally:
            watched.pause = _no_display
            display.pause(False)
            host.above = None
    interrupts.terminal = False


# --- the picture ------------------------------------------------------------------------------


def _nothing(task_id: int) -> list[str]:
    return []


def live_lines(
    story: Story, cells: int, now_us: int, owned: Callable[[int], list[str]] = _nothing
) -> list[str]:
    """Return the tree of what happens right now, with elapsed times; nothing if nothing runs.

    Args:
        story: What happens.
        cells: The width of the terminal. What is being written is broken there, and its end is
            shown: that is where it grows.
        now_us: The moment.
        owned: The lines of the conversations that a call owns.
    """
    if story.run is None:
        return []
    now = story.clock()
    elapsed = "" if story.run_since is None else f"  {duration(now - story.run_since)}"
    lines = [f"run {story.run}, turn {story.turn}{elapsed}"]
    branches: list[list[str]] = []
    room = cells - _INDENT_CELLS
    if story.retry is not None:
        left = (story.retry.until_us - now_us) / 1e6
        branches.append([f"try {story.retry.try_number + 1} in {duration(left)}"])
    if story.text:
        word = "thinks" if story.kind == "thinking" else "answers"
        branches.append([word, *wrapped_tail(story.text, lines=TEXT_LINES, cells=room)])
    for call in sorted(story.calls.values(), key=lambda call: call.index):
        branch = [_call_line(call, now, cells - _BRANCH_CELLS), *owned(call.task)]
        if call.output.strip():
            branch += wrapped_tail(call.output, lines=OUTPUT_LINES, cells=room)
        branches.append(branch)
    if not branches:
        branches.append(["waits for the model"])
    for number, branch in enumerate(branches):
        last = number == len(branches) - 1
        lines.append(f"{'└─' if last else '├─'} {branch[0]}")
        lines += [f"{'  ' if last else '│ '}   {line}" for line in branch[1:]]
    return lines


_INDENT_CELLS = 5
_BRANCH_CELLS = 3


def _call_line(call: RunningCall, now: float, cells: int) -> str:
    """What is called, for how long: of long arguments as much as leaves room for that."""
    elapsed = "" if call.since is None else f"  {duration(now - call.since)}"
    held = "" if call.held_by is None else f"  waits for {clean_line(call.held_by, chars_max=64)}"
    return f"{cut(call.title(), max(1, cells - len(elapsed) - len(held)))}{elapsed}{held}"


def _owned_lines(harness: Harness, task_id: int, depth: int) -> list[str]:
    """The conversations that a call owns, with what happens in them."""
    lines: list[str] = []
    for row in harness.session.storage.conversations_by_owner(task_id, limit=OWNED_MAX):
        live: dict[str, Any] = harness.conversation(row.id).live()
        lines.append(owned_line(row.id, live))
        for call in working_calls(live):
            lines.append(f"  {owned_call_line(call)}")
            if depth > 1:
                below = _owned_lines(harness, call["task"], depth - 1)
                lines += [f"    {line}" for line in below]
    return lines


def owned_line(conversation: int, live: Mapping[str, Any]) -> str:
    """How it stands with a conversation that a call owns, by its `pi.live`."""
    if live.get("run") is None:
        return f"conversation {conversation}, idle"
    return f"conversation {conversation}, run {live['run']}, turn {live['turn']}"


def working_calls(live: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of a conversation that have begun and not ended, by its `pi.live`."""
    calls = () if live.get("run") is None else live.get("calls") or ()
    return [call for call in calls if call["status"] in ("running", "waiting")]


def owned_call_line(call: Mapping[str, Any]) -> str:
    """A call in a conversation that another call owns."""
    held = f", waits for {clean_line(call['held_by'])}" if call["held_by"] else ""
    return f"{clean_line(call['name'], chars_max=64)} (task {call['task']}){held}"
