"""`pidurable run` and `pidurable resume`: hand in, follow, and leave in order.

However this process ends, the work is in the store. The first Ctrl-C drains: no new phase begins,
the model's stream is cut, running calls get ten seconds. The second leaves at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import attrs
import trio

from pidurable.agent._models import Models
from pidurable.agent._permissions import PermissionRequest
from pidurable.agent._script import load_script
from pidurable.agent._services import UNSET, AgentChange
from pidurable.cli._approvals import asked_lines
from pidurable.cli._asking import Asking, may_ask
from pidurable.cli._errors import Exit, UsageError, missing_store
from pidurable.cli._follow import Watched, following
from pidurable.cli._host import STDIN, Host
from pidurable.cli._options import Options
from pidurable.cli._outside import holding, waiting_commands
from pidurable.cli._plan import Plan, make_plan
from pidurable.cli._render import clean_line
from pidurable.cli._run_end import (
    report,
    say_asked,
    say_stuck,
    so_far,
    tell_unended,
    waits_for_others,
)
from pidurable.cli._run_outside import Handed, run_outside
from pidurable.cli._sessions import (
    bring_up_to_date,
    load_registry,
    open_models,
    open_session,
    store_exists,
)
from pidurable.cli._signals import Interrupts, catch_interrupts
from pidurable.errors import (
    InvalidArgumentError,
    StorageAccessError,
    StorageHeldError,
    WaitTimeoutError,
)
from pidurable.harness._client import open_client
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness
from pidurable.harness._reader import Reader, open_reader
from pidurable.harness._submission import Settled, Submission, settled_of
from pidurable.records._commands import drawn_key
from pidurable.records._entries import Entry
from pidurable.registry import Registry
from pidurable.session._seams import SystemRandomness

__all__ = ["resume_work", "run_prompt"]

DRAIN_SECONDS = 10.0
STUCK_LOOK_SECONDS = 0.5
RACE_SECONDS = 0.1
PROMPT_CHARS_MAX = 1_000_000
ENTRIES_MAX = 100_000
NOTICE = (
    "tools may do everything this user may: read, write, run commands (unless an extension asks)"
)


async def run_prompt(
    host: Host,
    options: Options,
    prompt: str,
    *,
    request_id: str | None,
    go_on: bool,
    questions: bool = True,
    events: bool = False,
) -> int:
    """Hand a prompt to the root conversation, follow its run, and give back the answer."""
    host.events = events
    if prompt == STDIN:
        prompt = await trio.to_thread.run_sync(host.read_stdin)
    _check_prompt(prompt)
    existing = store_exists(options.store)
    if options.model is None and not existing:
        raise UsageError(
            "no model is named",
            "Give --model provider/model, or --script FILE.yaml, or set PIDURABLE_MODEL",
        )
    models = open_models(host)
    _check_model(options, models)
    registry = load_registry(options)
    await bring_up_to_date(options.store)
    key = drawn_key(host.now_us(), SystemRandomness().uuid())
    handed = Handed(prompt, request_id, key)
    with catch_interrupts(options.resume_command) as interrupts:
        while True:
            code = await run_outside(host, options, handed, interrupts)
            if code is not None:
                return code
            if existing and not go_on and not handed.begun:
                await _look_first(options, request_id)
            with contextlib.suppress(StorageHeldError):  # by somebody who was faster
                return await _run_here(
                    host, options, handed, registry, models, interrupts, questions
                )
            await trio.sleep(RACE_SECONDS)


async def _run_here(
    host: Host,
    options: Options,
    handed: Handed,
    registry: Registry,
    models: Models,
    interrupts: Interrupts,
    questions: bool,
) -> int:
    """Hold the session, hand in and do the work.

    Raises:
        StorageHeldError: Another live process holds it. Nothing was done.
    """
    host.say(NOTICE)
    async with open_session(
        host, options, create=True, registry=registry, models=models
    ) as harness:
        root = await harness.root(agent=AgentChange(model=options.model, cwd=options.cwd))
        await _configure(root, options)

        async def hand_in() -> list[Submission]:
            if not handed.begun:
                return [await root.submit(handed.prompt, request_id=handed.request_id)]
            # It waited for a holder that has gone, or was answered by that one; now it is this one.
            async with open_client(options.store) as client:
                return [Submission(harness, await handed.submit(client, None))]

        return await _see_through(
            host, options, harness, root, hand_in, interrupts, questions=questions
        )


def _check_model(options: Options, models: Models) -> None:
    """Refuse a model that nobody has, and a script that is none, before anything is stored."""
    if options.model is None:
        return
    models.resolve(options.model)
    provider, _, path = options.model.partition("/")
    if provider == "scripted":
        try:
            load_script(path)
        except InvalidArgumentError as error:
            problem = str(error).removeprefix("script: ")
            raise UsageError(f"{options.model_source}: {problem}", "Correct the file") from error


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise UsageError("the prompt is empty", "Say what is to be done")
    if len(prompt) > PROMPT_CHARS_MAX:
        raise UsageError(
            f"the prompt has {len(prompt)} characters, at most {PROMPT_CHARS_MAX} are allowed",
            "Put the text into a file and name it",
        )
    if "\0" in prompt or any("\ud800" <= char <= "\udfff" for char in prompt):
        raise UsageError(
            "the prompt holds a NUL or bytes that are not text", "Put them into a file and name it"
        )


async def _configure(root: Conversation, options: Options) -> None:
    """What is named now counts from now on; what is not named stays as it is."""
    agent = root.agent()
    change = AgentChange(
        model=options.model if options.model not in (None, agent.get("model")) else UNSET,
        cwd=options.cwd if options.cwd_given and options.cwd != agent.get("cwd") else UNSET,
    )
    if change.given():
        await root.configure(change)
    elif agent.get("model") is None:
        raise UsageError("no model is named", "Give --model provider/model, or --script FILE.yaml")


async def _look_first(options: Options, request_id: str | None) -> None:
    """Refuse to start left-over work that nobody asked for; look without touching the store.

    The same prompt under its request id again is no new work: it goes on where it was.
    """
    try:
        async with open_reader(options.store) as reader:
            plan = await make_plan(reader, Registry())
            if plan.is_empty:
                return
            for root in (await reader.conversations())[:1]:
                known = await reader.find_request(root.id, request_id) if request_id else None
                if known is not None:
                    return
    except StorageAccessError:
        return  # empty or half created: opening it for work decides
    raise UsageError(
        "this session has unfinished work from before",
        "`pidurable resume --plan` shows it, `pidurable resume` goes on with it, "
        "`pidurable run --continue PROMPT` goes on and then does this",
    )


async def _refuse_held(reader: Reader) -> None:
    holder = await reader.holder()
    if holder is not None and holder.state == "live":
        record = holder.record
        raise StorageHeldError(reader.store, record.pid, record.host, holder.heartbeat_age)


# --- resume -----------------------------------------------------------------------------------


async def resume_work(
    host: Host,
    options: Options,
    *,
    plan_only: bool,
    questions: bool = True,
    events: bool = False,
) -> int:
    """Say what was interrupted and what becomes of it; then go on with it."""
    host.events = events
    if not store_exists(options.store):
        raise missing_store(options.store)
    models = open_models(host)
    if not plan_only:
        _check_model(options, models)
    registry = load_registry(options)
    if not plan_only:
        await bring_up_to_date(options.store)
    plan = await _read_plan(options, registry)
    if plan_only and options.output == "json":
        host.out_json(plan.to_json())
        return Exit.DONE
    if plan.is_empty and (waits := await _waits_for_an_opening(options)):
        if plan_only:
            host.err(f"nothing is to be resumed; {' and '.join(waits)} seen to by an opening")
            return Exit.DONE
        await _open_once(host, options)
        host.err(f"seen to: {' and '.join(waits)}")
        plan = await _read_plan(options, registry)
    if plan.is_empty:
        host.err("nothing to resume: every input is answered and no task is live")
        if options.output == "json":
            host.out_json({"submissions": []})
        return Exit.DONE
    if plan_only:
        host.out(plan.lines(options))
        return Exit.DONE
    host.say(NOTICE)
    host.err("resuming:")
    host.err(plan.lines(options))
    with catch_interrupts(options.resume_command) as interrupts:
        async with open_session(
            host, options, create=False, registry=registry, models=models
        ) as harness:
            root = await harness.root()
            if options.model is not None or options.cwd_given:
                await _configure(root, options)

            async def hand_in() -> list[Submission]:
                await trio.lowlevel.checkpoint()
                return [Submission(harness, id) for id in plan.submissions]

            return await _see_through(
                host,
                options,
                harness,
                root,
                hand_in,
                interrupts,
                resumed=True,
                questions=questions,
            )


async def _waits_for_an_opening(options: Options) -> list[str]:
    """What no task does, and whoever holds the store next."""
    async with open_reader(options.store) as reader:
        found = []
        if commands := await trio.to_thread.run_sync(waiting_commands, options.store):
            found.append(f"{commands} from other processes")
        if removals := await reader.removals():
            found.append(f"the removal of {len(removals)} trees")
        holder = await reader.holder()
        if holder is not None and holder.state in ("dead", "silent"):
            found.append(f"process {holder.record.pid}, which held the store and is {holder.state}")
        return found


async def _open_once(host: Host, options: Options) -> None:
    """Hold the store for a moment: opening it applies commands, and takes the place of the dead."""
    async with holding(host, options) as harness:
        await harness._collector.finish()


async def _read_plan(options: Options, registry: Registry) -> Plan:
    async with open_reader(options.store) as reader:
        await _refuse_held(reader)
        return await make_plan(reader, registry)


# --- seeing it through ------------------------------------------------------------------------


HandIn = Callable[[], Awaitable[list[Submission]]]


@attrs.define(eq=False)
class _End:
    """How the wait ended; the first that happens decides."""

    handed: list[Submission] | None = None
    """What was handed in; None before it is known."""
    settled: list[Settled] = attrs.Factory(list)
    code: Exit | None = None
    asks: bool = False
    """Whether somebody is there who is asked."""
    answers_itself: bool = False
    """Nobody is to be asked: every question is answered at once, so that nothing is run."""


async def _see_through(
    host: Host,
    options: Options,
    harness: Harness,
    root: Conversation,
    hand_in: HandIn,
    interrupts: Interrupts,
    *,
    resumed: bool = False,
    questions: bool = True,
) -> int:
    """Follow until everything that was asked for has ended, or somebody wants to leave."""
    end = _End(asks=questions and may_ask(host), answers_itself=not questions)
    async with trio.open_nursery() as nursery:

        def first(work: Callable[[], Awaitable[Exit | None]]) -> None:
            async def run() -> None:
                end.code = await work()
                nursery.cancel_scope.cancel()

            nursery.start_soon(run)

        first(lambda: _finish(host, options, harness, root, hand_in, end, interrupts, resumed))
        first(lambda: _leave_in_order(host, harness, interrupts))
        first(lambda: _notice_stuck(host, options, harness, end))

    async def entries(settled: Settled) -> list[Entry]:
        record = harness.session.submission(settled.id)
        assert record is not None
        assert settled.entry is not None
        return await harness.conversation(record.conversation_id).history(
            after=settled.entry,
            before=None if settled.answer is None else settled.answer + 1,
            limit=ENTRIES_MAX,
        )

    if end.code is None:
        return await report(host, options, end.settled, entries, single=not resumed)
    stands, session = None, harness.session
    if host.events and end.handed is not None:
        # Not by its handle, which tells nobody how it stands once the harness was drained.
        records = [session.submission(each.id) for each in end.handed]
        stands = [settled_of(each, session.storage, session.codec) for each in records if each]
    await tell_unended(host, stands, entries, detail="left before anything is known to be stored")
    return end.code


async def _finish(
    host: Host,
    options: Options,
    harness: Harness,
    root: Conversation,
    hand_in: HandIn,
    end: _End,
    interrupts: Interrupts,
    resumed: bool,
) -> Exit | None:
    def asked(request: PermissionRequest) -> list[str]:
        return asked_lines(request, options, with_commands=not end.answers_itself)

    async with (
        following(host, harness, root, interrupts, asked) as watched,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_ask, host, harness, watched, end, interrupts)
        # Watched before anything is handed in, so that its beginning is seen too.
        harness.start()
        timeout = float("inf") if options.timeout is None else options.timeout
        with trio.move_on_after(timeout) as scope:
            end.handed = await hand_in()
            for submission in end.handed:
                end.settled.append(await _settled_or_held(harness, submission))
            if resumed:
                await harness.wait_for_idle()
        if not scope.cancelled_caught:
            ended = [each.id for each in end.settled if each.status != "queued"]
            here = [id for id in ended if id in watched.story.settled]
            await watched.caught_up(here or ended[:1])
        nursery.cancel_scope.cancel()
    if not scope.cancelled_caught:
        return None
    assert options.timeout is not None
    host.err(str(WaitTimeoutError("the answer", options.timeout)), "yellow")
    host.err(f"  next: `{clean_line(options.resume_command)}` goes on")
    return Exit.TIMED_OUT


async def _ask(
    host: Host, harness: Harness, watched: Watched, end: _End, interrupts: Interrupts
) -> None:
    """Ask whoever is there for what is open, until they want to leave; nobody where nobody is."""
    asking = Asking(
        host=host,
        harness=harness,
        open_requests=lambda: watched.story.permissions,
        moved=lambda: watched.moved,
        pause=lambda quiet: watched.pause(quiet),
        asks=end.asks,
        answers_itself=end.answers_itself,
    )
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            # Nothing is begun any more, and what is said waits for as long as somebody is asked.
            await interrupts.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(leave)
        await asking.serve()
        nursery.cancel_scope.cancel()
    end.asks = asking.asks


async def _settled_or_held(harness: Harness, submission: Submission) -> Settled:
    """Wait until a submission has ended, or is held: queued, and nothing is left to place it.

    After a run without an answer, what is queued behind it stays so until somebody hands in more.
    """
    record = await submission.status()
    conversation = harness.conversation(record.conversation_id)
    if record.status == "queued":
        async with conversation.events() as batches:
            async for _ in batches:
                record = await submission.status()
                if record.status != "queued":
                    break
                if conversation.live()["run"] is None:
                    return so_far(record)
    return await submission.wait()


async def _leave_in_order(host: Host, harness: Harness, interrupts: Interrupts) -> Exit:
    """On the first signal: begin nothing more, cut streams, give running calls ten seconds."""
    await interrupts.wait()
    host.err(f"stopping: running calls get {DRAIN_SECONDS:g} s; again to leave at once", "yellow")
    left = await harness.drain(seconds=DRAIN_SECONDS)
    for id in left:
        task = harness.task(id)
        host.err(f"task {id} ({clean_line(task.kind)}) is stopped in the middle", "yellow")
    host.err(f"interrupted; `{clean_line(interrupts.resume_command)}` goes on")
    return Exit.INTERRUPTED


async def _notice_stuck(host: Host, options: Options, harness: Harness, end: _End) -> Exit:
    """Return when nothing can move any more without somebody doing something.

    While somebody is asked here it is their turn, and no reason to leave.
    """
    seen = 0
    while True:
        await trio.sleep(STUCK_LOOK_SECONDS)
        live = harness.session.storage.live_tasks(limit=10_000)
        requests = [] if end.answers_itself else harness.permissions()
        asked = {request.task for request in requests}
        # Their owners run, and do nothing but wait for the answer of a sub-agent.
        above = {id for request in requests for _, id in request.path}
        asked |= {id for id in above if harness._runtime.cycles.held_by(id)}
        blocked = [row for row in live if row.blocked]
        moving = [
            row
            for row in live
            if not row.blocked
            and row.id not in asked
            and not waits_for_others(harness.task(row.id))
        ]
        stuck = (blocked or requests) and not moving and not (requests and end.asks)
        seen = seen + 1 if stuck else 0
        if seen >= 2:
            break
    say_stuck(host, blocked)
    say_asked(host, options, requests)
    return Exit.PARKED
