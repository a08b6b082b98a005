"""`task tree --watch`: what stands on the screen, how little is written, and how it is left."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pyte
import pytest
import trio
from terminals import SECONDS_MAX, Terminal, python_path, terminal

from pidurable.cli._render import clean_line
from pidurable.cli._screen import BYTES_PER_SECOND, Screen, open_screen
from pidurable.cli._watch import HEADER_LINES, LINES_MAX, TEXT_COLUMNS, _Rate, frame_lines
from pidurable.harness._reader import open_reader
from pidurable.harness._tree_watch import Picture, TreeWatch
from pidurable.records import _codec, _json
from pidurable.records._tasks import OutcomeRecord, Status, Wait
from pidurable.storage import Batch, ConversationRow, HolderClaim, Op, SqliteStorage, TaskRow

Snapshot = Callable[[str, str], None]
START_US = 1_760_000_000_000_000
NOW_US = START_US + 3_725_000_000
SECOND = 1_000_000


class Store:
    """A store whose rows a test writes, as a holder would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = SqliteStorage(path)
        claim = HolderClaim(holder_id="t", host="here", pid=4242, at_us=START_US, lease_seconds=15)
        self.epoch = self.storage.acquire(claim, takeover=False).epoch
        self.seq = 0
        self.write((Op.CONVERSATION, ConversationRow(1, "u", None, None, None, "root", "", 0)))

    def write(self, *writes: object) -> None:
        self.seq += 1
        self.storage.apply(
            Batch(epoch=self.epoch, seq=self.seq, next_id=10**6, flush=False, writes=writes)  # type: ignore[arg-type]
        )

    def close(self) -> None:
        self.storage.release(self.epoch)
        self.storage.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "s.sqlite")
    yield made
    made.close()


def row(
    id: int, kind: str = "shop.order", status: Status = Status.WAITING, **given: object
) -> TaskRow:
    made = TaskRow(
        id=id,
        conversation=1,
        kind=kind,
        version=1,
        owner=None,
        key=None,
        background=0,
        on_restart=None,
        deadline_us=None,
        created_us=START_US,
        status=int(status),
        started_us=START_US,
        ended_us=None,
        abort_us=None,
        abort_reason=None,
        invocations=1,
        recoveries=0,
        tries=0,
        ready_us=START_US,
        woken_by=None,
        blocked=None,
        outcome_status=None,
    )
    return made._replace(**given)  # type: ignore[arg-type]


def task(
    made: TaskRow, *, phase: str = "", at_us: int = START_US, wait: Wait | None = None
) -> list[object]:
    writes: list[object] = [(Op.TASK, made)]
    if phase:
        writes.append((Op.CHECKPOINT, (made.id, phase, "{}", at_us)))
    if wait is not None:
        writes.append((Op.WAIT, (made.id, _json.dumps(_codec.encode_wait(wait)))))
    return writes


class Now:
    """A wall clock that stands still."""

    def now_us(self) -> int:
        return NOW_US


async def look(path: Path, size: tuple[int, int] = (80, 24), root: int | None = None) -> Picture:
    async with open_reader(path, clock=Now()) as reader:
        return await watch_once(TreeWatch(reader, root=root), size)


async def watch_once(watch: TreeWatch, size: tuple[int, int] = (80, 24)) -> Picture:
    columns, lines = size
    return await watch.look(
        lines_max=min(lines, LINES_MAX) - HEADER_LINES,
        depth_max=max(1, (columns - TEXT_COLUMNS) // 3),
    )


async def shown(picture: Picture, size: tuple[int, int]) -> list[str]:
    """What a terminal of this size shows of a picture."""
    columns, lines = size
    out = io.StringIO()
    screen = Screen(out)
    await screen.draw(frame_lines(picture, NOW_US, columns, 12.0), size)
    terminal_ = pyte.Screen(columns, lines)
    pyte.Stream(terminal_).feed(out.getvalue())
    return [line.rstrip() for line in terminal_.display]


# --- what is shown ----------------------------------------------------------------------------


def few(store: Store) -> None:
    """Three tasks, one below another."""
    store.write(
        *task(row(2), phase="pack", wait=Wait(on=(3, 4))),
        *task(
            row(3, "shop.pack", Status.RUNNING, owner=2), phase="begin", at_us=NOW_US - 3_200_000
        ),
        *task(row(4, "shop.label", Status.PENDING, owner=2, ready_us=NOW_US - 61_000_000)),
    )


def troubled(store: Store) -> None:
    """Blocked, aborting, completing, retrying, interrupted, in conversations, and ended."""
    held = OutcomeRecord(status="completed")
    store.write(
        *task(row(2, blocked="missing_definition", status=Status.PENDING), phase="charge"),
        *task(row(3, status=Status.RUNNING, abort_us=NOW_US - 12_000_000, abort_reason="user")),
        *task(row(4, status=Status.WAITING, abort_us=NOW_US - 12_000_000, abort_reason="user")),
        *task(row(5, "shop.refund", Status.RUNNING, owner=4, recoveries=3), phase="send"),
        *task(row(6, status=Status.COMPLETING, outcome_status="completed")),
        (Op.OUTCOME, (6, _json.dumps(_codec.encode_outcome(held)))),
        (Op.CONVERSATION, ConversationRow(7, "v", None, None, 6, "child", "", 0)),
        *task(row(8, "pi.tool", Status.RUNNING, conversation=7), phase="execute"),
        (Op.TASK_INPUT, (8, '{"name": "bash", "arguments": {}}')),
        *task(row(9, status=Status.PENDING, tries=2, ready_us=NOW_US + 4_000_000), phase="charge"),
        *task(row(10, status=Status.TERMINAL, ended_us=START_US, outcome_status="completed")),
        *task(
            row(11, owner=10, background=0),
            wait=Wait(signals=True, deadline_us=NOW_US + 60_000_000),
        ),
        *task(
            row(12, "shop.report", background=1),
            phase="sleep",
            wait=Wait(deadline_us=NOW_US + 86_400_000_000),
        ),
    )


def many(store: Store) -> None:
    """10,000 live tasks: a fan-out of 8,000, a hundred owners, and a chain."""
    writes: list[object] = []
    for id in range(2, 8_002):
        status = (
            Status.RUNNING if id % 100 == 0 else Status.PENDING if id % 5 == 0 else Status.WAITING
        )
        writes += task(row(id, "shop.ping", status))
    for id in range(8_002, 8_102):
        writes += task(row(id, "shop.order"), phase="join", wait=Wait(on=(id + 100,)))
    for id in range(8_102, 9_102):
        writes += task(row(id, "shop.pack", owner=8_002 + (id - 8_102) % 100))
    writes += task(row(9_102, "shop.chain"))
    for id in range(9_103, 10_002):
        writes += task(
            row(id, "shop.chain", Status.COMPLETING, owner=id - 1, outcome_status="completed")
        )
    store.write(*writes)


def wide(store: Store) -> None:
    """Names that are wide, combining, hostile or long."""
    store.write(
        *task(row(2, "店舗.注文" * 8), phase="準備"),
        *task(row(3, "safe\x1b[2J\x1b]0;title\x07\u202e.kind"), phase="e\u0301te\u0301\n\x9b31m"),
        *task(row(4, "👩‍👩‍👧‍👧" * 30)),
        *task(row(5, "x" * 500)),
    )


SCREENS = [
    ("empty", lambda store: None, (80, 24)),
    ("few", few, (80, 24)),
    ("troubled", troubled, (80, 24)),
    ("many", many, (80, 60)),
    ("many-tall", many, (120, 200)),
    ("many-low", many, (80, 10)),
    ("narrow", troubled, (32, 20)),
    ("tiny", troubled, (8, 4)),
    ("wide", wide, (60, 12)),
]


@pytest.mark.parametrize(("name", "fill", "size"), SCREENS, ids=[name for name, *_ in SCREENS])
async def test_the_screen_is_as_it_was(
    store: Store,
    check_snapshot: Snapshot,
    name: str,
    fill: Callable[[Store], None],
    size: tuple[int, int],
) -> None:
    """Known stores show known screens, at most 60 lines that each fit, with nothing to obey."""
    fill(store)
    picture = await look(store.path, size)
    lines = await shown(picture, size)
    frame = frame_lines(picture, NOW_US, size[0], None)

    assert len(frame) <= min(size[1], LINES_MAX)
    for text, _ in frame:
        # C063, C081
        assert re.search("[\x00-\x1f\x7f-\x9f\u202e]", text) is None
        assert clean_line(text) == text.strip()
    counted = [line.hidden.live for line in picture.lines if line.hidden is not None]
    alive = [
        line.task
        for line in picture.lines
        if line.task is not None and line.task.row.status != Status.TERMINAL
    ]
    if picture.lines:
        assert sum(counted) + len(alive) == picture.counts.live
    check_snapshot(f"watch-{name}.txt", "\n".join(lines).rstrip() + "\n")


async def test_a_root_shows_what_is_below_it_alone(store: Store) -> None:
    """Header and tree begin at the named task; an ended one is shown by itself."""
    troubled(store)
    one = await look(store.path, root=6)
    gone = await look(store.path, root=10)

    assert [line.task.row.id for line in one.lines if line.task] == [6, 8]
    assert one.counts.live == 2
    assert [line.task.row.id for line in gone.lines if line.task] == [10, 11]


# --- how little is read -----------------------------------------------------------------------


class Counting:
    """A storage that counts the calls that reach it."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if callable(found):
            self.calls.append(name)
        return found


async def test_nothing_is_read_while_nothing_was_committed(store: Store) -> None:
    """Between commits only the number of the last one is asked for; after one, the tree again."""
    few(store)
    async with open_reader(store.path) as reader:
        reader._storage = counting = Counting(reader._storage)  # type: ignore[assignment]
        watch = TreeWatch(reader, monotonic=lambda: 0.0)
        first = await watch_once(watch)
        counting.calls.clear()
        second = await watch_once(watch)
        idle = list(counting.calls)
        counting.calls.clear()
        store.write(*task(row(9)))
        third = await watch_once(watch)
        moved = list(counting.calls)

    assert (first.changed, second.changed, third.changed) == (True, False, True)
    assert idle == ["head"]
    assert moved.count("outline") == 1
    assert third.counts.live == 4


async def test_of_ten_thousand_tasks_only_those_shown_are_read_whole(store: Store) -> None:
    """The rows that are read are those on the screen, whatever there is."""
    many(store)
    async with open_reader(store.path) as reader:
        reader._storage = counting = Counting(reader._storage)  # type: ignore[assignment]
        picture = await watch_once(TreeWatch(reader), (80, 60))

    assert picture.counts.live == 10_000
    assert counting.calls.count("task") <= 60
    assert counting.calls.count("task_wait") <= 60
    assert "live_tasks" not in counting.calls
    assert "tasks" not in counting.calls


async def test_an_outline_that_is_dear_is_not_read_at_each_look(store: Store) -> None:
    """However large a session is, outlines take a small part of the time."""
    few(store)
    clock = [0.0]

    def slow() -> float:
        clock[0] += 0.5
        return clock[0]

    async with open_reader(store.path) as reader:
        watch = TreeWatch(reader, monotonic=slow)
        await watch_once(watch)
        store.write(*task(row(9)))
        soon = await watch_once(watch)
        clock[0] += 60
        late = await watch_once(watch)

    assert (soon.counts.live, late.counts.live) == (3, 4)


async def test_beyond_the_outline_all_are_counted_and_the_newest_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of very many tasks the oldest and the newest are looked at; the header counts all."""
    monkeypatch.setattr("pidurable.harness._tree_watch.OUTLINE_MAX", 5)
    for id in range(2, 40):
        store.write(*task(row(id, status=Status.RUNNING if id == 39 else Status.WAITING)))
    picture = await look(store.path)

    assert picture.partial
    assert (picture.counts.live, picture.counts.running) == (38, 1)
    assert {line.task.row.id for line in picture.lines if line.task} == {
        *range(2, 7),
        *range(35, 40),
    }
    assert "not all of them looked at" in frame_lines(picture, NOW_US, 80, None)[0][0]


async def test_what_ends_while_it_is_shown_stays_for_a_moment(store: Store) -> None:
    """A person sees how it ended; a few seconds later it is gone."""
    few(store)
    clock = [0.0]
    async with open_reader(store.path) as reader:
        watch = TreeWatch(reader, monotonic=lambda: clock[0])
        await watch_once(watch)
        ended = row(3, "shop.pack", Status.TERMINAL, owner=2, ended_us=NOW_US)
        state = (*ended[10:21], "failed")
        version = (ended.version,)
        store.write((Op.TASK_STATE, (*version, *state, 3)))
        clock[0] = 1.0
        just = await watch_once(watch)
        clock[0] = 5.0
        later = await watch_once(watch)

    def state_of(picture: Picture) -> list[tuple[int, str | None]]:
        rows = [line.task.row for line in picture.lines if line.task]
        return [(each.id, each.outcome_status) for each in rows]

    assert state_of(just) == [(2, None), (3, "failed"), (4, None)]
    assert state_of(later) == [(2, None), (4, None)]
    assert just.counts.live == later.counts.live == 2


# --- how little is written ---------------------------------------------------------------------


async def test_only_lines_that_changed_are_written(autojump_clock: object) -> None:
    """Of twenty lines one changes: one line is written; nothing changes: nothing is."""
    out = io.StringIO()
    screen = Screen(out)
    lines = [(f"line {n}", "") for n in range(20)]
    await screen.draw(lines, (80, 24))
    out.truncate(0)
    out.seek(0)
    await screen.draw(lines, (80, 24))
    nothing = out.getvalue()
    lines[7] = ("other", "1")
    await screen.draw(lines[:10], (80, 24))

    assert nothing == ""
    assert out.getvalue() == "\x1b[8H\x1b[1mother\x1b[0m\x1b[K\x1b[11H\x1b[J"


async def test_a_terminal_of_another_size_is_drawn_anew(autojump_clock: object) -> None:
    """Lines that did not change are written again, since the terminal has moved them."""
    out = io.StringIO()
    screen = Screen(out)
    await screen.draw([("a", "")], (80, 24))
    await screen.draw([("a", "")], (81, 24))

    assert out.getvalue().count("\x1b[2J\x1b[1Ha\x1b[K") == 2


async def test_output_is_bounded_whatever_is_to_be_drawn(autojump_clock: object) -> None:
    """Frames that change wholly, twice a second, stay below the bytes a second that are allowed."""
    out = io.StringIO()
    screen = Screen(out)
    drawn = 0
    for number in range(40):
        wholly = [("漢" * 40 + str(number), "31") for _ in range(60)]
        drawn += await screen.draw(wholly, (84, 62))
        await trio.sleep(0.5)

    assert screen.written <= BYTES_PER_SECOND * (20 + 1)
    assert drawn >= 20


# --- at the command line ----------------------------------------------------------------------


@contextlib.contextmanager
def printed_watch(path: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Watch a store into a pipe; killed if it takes too long, so that no read waits for ever."""
    command = [sys.executable, "-m", "pidurable.cli", "task", "tree", "--watch"]
    with subprocess.Popen(
        [*command, *argv, "--store", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    ) as process:
        watchdog = threading.Timer(SECONDS_MAX, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def test_without_a_terminal_a_frame_is_printed_when_something_changed(store: Store) -> None:
    """Plain frames, one at the start and one after each change, and none for time that passes."""
    few(store)
    with printed_watch(store.path, "--interval", "0.1") as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(6)]
        store.write(*task(row(9, "shop.late")))
        second = [process.stdout.readline() for _ in range(8)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()

    assert first[0] == "3 live: 1 ready, 1 running, 1 waiting\n"
    assert first[2] == "conversation 1 'root'\n"
    assert second[0] == "\n"
    assert second[1] == "4 live: 2 waiting, 1 ready, 1 running\n"
    assert "9 shop.late waiting" in second[7]
    assert (process.returncode, out, err) == (130, "", "")
    assert "\x1b" not in "".join(first + second)


@pytest.mark.slow
def test_on_a_terminal_it_follows_the_size_and_leaves_cleanly(store: Store, tmp_path: Path) -> None:
    """A smaller window gets fewer lines; Ctrl-C gives back screen, cursor and echo."""
    many(store)
    argv = ("task", "tree", "--watch", "--interval", "0.1", "--store", str(store.path))
    with terminal(tmp_path, *argv, size=(80, 30)) as found:
        found.until("10,000 live: ")
        found.until("more (")
        tall = len(found.text().split("\n"))
        found.resize(60, 12)
        deadline = time.monotonic() + SECONDS_MAX
        while len(found.text().split("\n")) > 12 or "10,000 live" not in found.text():
            assert time.monotonic() < deadline, found.text()
            found.read()
        found.press(b"typed")
        found.press(b"\x03")
        code = found.wait()

    assert (tall, code) == (30, 130)
    assert found.raw.endswith(b"\x1b[?7h\x1b[?25h\x1b[?1049l")
    assert found.raw.count(b"\x1b[?1049h") == 1
    assert b"typed" not in found.raw
    assert not found.screen.cursor.hidden


@pytest.mark.slow
def test_a_suspended_watch_leaves_a_terminal_that_shows_what_is_typed(
    store: Store, tmp_path: Path
) -> None:
    """Ctrl-Z gives back screen and echo, and going on takes both again."""
    few(store)
    with terminal(tmp_path, "task", "tree", "--watch", "--store", str(store.path)) as found:
        found.until("shop.order")
        assert not shows_what_is_typed(found)
        found.press(b"\x1a")
        found.read_until(lambda: found.raw.endswith(b"\x1b[?1049l") and found.process.is_stopped())
        assert shows_what_is_typed(found)
        found.process.send_signal(signal.SIGCONT)
        found.read_until(lambda: found.raw.count(b"\x1b[?1049h") == 2)
        assert not shows_what_is_typed(found)
        found.press(b"\x03")
        assert found.wait() == 130
        assert shows_what_is_typed(found)


def shows_what_is_typed(found: Terminal) -> bool:
    return bool(termios.tcgetattr(found.slave)[3] & termios.ECHO)


@pytest.mark.slow
def test_a_quit_from_the_keyboard_gives_back_the_terminal(store: Store, tmp_path: Path) -> None:
    """Ctrl-\\ leaves like Ctrl-C, not a screen without a cursor and without echo."""
    few(store)
    with terminal(tmp_path, "task", "tree", "--watch", "--store", str(store.path)) as found:
        found.until("shop.order")
        found.press(b"\x1c")
        assert found.wait() == 130
        assert found.raw.endswith(b"\x1b[?7h\x1b[?25h\x1b[?1049l")
        assert shows_what_is_typed(found)


async def test_a_new_holder_is_no_burst_of_commits(store: Store) -> None:
    """The numbers of its commits begin far behind those of the one before."""
    few(store)
    rate = _Rate()
    async with open_reader(str(store.path), clock=Now()) as reader:
        picture = await watch_once(TreeWatch(reader))
    assert rate.of(picture, 0.0) is None
    assert rate.of(attrs.evolve(picture, seq=picture.seq + 5), 1.0) == 5.0

    taken_over = attrs.evolve(picture, epoch=picture.epoch + 1, seq=picture.seq + 2**20)
    assert rate.of(taken_over, 2.0) is None
    assert rate.of(attrs.evolve(taken_over, seq=taken_over.seq + 3), 3.0) == 3.0


@pytest.mark.slow
def test_no_color_is_respected(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NO_COLOR the screen has no colours and no other styles."""
    monkeypatch.setenv("NO_COLOR", "1")
    troubled(store)
    argv = ("task", "tree", "--watch", "--store", str(store.path))
    with terminal(tmp_path, *argv) as found:
        found.until("blocked (missing_definition)")
        found.press(b"\x03")
        found.wait()

    assert re.search(rb"\x1b\[[0-9;]*m", found.raw) is None


async def test_an_error_gives_back_the_terminal(autojump_clock: object) -> None:
    """Whatever ends the block, the last thing that is written is the way back."""
    out = io.StringIO()
    with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012 - the block is the point
        async with open_screen(out, io.StringIO()) as screen:
            await screen.draw([("x", "")], (80, 24))
            raise ValueError("it went wrong")

    assert [str(error) for error in raised.value.exceptions] == ["it went wrong"]
    assert out.getvalue().endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--interval", "0"], 2, "--interval must be 0.1 to 3600 seconds, got 0"),
        (["--interval", "nan"], 2, "--interval must be"),
        (["-o", "json"], 2, "--watch shows a screen and has no json form"),
        (["99"], 4, "has no task or conversation 99"),
        (["--store", "none.sqlite"], 4, "there is no store at none.sqlite"),
    ],
)
def test_a_mistake_is_said_before_anything_is_drawn(
    command: Callable[..., object], known_store: Path, argv: list[str], code: int, message: str
) -> None:
    """A watch that cannot begin is refused like any other command."""
    found = command("task", "tree", "--watch", *argv)

    assert (found.code, found.out) == (code, "")
    assert message in found.err
