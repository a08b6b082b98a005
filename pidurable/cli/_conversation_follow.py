"""`pidurable conversation follow`: the log of a conversation, and what comes, as it comes.

Entries go to stdout as `conversation log` shows them; what happens besides goes to stderr, on a
terminal with a picture of what is being written just now. With `--events` stdout has JSON lines
instead, as `run --events` writes them. It reads beside whoever holds the store, takes part in
nothing, and goes on when that process ends and another one comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import attrs
import trio

from pidurable.cli._approvals import asked_lines
from pidurable.cli._conversations import entry_lines, root_id
from pidurable.cli._display import REDRAW_SECONDS, Display
from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._follow import (
    OWNED_DEPTH_MAX,
    OWNED_MAX,
    live_lines,
    owned_call_line,
    owned_line,
    working_calls,
)
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import holder_lines
from pidurable.cli._story import Story, reason_text
from pidurable.cli._tasks import check_store
from pidurable.errors import PidurableError, WaitTimeoutError
from pidurable.harness._event_json import event_json
from pidurable.harness._events import (
    EntryAdded,
    Event,
    MessageEnd,
    RunEnd,
    RunStart,
    Snapshot,
    SubmissionChanged,
    ToolExecutionEnd,
)
from pidurable.harness._reader import Reader, open_reader
from pidurable.records._entries import Entry

__all__ = ["follow_conversation"]

LOOK_SECONDS = 0.1
HOLDER_SECONDS = 5.0
"""Asking who holds the store tries its lock, so it is not asked at each look."""
BELOW_SECONDS = 0.5
"""What goes on below a call is read so often."""
NOBODY = ("nobody", "released", "dead")


async def follow_conversation(
    host: Host,
    options: Options,
    conversation_id: int | None,
    *,
    limit: int,
    full: bool,
    until_done: bool,
    events: bool,
) -> int:
    """Show the newest entries of a conversation, and then each one that comes.

    Args:
        host: The host of the command.
        options: Where the store is, and how long to follow.
        conversation_id: The conversation; the root if None.
        limit: How many entries to begin with.
        full: Show long texts whole.
        until_done: Leave when nothing runs in it.
        events: Write JSON lines instead.
    """
    if limit < 0:
        raise UsageError(f"--limit must be at least 0, got {limit}")
    if options.output != "table":
        raise UsageError(
            f"following has no {options.output} form", "--events writes JSON lines as they come"
        )
    check_store(options.store)
    host.events = events
    shown = _Shown(host, options, limit=limit, full=full)
    left = False
    try:
        async with open_reader(options.store, clock=host) as reader:
            id = await root_id(reader) if conversation_id is None else conversation_id
            await _follow(reader, id, shown, until_done=until_done)
    except* KeyboardInterrupt:
        # Ctrl-C is how one leaves, so nothing is said of it.
        left = True
    if left:
        return Exit.INTERRUPTED
    if shown.parked:
        return Exit.PARKED
    return Exit.FAILED if shown.unanswered else Exit.DONE


async def _follow(reader: Reader, id: int, shown: _Shown, *, until_done: bool) -> None:
    """Show what comes, and beside that who holds the store."""
    failed: list[Exception] = []
    first = await _tell_holder(reader, shown, None)
    async with trio.open_nursery() as nursery:

        async def watch_holders() -> None:
            await _tell_holders(reader, shown, first, until_done=until_done)
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch_holders)
        if shown.host.is_terminal(shown.host.stderr) and not shown.host.events:
            nursery.start_soon(_look_below, reader, shown)
            await nursery.start(_draw, shown)
        try:
            await _show_batches(reader, id, shown, until_done=until_done)
        except Exception as error:
            # Raised outside of the nursery, as itself and not in a group.
            failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]


async def _show_batches(reader: Reader, id: int, shown: _Shown, *, until_done: bool) -> None:
    seconds = shown.options.timeout
    with trio.move_on_after(math.inf if seconds is None else seconds) as scope:
        async with reader.events(id, interval=LOOK_SECONDS) as batches:
            async for batch in batches:
                shown.tell(batch)
                if until_done and shown.run is None:
                    break
    if scope.cancelled_caught and until_done:
        assert seconds is not None
        raise WaitTimeoutError(f"the end of run {shown.run}", seconds, "It goes on without you.")


async def _tell_holders(
    reader: Reader, shown: _Shown, before: tuple[str, int], *, until_done: bool
) -> None:
    """Say when somebody else holds the store.

    Returns when the end is waited for and cannot come: nobody holds the store, and nobody did at
    the look before.
    """
    while True:
        await trio.sleep(HOLDER_SECONDS)
        now = await _tell_holder(reader, shown, before)
        if until_done and shown.run is not None and now == before and now[0] in NOBODY:
            break
        before = now
    resume = shown.options.command("resume")
    shown.host.err(f"run {shown.run} has not ended; `{resume}` goes on with it", "yellow")
    shown.parked = True


async def _tell_holder(
    reader: Reader, shown: _Shown, before: tuple[str, int] | None
) -> tuple[str, int]:
    """Say who holds the store, if that has changed; a time that passes is no change."""
    holder = await reader.holder()
    now = ("nobody", 0) if holder is None else (str(holder.state), holder.record.epoch)
    if now != before:
        shown.stands_still = now[0] in NOBODY
        shown.host.say(holder_lines(holder) or "nobody holds this store: nothing runs", "dim")
    return now


async def _look_below(reader: Reader, shown: _Shown) -> None:
    """Read now and then what happens in conversations below the calls, for the picture."""
    while True:
        below: dict[int, list[str]] = {}
        for task in shown.calls():
            below[task] = await _owned_lines(reader, task, OWNED_DEPTH_MAX)
        shown.below = below
        await trio.sleep(BELOW_SECONDS)


async def _owned_lines(reader: Reader, task_id: int, depth: int) -> list[str]:
    lines: list[str] = []
    try:
        owned = [row.id for row in await reader.children(task_id) if row.conversation is not None]
        for id in owned[:OWNED_MAX]:
            live = await reader.live(id) or {}
            lines.append(owned_line(id, live))
            for call in working_calls(live):
                lines.append(f"  {owned_call_line(call)}")
                if depth > 1:
                    below = await _owned_lines(reader, call["task"], depth - 1)
                    lines += [f"    {line}" for line in below]
    except PidurableError:
        # What cannot be read is told by whoever shows the log; the picture goes without it.
        return lines
    return lines


async def _draw(
    shown: _Shown, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Show what happens right now below what was told, until it is cancelled."""
    display = Display(shown.host, shown.picture)
    with display:
        shown.display, shown.host.above = display, display.above
        try:
            task_status.started()
            while True:
                display.draw()
                await trio.sleep(REDRAW_SECONDS)
        finally:
            shown.display = shown.host.above = None


@attrs.define(eq=False)
class _Shown:
    """What was told so far, and where it stands."""

    host: Host
    options: Options
    limit: int = attrs.field(kw_only=True)
    full: bool = attrs.field(kw_only=True)
    run: int | None = None
    unanswered: bool = False
    """Whether the last run that ended had no answer."""
    parked: bool = False
    """Whether nobody is there to go on with the run that was waited for."""
    stands_still: bool = False
    """Whether nobody holds the store."""
    display: Display | None = None
    """The picture below, on a terminal."""
    below: dict[int, list[str]] = attrs.Factory(dict)
    """By call, the lines of the conversations below it, as they were lately."""
    _story: Story = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._story = Story(asked=lambda request: asked_lines(request, self.options))

    def tell(self, batch: tuple[Event, ...]) -> None:
        """Show what has happened, entries first."""
        for event in batch:
            self._note(event)
        if self.host.events:
            self.host.out_events(map(event_json, batch))
            return
        entries = [line for e in self._entries(batch) for line in entry_lines(e, full=self.full)]
        if entries and self.display is not None:
            # The picture is on another stream, and the terminal is the same.
            self.display.pause(True)
        self.host.out(entries)
        if entries and self.display is not None:
            self.display.pause(False)
        self.host.err(self._lines(batch))

    def picture(self, cells: int) -> list[str]:
        """What happens right now, for a terminal of this width."""
        if self.stands_still and self.run is not None:
            return [f"run {self.run} stands still: nobody holds this store"]
        return live_lines(
            self._story, cells, self.host.now_us(), lambda task: self.below.get(task, [])
        )

    def calls(self) -> list[int]:
        """The tasks of the calls that run now."""
        return [call.task for call in self._story.calls.values()]

    def _note(self, event: Event) -> None:
        if isinstance(event, Snapshot):
            self.run = event.live["run"]
        elif isinstance(event, RunStart):
            self.run = event.run
        elif isinstance(event, RunEnd):
            self.run = None
            self.unanswered = event.status != "done"

    def _entries(self, batch: Iterable[Event]) -> Iterator[Entry]:
        for event in batch:
            if isinstance(event, Snapshot):
                yield from event.entries[len(event.entries) - min(self.limit, len(event.entries)) :]
            elif isinstance(event, EntryAdded | MessageEnd | ToolExecutionEnd):
                yield event.entry

    def _lines(self, batch: Iterable[Event]) -> list[str]:
        lines: list[str] = []
        for event in batch:
            if isinstance(event, SubmissionChanged) and event.status == "queued":
                lines.append(f"submission {event.submission} is queued")
            said = self._story.tell([event])
            if isinstance(event, EntryAdded | MessageEnd | ToolExecutionEnd):
                continue  # the entry was shown, whole
            if isinstance(event, RunEnd):
                said[-1] += reason_text(event.reason, event.detail)
            lines += said
            if isinstance(event, Snapshot) and self.run is not None:
                lines.append(f"run {self.run} goes on, turn {event.live['turn']}")
        return lines
