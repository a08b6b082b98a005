"""`pidurable task tree --watch`: the live tree of a store, drawn again while it changes.

On a terminal a screen that follows its size; everywhere else a frame is printed each time something
changed. It reads beside a running holder, and takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import (
    CELL_CHARS_MAX,
    clean_line,
    conversation_text,
    cut,
    duration,
    holder_lines,
)
from pidurable.cli._screen import StyledLine, open_screen, screen_size
from pidurable.cli._tasks import check_store
from pidurable.harness._forest import Counts
from pidurable.harness._reader import open_reader
from pidurable.harness._tree_watch import Picture, ShownTask, TreeLine, TreeWatch
from pidurable.records._tasks import Status, Wait

__all__ = ["frame_lines", "watch_tree"]

LINES_MAX = 60
"""Of a frame, however tall the terminal is."""
INTERVAL_SECONDS_MIN = 0.1
INTERVAL_SECONDS_MAX = 3600.0
TEXT_COLUMNS = 40
"""Columns that are left for the text of the deepest line."""
BRANCH_COLUMNS = 3
HEADER_LINES = 2
PLAIN_SIZE = (80, LINES_MAX)
"""Of a frame that is printed where there is no terminal."""

_BOLD, _DIM, _RED, _YELLOW, _PLAIN = "1", "2", "31", "33", ""


async def watch_tree(host: Host, options: Options, root: int | None, *, interval: float) -> int:
    """Show the live tree until somebody leaves.

    Args:
        host: The host of the command.
        options: Where the store is.
        root: A task or conversation to begin with; everything if None.
        interval: Seconds between two looks.
    """
    if not INTERVAL_SECONDS_MIN <= interval <= INTERVAL_SECONDS_MAX:
        raise UsageError(
            f"--interval must be {INTERVAL_SECONDS_MIN:g} to {INTERVAL_SECONDS_MAX:g} seconds, "
            f"got {interval:g}"
        )
    if options.output != "table":
        raise UsageError(
            f"--watch shows a screen and has no {options.output} form",
            "`task list --live -o json` gives what is live, once",
        )
    check_store(options.store)
    try:
        async with open_reader(options.store, clock=host) as reader:
            watch = TreeWatch(reader, root=root)
            show = _show if host.is_terminal(host.stdout) else _print
            await show(host, watch, interval)
    except KeyboardInterrupt:
        # Ctrl-C is how one leaves, so nothing is said of it.
        pass
    return Exit.INTERRUPTED


async def _show(host: Host, watch: TreeWatch, interval: float) -> None:
    """Draw on a terminal."""
    rate = _Rate()
    # Refused before the screen is taken, so that the message stays.
    await watch.look(lines_max=LINES_MAX, depth_max=1)
    async with open_screen(host.stdout, host.stdin) as screen:
        colours = host.has_colour(host.stdout)
        while True:
            columns, lines = screen_size(host.stdout)
            picture = await _look(watch, columns, min(lines, LINES_MAX))
            now = host.now_us()
            frame = frame_lines(picture, now, columns, rate.of(picture, trio.current_time()))
            if not colours:
                frame = [(text, _PLAIN) for text, _ in frame]
            await screen.draw(frame[: min(lines, LINES_MAX)], (columns, lines))
            await trio.sleep(interval)


async def _print(host: Host, watch: TreeWatch, interval: float) -> None:
    """Print a frame whenever something changed; times that pass are no change."""
    columns, lines = PLAIN_SIZE
    before = None
    while True:
        picture = await _look(watch, columns, lines)
        shape = attrs.evolve(picture, seq=0, epoch=0, changed=False, holder=None)
        if shape != before:
            if before is not None:
                host.out("")
            host.out(text for text, _ in frame_lines(picture, host.now_us(), columns, None))
            before = shape
        await trio.sleep(interval)


async def _look(watch: TreeWatch, columns: int, lines: int) -> Picture:
    return await watch.look(
        lines_max=max(1, lines - HEADER_LINES),
        depth_max=max(1, (columns - TEXT_COLUMNS) // BRANCH_COLUMNS),
    )


@attrs.define
class _Rate:
    """How many commits a second were made of late."""

    _seen: list[tuple[float, int]] = attrs.Factory(list)
    _epoch: int = -1

    def of(self, picture: Picture, now: float) -> float | None:
        """Take note of the number of a commit; None until there is something to compare with."""
        if picture.epoch != self._epoch:
            # A new holder leaves a gap in the numbers, behind whatever the old one was writing.
            self._seen, self._epoch = [], picture.epoch
        self._seen = [*self._seen[-9:], (now, picture.seq)]
        begun, first = self._seen[0]
        return None if now - begun < 0.5 else (picture.seq - first) / (now - begun)


# --- the frame --------------------------------------------------------------------------------


def frame_lines(
    picture: Picture, now_us: int, columns: int, per_second: float | None
) -> list[StyledLine]:
    """Return the lines of a picture, each cut to the columns, with its style."""
    more = ", not all of them looked at" if picture.partial else ""
    total = f"{picture.counts.live:,} live: {_states(picture.counts)}{more}"
    who = "; ".join(holder_lines(picture.holder)) or "no process holds this store"
    rate = "" if per_second is None else f" (+{per_second:,.0f}/s)"
    lines: list[StyledLine] = [
        (total if picture.counts.live else "nothing is live", _BOLD),
        (f"{who}; commit {picture.seq:,}{rate}", _DIM),
    ]
    lines += [
        (f"{stem}{text}", style)
        for stem, (text, style) in zip(
            _branches([line.depth for line in picture.lines]),
            (_line(line, now_us) for line in picture.lines),
            strict=True,
        )
    ]
    return [(cut(text, columns), style) for text, style in lines]


def _branches(depths: Sequence[int]) -> list[str]:
    """The drawn branches in front of each line."""
    # From below: whether a line of the same owner follows.
    follows: set[int] = set()
    drawn: list[str] = []
    for depth in reversed(depths):
        follows -= {deeper for deeper in follows if deeper > depth}
        stem = "".join("│  " if level in follows else "   " for level in range(1, depth))
        branch = "" if depth == 0 else "├─ " if depth in follows else "└─ "
        drawn.append(stem + branch)
        follows.add(depth)
    return drawn[::-1]


def _line(line: TreeLine, now_us: int) -> StyledLine:
    if line.task is not None:
        text, style = _task(line.task, now_us)
    elif line.conversation is not None:
        text, style = conversation_text(line.conversation), _PLAIN
    elif line.hidden is not None:
        states = f" ({_states(line.hidden)})" if line.hidden.live else ", ended"
        number = f"{line.hidden.live:,} more" if line.hidden.live else "more"
        return f"… {number}{states}", _DIM
    else:
        return "(gone)", _DIM
    if line.hidden is not None and line.hidden.live:
        text += f"  [{line.hidden.live:,} below: {_states(line.hidden)}]"
    return text, style


def _states(counts: Counts) -> str:
    """The states of some tasks, the most frequent first; without a number if all are in one."""
    found = sorted(attrs.asdict(counts).items(), key=lambda item: -item[1])
    if found[0][1] == counts.live:
        return str(found[0][0])
    return ", ".join(f"{number:,} {name}" for name, number in found if number)


def _task(task: ShownTask, now_us: int) -> StyledLine:
    row = task.row
    state, since_us, style = _state(task, now_us)
    elapsed = duration(abs(now_us - since_us) / 1e6)
    if row.status == Status.TERMINAL and row.ended_us is not None:
        elapsed = duration((row.ended_us - row.created_us) / 1e6)
    kind = clean_line(row.kind, chars_max=CELL_CHARS_MAX)
    details = [task.about, _wait_words(task, now_us)]
    if task.phase is not None and row.status != Status.TERMINAL:
        details.append(f"phase {task.phase}")
    if row.background:
        details.append("background")
    if row.recoveries:
        details.append(f"interrupted {row.recoveries}x")
    said = ", ".join(clean_line(each, chars_max=CELL_CHARS_MAX) for each in details if each)
    return f"{row.id} {kind} {state} {elapsed}{f'  {said}' if said else ''}", style


def _state(task: ShownTask, now_us: int) -> tuple[str, int, str]:
    """The state in words, since when, and its style."""
    row = task.row
    since_us = task.progress_us or row.created_us
    if row.status == Status.TERMINAL:
        failed = row.outcome_status not in ("completed", "aborted")
        return row.outcome_status or "ended", row.created_us, _RED if failed else _DIM
    if row.blocked is not None:
        reason = clean_line(row.blocked, chars_max=CELL_CHARS_MAX)
        return f"blocked ({reason})", since_us, _RED
    if row.abort_us is not None:
        word = "aborting" if row.status == Status.RUNNING else "to abort"
        return word, row.abort_us, _YELLOW
    if row.status == Status.PENDING:
        if row.tries and row.ready_us > now_us:
            return "retries in", row.ready_us, _YELLOW
        return "ready", row.ready_us, _PLAIN
    if row.status == Status.RUNNING:
        return "running", since_us, _PLAIN
    return Status(row.status).word, since_us, _DIM


def _wait_words(task: ShownTask, now_us: int) -> str:
    wait: Wait | None = task.wait
    if wait is None:
        return ""
    parts = []
    if wait.on is not None:
        open_ = "" if task.still_open is None else f"{task.still_open:,} of "
        parts.append(f"for {open_}{len(wait.on):,}")
    if wait.signals:
        parts.append("for a signal")
    if wait.deadline_us is not None:
        left = duration((wait.deadline_us - now_us) / 1e6)
        parts.append(f"for {left} at most" if parts else f"for {left}")
    return " or ".join(parts)
