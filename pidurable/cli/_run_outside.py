"""`pidurable run` beside a process that holds the session: hand in, follow, print the answer.

The holder does the work, with its own models and tools; what is shown here is read from the store.
However this process ends, what the holder has taken up is done. Where the holder goes away before
the answer is there, the caller goes on by holding the session itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio

from pidurable.cli._approvals import asked_lines
from pidurable.cli._conversations import entry_lines
from pidurable.cli._errors import Exit
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._outside import live_holder, say_who_is_asked, take_back
from pidurable.cli._render import clean_line
from pidurable.cli._run_end import (
    report,
    say_asked,
    say_stuck,
    so_far,
    tell_unended,
    waits_for_others,
)
from pidurable.cli._sessions import store_exists
from pidurable.cli._signals import Interrupts
from pidurable.errors import StorageAccessError, WaitTimeoutError
from pidurable.harness._client import Client, open_client
from pidurable.harness._event_json import event_json
from pidurable.harness._event_making import entry_event
from pidurable.harness._reader import HolderView
from pidurable.harness._submission import Settled
from pidurable.records._entries import Entry

__all__ = ["Handed", "run_outside"]

LOOK_SECONDS = 0.1
LOOKS_PER_QUESTION = 5
"""So often it is looked for entries before it is asked whether anything can still move."""
ENTRIES_AT_ONCE = 1_000


@attrs.define(eq=False)
class Handed:
    """A prompt on its way into a session that others may hold."""

    prompt: str
    request_id: str | None
    key: str
    """Of the command: it counts once, however often and to whomever it is handed in."""
    begun: bool = False
    """Whether it may have been handed in already."""
    submission: int | None = None
    """What became of it, once that is known."""

    async def submit(self, client: Client, timeout: float | None) -> int:  # noqa: ASYNC109
        """Hand it in, or wait for the answer if that was done, and return the submission."""
        self.begun = True
        self.submission = await client.submit(
            self.prompt, request_id=self.request_id, key=self.key, timeout=timeout
        )
        return self.submission


async def run_outside(
    host: Host, options: Options, handed: Handed, interrupts: Interrupts
) -> int | None:
    """Have the holder do it; None where nobody holds the session, or nobody does any more."""
    if not store_exists(options.store):
        return None
    try:
        async with open_client(options.store) as client:
            holder = await live_holder(client.reader)
            if holder is None:
                return None
            record = holder.record
            what = "handing in to it; its models and tools do the work"
            say_who_is_asked(host, record.pid, record.host, what=what)
            return await _Follow(host, options, handed, client, holder).to_the_end(interrupts)
    except StorageAccessError:
        if handed.begun:
            raise
        return None  # empty or half created: opening it for work decides


@attrs.define(eq=False)
class _Follow:
    """One prompt, followed by reading the store."""

    host: Host
    options: Options
    handed: Handed
    client: Client
    holder: HolderView

    async def to_the_end(self, interrupts: Interrupts) -> int | None:
        """The exit code; None where the holder has gone before there was an answer."""
        ended: list[int | None] = []
        failed: list[Exception] = []
        left = False
        async with trio.open_nursery() as nursery:

            async def first(work: Callable[[], Awaitable[int | None]]) -> None:
                try:
                    ended.append(await work())
                except Exception as error:
                    # Raised outside of the nursery, as itself and not in a group.
                    failed.append(error)
                nursery.cancel_scope.cancel()

            async def interrupted() -> None:
                nonlocal left
                await interrupts.wait()
                left = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(first, self._hand_in_and_follow)
            nursery.start_soon(first, self._until_gone)
            nursery.start_soon(interrupted)
        if ended:
            return ended[0]
        if left:
            # Only now: the thread that handed in is back, so nothing is handed in behind this.
            return await self._leave()
        raise failed[0]

    async def _hand_in_and_follow(self) -> int:
        timeout = self.options.timeout
        started = trio.current_time()
        submission = await self.handed.submit(self.client, timeout)
        reader, host = self.client.reader, self.host
        shown, looks, stuck = 0, 0, 0
        told: set[int] = set()
        while True:
            record = await reader.submission(submission)
            if record.entry is not None:
                shown = max(shown, record.entry)
                for entry in await self._newer(record.conversation_id, shown):
                    host.out_events([event_json(entry_event(entry))])
                    host.err(entry_lines(entry), "dim")
                    shown = entry.id
            if record.status in ("done", "unanswered"):
                settled = await self.client.wait_for_submission(submission, timeout=0)
                return await self._report(settled)
            looks += 1
            if looks % LOOKS_PER_QUESTION == 0:
                live = await reader.live(record.conversation_id)
                if record.status == "queued" and (live or {}).get("run") is None:
                    return await self._report(so_far(record))
                requests = await reader.permissions(record.conversation_id)
                for request in requests:
                    if request.id not in told:
                        told.add(request.id)
                        host.err(asked_lines(request, self.options))
                # Their owners may run, and do nothing but wait for the answer of a sub-agent.
                asked = {id for each in requests for _, id in (*each.path, ("", each.task))}
                tasks = await reader.tasks(live=True)
                blocked = [task for task in tasks if task.blocked]
                moving = [
                    task
                    for task in tasks
                    if not task.blocked and task.id not in asked and not waits_for_others(task)
                ]
                # Whoever sits at a terminal may decide at another one, and sees the answer here.
                waits = requests and not host.is_terminal(host.stderr)
                stuck = stuck + 1 if (blocked or waits) and not moving else 0
                if stuck >= 2:
                    say_stuck(host, blocked)
                    say_asked(host, self.options, requests, goes_on=self._goes_on())
                    await self._tell_unended()
                    return Exit.PARKED
            if timeout is not None and trio.current_time() - started >= timeout:
                host.err(str(WaitTimeoutError("the answer", timeout)), "yellow")
                host.err(f"  next: {self._goes_on()}")
                await self._tell_unended()
                return Exit.TIMED_OUT
            await trio.sleep(LOOK_SECONDS)

    def _goes_on(self) -> str:
        # Another `run` ends with its own answer, whatever else it has begun by then.
        resume = clean_line(self.options.resume_command)
        return f"it goes on in process {self.holder.record.pid} while that runs, then by `{resume}`"

    async def _newer(self, conversation_id: int, after: int) -> list[Entry]:
        return await self.client.reader.entries(conversation_id, after=after, limit=ENTRIES_AT_ONCE)

    async def _entries(self, settled: Settled) -> list[Entry]:
        record = await self.client.reader.submission(settled.id)
        found = await self._newer(record.conversation_id, settled.entry or 0)
        last = settled.answer
        return [entry for entry in found if last is None or entry.id <= last]

    async def _report(self, settled: Settled) -> int:
        return await report(self.host, self.options, [settled], self._entries, single=True)

    async def _tell_unended(self, nothing: str = "") -> None:
        settled, id = None, self.handed.submission
        if id is not None:
            record = await self.client.reader.submission(id)
            settled = [so_far(record)]
            if record.status in ("done", "unanswered"):
                settled = [await self.client.wait_for_submission(id, timeout=0)]
        await tell_unended(self.host, settled, self._entries, detail=nothing)

    async def _until_gone(self) -> None:
        # It may die without a word, so there is nothing that could tell us.
        while await live_holder(self.client.reader) is not None:  # noqa: ASYNC110
            await trio.sleep(LOOK_SECONDS * LOOKS_PER_QUESTION)
        self.host.err("the process that held the session has gone; going on here", "yellow")

    async def _leave(self) -> int:
        """On the first signal: take back what nobody has begun, leave the rest to the holder."""
        if await take_back(self.client, self.handed.key):
            nothing = "taken back: nothing was handed in"
            self.host.err(nothing)
        else:
            nothing = "left before anything is known to be stored"
            self.host.err(f"left; {self._goes_on()}")
            self.host.say("  next: `pidurable conversation log` shows how far it came")
        await self._tell_unended(nothing)
        return Exit.INTERRUPTED
