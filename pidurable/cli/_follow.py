"""Following a run on the screen: a live tree on a terminal, plain lines everywhere else.

Everything goes to stderr. On a terminal the lines that stay scroll by above a small tree of what
happens right now, with elapsed times, redrawn eight times a second; it disappears at the end. What
is shown is committed: the display lives on the conversation's events and documents.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from pidurable.agent._permissions import PermissionRequest
from pidurable.cli._host import Host
from pidurable.cli._render import clean_line, duration, tail
from pidurable.cli._signals import Interrupts
from pidurable.cli._story import RunningCall, Story
from pidurable.harness._conversation import Conversation
from pidurable.harness._event_json import event_json
from pidurable.harness._events import Event
from pidurable.harness._open import Harness

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

__all__ = ["Watched", "following", "live_lines"]

REDRAW_SECONDS = 0.125
TRAILING_SECONDS_MAX = 0.5
TEXT_LINES = 6
OUTPUT_LINES = 3
OWNED_DEPTH_MAX = 3


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
    def picture() -> str:
        return "\n".join(live_lines(harness, watched.story, trio.current_time()))

    display = _Display(host, picture)
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


class _Display:
    """A small picture at the end of the terminal, below the lines that stay.

    While somebody types it is away, and lines wait: both would be written into what is typed.
    """

    def __init__(self, host: Host, picture: Callable[[], str]) -> None:
        from rich.console import Console

        self._console = Console(
            file=host.display_stream(),
            force_terminal=True,
            no_color=not host.has_colour(host.stderr),
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._picture = picture
        self._held: list[tuple[str, str]] = []
        self._live = self._made()

    def _made(self) -> Live:
        from rich.live import Live

        # One that was stopped would draw over what was written since, so each is used once.
        return Live(
            self._drawn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def _drawn(self) -> Text:
        from rich.text import Text

        return Text(self._picture(), no_wrap=True, overflow="ellipsis")

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def draw(self) -> None:
        """Show the picture as it is now."""
        if self._live.is_started:
            self._live.update(self._drawn(), refresh=True)

    def above(self, lines: Iterable[str], style: str) -> None:
        """Write lines that stay, as soon as nobody types."""
        from rich.text import Text

        self._held += [(line, style) for line in lines]
        if self._live.is_started:
            for line, its_style in self._held:
                self._console.print(Text(line, style=its_style), soft_wrap=True)
            self._held.clear()

    def pause(self, quiet: bool) -> None:
        """Take the picture away because somebody types, or give it back."""
        if quiet:
            self._live.stop()
        elif not self._live.is_started:
            self._live = self._made()
            self._live.start()
            self.above((), "")


# --- the picture ------------------------------------------------------------------------------


def live_lines(harness: Harness, story: Story, now: float) -> list[str]:
    """Return the tree of what happens right now, with elapsed times."""
    if story.run is None:
        return ["…"]
    elapsed = "" if story.run_since is None else f"  {duration(now - story.run_since)}"
    lines = [f"run {story.run}, turn {story.turn}{elapsed}"]
    branches: list[list[str]] = []
    if story.retry is not None:
        left = story.retry.until_us / 1e6 - harness.session.clock.now_us() / 1e6
        branches.append([f"try {story.retry.try_number + 1} in {duration(left)}"])
    if story.text:
        word = "thinks" if story.kind == "thinking" else "answers"
        branches.append([word, *tail(story.text, lines=TEXT_LINES)])
    for call in sorted(story.calls.values(), key=lambda call: call.index):
        branches.append(_call_lines(harness, call, now))
    if not branches:
        branches.append(["waits for the model"])
    for number, branch in enumerate(branches):
        last = number == len(branches) - 1
        lines.append(f"{'└─' if last else '├─'} {branch[0]}")
        lines += [f"{'  ' if last else '│ '}   {line}" for line in branch[1:]]
    return lines


def _call_lines(harness: Harness, call: RunningCall, now: float) -> list[str]:
    elapsed = "" if call.since is None else f"  {duration(now - call.since)}"
    held = "" if call.held_by is None else f"  waits for {clean_line(call.held_by, chars_max=64)}"
    lines = [f"{call.title()}{elapsed}{held}"]
    lines += _owned_lines(harness, call.task, OWNED_DEPTH_MAX)
    if call.output.strip():
        lines += tail(call.output, lines=OUTPUT_LINES)
    return lines


def _owned_lines(harness: Harness, task_id: int, depth: int) -> list[str]:
    """The conversations that a call owns, with what happens in them."""
    lines: list[str] = []
    for row in harness.session.storage.conversations_by_owner(task_id, limit=20):
        live: dict[str, Any] = harness.conversation(row.id).live()
        if live.get("run") is None:
            lines.append(f"conversation {row.id}, idle")
            continue
        lines.append(f"conversation {row.id}, run {live['run']}, turn {live['turn']}")
        for call in live.get("calls") or ():
            if call["status"] not in ("running", "waiting"):
                continue
            held = f", waits for {clean_line(call['held_by'])}" if call["held_by"] else ""
            name = clean_line(call["name"], chars_max=64)
            lines.append(f"  {name} (task {call['task']}){held}")
            if depth > 1:
                below = _owned_lines(harness, call["task"], depth - 1)
                lines += [f"    {line}" for line in below]
    return lines
