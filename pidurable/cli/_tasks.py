"""`pidurable task`: list, show, tree, explain, and abort.

All but the last only look: they read committed state, also beside a running holder, and create
nothing. `abort` holds the store until the tasks have ended, or has its live holder do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import trio

from pidurable.cli import _sessions
from pidurable.cli._errors import Exit, LeftError, UsageError, missing_store
from pidurable.cli._forms import show_list, show_records, show_sheets
from pidurable.cli._host import STDIN, Host
from pidurable.cli._options import Options, check_text
from pidurable.cli._outside import asked, live_holder, say_who_is_asked, unless_interrupted
from pidurable.cli._render import (
    age,
    clean,
    clean_line,
    compact_json,
    cut,
    holder_lines,
    moment,
    outcome_word,
    task_line,
    tree_lines,
)
from pidurable.errors import NotFoundError, StorageHeldError, WaitTimeoutError, show
from pidurable.harness._client import Client
from pidurable.harness._reader import Reader, TreeRow, open_reader
from pidurable.records._codes import explain_code
from pidurable.records._ids import TaskId
from pidurable.records._tasks import Status, TaskRecord, Wait
from pidurable.tasks._explain import Explanation

__all__ = [
    "abort_tasks",
    "check_store",
    "explain_tasks",
    "list_tasks",
    "parse_ids",
    "show_tasks",
    "show_tree",
]

ID_DIGITS_MAX = 30
ASKED_LOOKED_AT_MAX = 20
_ABORT_LOOK_SECONDS = 0.05
REASON_CHARS_MAX = 200
STATUS_WORDS = {status.word: status for status in Status}


def check_store(store: str) -> None:
    """Refuse to look at what is not there: looking never creates a store."""
    if not _sessions.store_exists(store):
        raise missing_store(store)


def parse_ids(host: Host, ids: list[str]) -> list[int]:
    """Return ids as numbers; `-` stands for those on standard input, one a line or word.

    Raises:
        UsageError: Something is not an id.
    """
    words: list[str] = []
    for given in ids:
        words += host.read_stdin().split() if given == STDIN else [given]
    found = []
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) <= ID_DIGITS_MAX):
            raise UsageError(
                f"{show(word)} is not an id", "Ids are whole numbers, as in `task list`"
            )
        found.append(int(word))
    return found


async def list_tasks(
    host: Host,
    options: Options,
    *,
    conversation: int | None,
    kind: str | None,
    status: str | None,
    live: bool,
    limit: int,
) -> int:
    """List tasks, the newest last."""
    wanted = None
    if status is not None:
        if status not in STATUS_WORDS:
            raise UsageError(
                f"--status {status!r} is not one of {', '.join(STATUS_WORDS)}",
                "An ended task is `terminal`; `task show ID` says how it ended",
            )
        wanted = STATUS_WORDS[status]
    if kind is not None:
        check_text(kind, "--kind")
    if limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    check_store(options.store)
    async with open_reader(options.store) as reader:
        tasks = await reader.tasks(
            conversation=conversation, kind=kind, status=wanted, live=live, limit=limit
        )
        holder = await reader.holder()
    now = host.now_us()
    header = ("ID", "CONVERSATION", "OWNER", "KIND", "STATUS", "PHASE", "AGE")
    if show_list(
        *(host, options, tasks),
        id=lambda task: task.id,
        json=task_json,
        header=header,
        row=lambda task: _row(task, now),
    ):
        if not tasks:
            host.err("no tasks match")
        elif len(tasks) == limit:
            host.err(f"the newest {limit}; --limit shows more")
        host.say(holder_lines(holder))
    return Exit.DONE


def _row(task: TaskRecord, now_us: int) -> tuple[str, ...]:
    return (
        str(task.id),
        str(task.conversation_id),
        "-" if task.owner is None else str(task.owner),
        task.kind,
        outcome_word(task),
        task.phase or "-",
        age(task, now_us),
    )


async def show_tree(host: Host, options: Options, root: int | None) -> int:
    """Show tasks and conversations as a tree, owners above what they own."""
    check_store(options.store)
    async with open_reader(options.store) as reader:
        rows = await reader.tree(root)
        holder = await reader.holder()
    if options.output != "table":
        show_records(host, options, rows, id=lambda row: row.id, json=_tree_json, lines=str)
    else:
        cells = host.width(host.stdout)
        lines = tree_lines(rows, host.now_us())
        # A line that a terminal wraps would fall out of the drawing.
        host.out(lines if cells is None else [cut(line, cells) for line in lines])
        host.say(holder_lines(holder))
    return Exit.DONE


def _tree_json(row: TreeRow) -> dict[str, Any]:
    if row.task is not None:
        return {"depth": row.depth, "task": task_json(row.task)}
    assert row.conversation is not None
    return {"depth": row.depth, "conversation": attrs.asdict(row.conversation)}


async def show_tasks(host: Host, options: Options, ids: list[int]) -> int:
    """Show everything that is stored of tasks."""
    check_store(options.store)
    async with open_reader(options.store) as reader:
        tasks = [await reader.task(id) for id in ids]
        sheets = {}
        if options.output == "table":
            sheets = {task.id: await _sheet(reader, task, host.now_us()) for task in tasks}
        holder = await reader.holder()
    if show_sheets(
        *(host, options, tasks),
        id=lambda task: task.id,
        json=task_json,
        sheet=lambda task: sheets[task.id],
    ):
        host.say(holder_lines(holder))
    return Exit.DONE


async def explain_tasks(host: Host, options: Options, ids: list[int]) -> int:
    """Say in a line each why tasks are where they are; `-o ids` prints the tasks that decide."""
    check_store(options.store)
    async with open_reader(options.store, clock=host) as reader:
        found = [await reader.explain(id) for id in ids]
    if options.output == "json" and len(found) == 1:
        host.out_json(explanation_json(found[0]))
        return Exit.DONE
    show_records(
        *(host, options, found),
        id=lambda each: each.path[-1] if each.path else each.task_id,
        json=explanation_json,
        lines=lambda each: host.typed(clean_line(str(each))),
    )
    return Exit.DONE


def explanation_json(found: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON: every field, and the line itself."""
    return {**attrs.asdict(found), "status": found.status.word, "line": str(found)}


def task_json(task: TaskRecord) -> dict[str, Any]:
    """Return a task as JSON: every field, the status as its word."""
    return {**attrs.asdict(task), "status": task.status.word}


async def _sheet(reader: Reader, task: TaskRecord, now_us: int) -> list[str]:
    """The lines of one task, a fact a line, and the reason codes explained."""
    asked = [] if task.wait is None else await _asked(reader, task.wait)
    facts: list[tuple[str, str]] = [
        ("status", outcome_word(task)),
        ("phase", task.phase or "-"),
        ("conversation", str(task.conversation_id)),
        ("owner", "its conversation" if task.owner is None else f"task {task.owner}"),
        ("definition", f"{task.kind}, version {task.version}"),
        ("created", moment(task.created_us)),
        ("started", moment(task.started_us)),
        ("ended", moment(task.ended_us)),
        ("age", age(task, now_us)),
        ("invocations", _invocations(task)),
    ]
    optional = (
        ("key", task.key),
        ("deadline", None if task.deadline_us is None else moment(task.deadline_us)),
        ("blocked", _coded(task.blocked)),
        ("abort", None if task.abort_us is None else _coded(task.abort_reason) or "asked for"),
        ("waits for", None if task.wait is None else wait_text(task.wait, asked)),
        ("woken by", task.woken_by),
    )
    facts += [(name, value) for name, value in optional if value is not None]
    facts.append(("input", compact_json(task.input)))
    if task.checkpoint is not None:
        facts.append(("checkpoint", compact_json(task.checkpoint)))
    facts += [(f"memo {name}", compact_json(value)) for name, value in task.memos.items()]
    facts += _outcome_facts(task)
    lines = [f"task {task.id}  {clean_line(task.kind)}"]
    lines += [f"  {clean_line(name):<13} {clean_line(value)}" for name, value in facts]
    if task.outcome is not None and task.outcome.error is not None:
        trace = task.outcome.error.traceback
        if trace:
            lines += [f"    {line}" for line in clean(trace).rstrip("\n").split("\n")]
    children = await reader.children(task.id)
    if children:
        lines.append("  owns")
        lines += [f"    {line}" for line in tree_lines(children, now_us)]
    return lines


def _invocations(task: TaskRecord) -> str:
    if not task.recoveries:
        return str(task.invocations)
    return f"{task.invocations}; interrupted by a death {task.recoveries} times"


def _coded(code: str | None) -> str | None:
    if code is None:
        return None
    text = explain_code(code)
    return code if text is None else f"{code}: {text}"


async def _asked(reader: Reader, wait: Wait) -> list[int]:
    """The permission requests among what a task waits for."""
    found = []
    for id in wait.others[:ASKED_LOOKED_AT_MAX]:
        with contextlib.suppress(NotFoundError):
            found.append((await reader.permission(id)).id)
    return found


def wait_text(wait: Wait, asked: Sequence[int] = ()) -> str:
    """What a task waits for, on one line.

    Args:
        wait: The wait.
        asked: The permission requests among what it waits for.
    """
    parts = []
    if wait.on is not None:
        parts.append(f"{wait.policy} of {_awaited_text(wait, asked)}")
    if wait.signals:
        parts.append("signals")
    if wait.deadline_us is not None:
        parts.append(f"until {moment(wait.deadline_us)}")
    return ", ".join(parts) or "nothing"


def _awaited_text(wait: Wait, asked: Sequence[int]) -> str:
    """What a wait is for, by its kinds; a submission that had settled before counts as a task."""
    apart = {*wait.conversations, *wait.others}
    tasks = [id for id in wait.on or () if id not in apart]
    answers = [id for id in wait.others if id not in asked]
    kinds = (
        ("tasks", tasks),
        ("conversations", wait.conversations),
        ("permissions", asked),
        ("submissions", answers),
    )
    named = [f"{name} {', '.join(map(str, ids))}" for name, ids in kinds if ids]
    return ", ".join(named) or "tasks none"


def _outcome_facts(task: TaskRecord) -> list[tuple[str, str]]:
    outcome = task.outcome
    if outcome is None:
        return []
    facts: list[tuple[str, str]] = [("outcome", outcome.status)]
    if outcome.reason:
        facts.append(("reason", _coded(outcome.reason) or ""))
    if outcome.has_result:
        name = "result" if outcome.status == "completed" else "partial"
        facts.append((name, compact_json(outcome.result)))
    if outcome.error is not None:
        facts.append(("error", f"{outcome.error.type}: {outcome.error.message}"))
    return facts


async def abort_tasks(
    host: Host, options: Options, ids: list[int], *, yes: bool, reason: str, orphan: bool = False
) -> int:
    """Abort live tasks with everything below them, and wait until they have ended.

    What has begun is not ended without its code unless somebody wants just that (`orphan`): nobody
    would undo what it did, and that cannot be made up for.
    """
    if len(check_text(reason, "--reason")) > REASON_CHARS_MAX:
        raise UsageError(f"--reason must have at most {REASON_CHARS_MAX} characters")
    check_store(options.store)
    await _sessions.bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        tasks = [await reader.task(id) for id in ids]
        live = [task for task in tasks if task.status is not Status.TERMINAL]
        trees = {task.id: await reader.tree(task.id) for task in live}
        lost = [] if orphan else await _without_code(reader, options, trees.values())
    for task in tasks:
        if task.status is Status.TERMINAL:
            host.err(f"task {task.id} has ended already: {outcome_word(task)}; nothing was done")
    if not live:
        return Exit.DONE
    asks = not yes and host.is_terminal(host.stdin)
    if lost and not asks:
        raise UsageError(f"{_lost_words(lost)}; nothing was done", _LOST_HINT)
    if not yes:
        if not asks:
            raise UsageError("aborting cannot be undone and nobody can be asked", "Pass --yes")
        for task in live:
            below = len(trees[task.id]) - 1
            host.err(f"{task_line(task, host.now_us())}  ({below} below it)")
        if lost:
            host.err((f"{_lost_words(lost)}.", _LOST_HINT), "yellow")
        if not await trio.to_thread.run_sync(host.confirm, f"abort {_count(live)}?"):
            host.err("nothing was done")
            return Exit.FAILED
    try:
        outcomes = await _abort_here(host, options, live, reason)
    except StorageHeldError as held:
        say_who_is_asked(host, held.pid, held.host)
        outcomes = await _abort_there(host, options, live, reason, orphan=orphan)
    if options.output == "json":
        host.out_json([{"task": id, "status": status} for id, status in outcomes.items()])
    elif options.output == "ids":
        host.out(str(id) for id in outcomes)
    else:
        host.out(f"task {id} {status}" for id, status in outcomes.items())
    return Exit.DONE


async def _abort_here(
    host: Host, options: Options, live: list[TaskRecord], reason: str
) -> dict[int, str]:
    """Hold the store until the tasks have ended; how, by task."""
    found: dict[int, str] = {}
    async with _sessions.open_session(host, options, create=False) as harness:
        for task in live:
            await harness.abort_task(task.id, reason=reason)
        for task in live:
            # Nobody asked for other work, so the harness is not started.
            outcome = await harness.wait_for_task(
                TaskId(task.id), timeout=options.timeout, start=False
            )
            found[task.id] = outcome.status
    return found


async def _abort_there(
    host: Host, options: Options, live: list[TaskRecord], reason: str, *, orphan: bool
) -> dict[int, str]:
    """Have the holder abort tasks, and look until they have ended; how, by task."""
    ids = [task.id for task in live]
    began = trio.current_time()

    async def ask(client: Client, command: str) -> None:
        await client.abort_tasks(ids, reason, key=command, timeout=options.timeout)

    await asked(host, options, ask)
    async with open_reader(options.store) as reader:

        async def ended() -> dict[int, str] | None:
            while True:
                tasks = [await reader.task(id) for id in ids]
                running = [task.id for task in tasks if task.status is not Status.TERMINAL]
                if not running:
                    return {task.id: task.outcome.status for task in tasks if task.outcome}
                holder = await live_holder(reader)
                if holder is None:
                    return None
                if options.timeout is not None and trio.current_time() - began >= options.timeout:
                    hint = f"It is being aborted by process {holder.record.pid}."
                    raise WaitTimeoutError(f"the end of task {running[0]}", options.timeout, hint)
                await trio.sleep(_ABORT_LOOK_SECONDS)

        async def leave() -> LeftError:
            await trio.lowlevel.checkpoint()
            return LeftError(f"interrupted; the abort of {_count(live)} is stored and goes on")

        found = await unless_interrupted(options, ended, leave)
        if found is None and not orphan:
            trees = [await reader.tree(id) for id in ids]
            if lost := await _without_code(reader, options, trees):
                words = (
                    f"{_lost_words(lost)}; who held the session has left, and the abort is stored"
                )
                raise UsageError(words, _LOST_HINT)
    # Where nothing was found the mark is stored, but whoever was to see to it is gone.
    return await _abort_here(host, options, live, reason) if found is None else found


_LOST_HINT = "Name its extension with -e, or pass --orphan to end it as it is"


async def _without_code(
    reader: Reader, options: Options, trees: Iterable[list[TreeRow]]
) -> list[TaskRecord]:
    """Live tasks that have begun and whose code is not here, where nobody else would abort them."""
    begun = [
        row.task
        for rows in trees
        for row in rows
        if row.task is not None
        and row.task.status is not Status.TERMINAL
        and row.task.started_us is not None
        and not row.task.kind.startswith("pi.")
    ]
    if not begun or await live_holder(reader) is not None:
        return []
    snapshot = _sessions.load_registry(options).snapshot
    return [task for task in begun if snapshot.definition(task.kind) is None]


def _lost_words(lost: list[TaskRecord]) -> str:
    first = lost[0]
    more = f", and {len(lost) - 1} more like it" if len(lost) > 1 else ""
    return (
        f"task {first.id} ({clean_line(first.kind, chars_max=60)}) has begun and its "
        f"code is not loaded here, so that nothing would undo what it did{more}"
    )


def _count(live: list[TaskRecord]) -> str:
    return f"task {live[0].id}" if len(live) == 1 else f"these {len(live)} tasks"
