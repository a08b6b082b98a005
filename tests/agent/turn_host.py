"""The host of a program of turns: it does one operation after the other, and books what it learns.

It uses the public API alone, as an application would: it names its requests, hands in again what
was not acknowledged when the process died, and looks for what it has to decide. What it was told is
in the book; `facts` reads at the end what the store holds, as plain JSON, for the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from turn_outside import Book, Tools

from pidurable.agent._decisions import Deny, Happened, Interrupted, Once, Pattern, Rerun
from pidurable.agent._permissions import PermissionRequest
from pidurable.agent._services import AgentChange
from pidurable.errors import (
    AlreadyDecidedError,
    ConversationBusyError,
    NotFoundError,
    NothingToContinueError,
    RequestIdConflictError,
)
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness
from pidurable.harness._submission import Submission
from pidurable.records._entries import Entry
from pidurable.records._messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    TextBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.registry import Registry

MODES = ("follow_up", "follow_up", "steer", "steer", "reject")
WAITS = (0.0, 0.005, 0.05, 0.3, 3.0, 40.0, 700.0)


class Host:
    """Performs operations over as many harnesses as it takes."""

    def __init__(
        self, book: Book, tools: Tools, registry: Registry, *, model: str, pace: float = 1.0
    ) -> None:
        self.book = book
        self.tools = tools
        self.registry = registry
        self.model = model
        self.pace = pace
        self.patience = 2_000.0 if pace == 1.0 else 0.3
        """Seconds after which a host that wants to come to rest decides what is open."""

    # --- where it is -----------------------------------------------------------------------

    async def begin(self, harness: Harness) -> None:
        """What a host does first in each life: it hands in what was not acknowledged."""
        await harness.root(agent=AgentChange(model=self.model))
        settled = {line["marker"] for line in self.book.lines if line["what"] in ("acked", "busy")}
        for line in self.book.find("sent"):
            if line["marker"] not in settled:
                self.book.add("sent again", marker=line["marker"])
                await self._send(harness, line)

    async def places(self, harness: Harness) -> list[Conversation]:
        """The root, and the forks in the order in which they were acknowledged."""
        forks = [harness.conversation(line["id"]) for line in self.book.find("forked")]
        return [await harness.root(), *forks]

    async def _place(self, harness: Harness, number: int) -> Conversation:
        places = await self.places(harness)
        return places[number % len(places)]

    # --- operations ------------------------------------------------------------------------

    async def act(self, harness: Harness, name: str, *numbers: int) -> None:
        """Do one operation."""
        await getattr(self, f"_do_{name}")(harness, *numbers)

    async def _do_send(self, harness: Harness, place: int, mode: int) -> None:
        await self.send(harness, await self._place(harness, place), MODES[mode % len(MODES)])

    async def _do_burst(self, harness: Harness, place: int, mode: int, many: int) -> None:
        """Several senders at once: nobody knows who is first."""
        conversation = await self._place(harness, place)
        async with trio.open_nursery() as nursery:
            for number in range(2 + many):
                mode_of_one = MODES[(mode + number) % len(MODES)]
                nursery.start_soon(self.send, harness, conversation, mode_of_one)

    async def send(self, harness: Harness, conversation: Conversation, mode: str) -> str:
        """Hand in an input that nobody has handed in before."""
        sign = "wr" if mode == "write" else "in"
        marker = f"{sign}-{len(self.book.find('sent'))}."
        self.book.add("sent", marker=marker, mode=mode, conversation=conversation.id)
        await self._send(harness, self.book.lines[-1])
        return marker

    async def _send(self, harness: Harness, line: dict[str, Any]) -> None:
        marker, mode = line["marker"], line["mode"]
        conversation = harness.conversation(line["conversation"])
        try:
            match mode:
                case "write":
                    submission = await self._write(conversation, marker)
                case "note":
                    submission = await conversation.write(
                        {"marker": marker}, kind="note", request_id=marker
                    )
                case "reset":
                    submission = await conversation.reset(request_id=marker)
                case "continue":
                    submission = await conversation.continue_run(request_id=marker)
                case _:
                    submission = await conversation.submit(
                        f"please {marker}", when_busy=mode, request_id=marker
                    )
        except (ConversationBusyError, NothingToContinueError):
            self.book.add("busy", marker=marker, mode=mode)
            if mode not in ("reject", "continue"):
                self.book.add("wrong", problem=f"{marker} ({mode}) was taken for a reject")
        else:
            self.book.add("acked", marker=marker, submission=submission.id)

    async def _write(self, conversation: Conversation, marker: str) -> Submission:
        block = TextBlock(text=f"you should know {marker}")
        return await conversation.write(
            kind="told", messages=[UserMessage(blocks=(block,), at_us=0)], request_id=marker
        )

    async def _do_write(self, harness: Harness, place: int, how: int) -> None:
        """A write, or another input that is not one of the three kinds."""
        mode = ("write", "write", "note", "reset", "continue")[how % 5]
        await self.send(harness, await self._place(harness, place), mode)

    async def _do_withdraw(self, harness: Harness, which: int) -> None:
        """Take one input back, if it is not too late."""
        acked = self.book.find("acked")
        if not acked:
            return
        line = acked[-1 - which % len(acked)]
        record = await harness.submission(line["submission"]).withdraw()
        if record is not None:
            self.book.add("withdrawn", marker=line["marker"])

    async def _do_compact(self, harness: Harness, place: int) -> None:
        """Make room by hand; what becomes of it is the task's own affair."""
        conversation = await self._place(harness, place)
        await conversation.compact("be short")
        self.book.add("compacting")

    # --- decisions -------------------------------------------------------------------------

    async def _do_decide(self, harness: Harness, which: int, how: int, late: int) -> None:
        """A person decides one of the open requests; sometimes the tool is replaced meanwhile."""
        found = await self._asked(harness)
        if found:
            request = found[which % len(found)]
            if not late:
                await self._do_reload(harness, 0)
            await self._decide(harness, request, how)

    async def _asked(self, harness: Harness) -> list[PermissionRequest]:
        """The open requests; if there is none a person looks again for a while."""
        for _ in range(60):
            found = harness.permissions()
            if found:
                return found
            await trio.sleep(0.05 * self.pace)
        return []

    async def _do_duel(self, harness: Harness, which: int) -> None:
        """Two people decide one request at once, and not the same: one of them wins."""
        found = await self._asked(harness)
        if not found:
            return
        request = found[which % len(found)]
        before = len(self.book.find("decided"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._decide, harness, request, 0)
            nursery.start_soon(self._decide, harness, request, 2)
        if len(self.book.find("decided")) > before + 1:
            self.book.add("wrong", problem=f"two decisions of request {request.id} count")
        self.book.add("duel")

    async def _decide(self, harness: Harness, request: PermissionRequest, how: int) -> None:
        marker = str(request.arguments["what"])  # type: ignore[index, call-overload]
        pattern = '{"what": "' + marker[: 2 + request.id % 2] + "*"
        decisions: dict[str, tuple[Any, ...]] = {
            "call": (Once(), Once(), Deny("rather not"), Pattern(pattern)),
            "effect": (Rerun(), Happened(f"it happened, {marker}"), Interrupted()),
        }
        among = decisions[request.subject]
        decision = among[how % len(among)]
        facts = {
            "id": request.id,
            "marker": marker,
            "subject": request.subject,
            "decision": type(decision).__name__.lower(),
            # What follows says why it is asked again.
            "version": request.reason.partition("\n")[0],
            "deep": any(kind == "conversation" for kind, _ in request.path[1:]),
            "pattern": getattr(decision, "pattern", None),
        }
        self.book.add("deciding", **facts)
        try:
            await harness.decide(request.id, decision, by="somebody")
        except AlreadyDecidedError:
            self.book.add("too late", **facts)
        else:
            self.book.add("decided", **facts)

    async def _do_again(self, harness: Harness, which: int, other: int) -> None:
        """A sender that was told says it again; or uses its request id for something else."""
        acked = self.book.find("acked")
        if not acked:
            return
        line = acked[which % len(acked)]
        (sent,) = self.book.find("sent", marker=line["marker"])
        if sent["mode"] not in MODES:
            return
        conversation = harness.conversation(sent["conversation"])
        text = f"please {line['marker']}" + (" other" if other else "")
        try:
            submission = await conversation.submit(
                text, when_busy=sent["mode"], request_id=line["marker"]
            )
        except RequestIdConflictError:
            if not other:
                raise
            self.book.add("conflict", marker=line["marker"])
            return
        if other:
            self.book.add("wrong", problem=f"{line['marker']} was taken with other content")
        elif submission.id != line["submission"]:
            self.book.add("wrong", problem=f"{line['marker']} is two submissions")
        else:
            self.book.add("told again", marker=line["marker"])

    async def _do_abort(self, harness: Harness, place: int) -> None:
        conversation = await self._place(harness, place)
        self.book.add("aborting", conversation=conversation.id)
        taken = await conversation.abort()
        self.book.add("aborted", taken=[record.id for record in taken])

    async def _do_abort_task(self, harness: Harness, which: int) -> None:
        """Abort any task: a run, one call of a round, something deep below."""
        live = [task.id for task in harness.tasks(limit=10_000) if task.outcome is None]
        if live:
            await harness.abort_task(live[which % len(live)])
            self.book.add("aborted task")

    async def _do_fork(self, harness: Harness, place: int, back: int) -> None:
        if len(self.book.find("forked")) >= 2:
            return
        conversation = await self._place(harness, place)
        history = await conversation.history(limit=50)
        at = history[-1 - back % len(history)].id if history and back else None
        inside = bool(conversation.live()["calls"])
        try:
            fork = await conversation.fork(at)
        except NotFoundError:
            # What the history had shown was of a conversation above, and is not its own to fork.
            if at is None:
                raise
            return
        self.book.add("forked", id=fork.id, inside=inside)

    async def _do_configure(self, harness: Harness, place: int, how: int) -> None:
        conversation = await self._place(harness, place)
        changes = (
            AgentChange(instructions=f"be brief {how}"),
            AgentChange(tools=["once", "safe", "look", "subagent", "asked", "nest"]),
            AgentChange(tools=None),
            AgentChange(turns_max=2),
            AgentChange(turns_max=None),
            AgentChange(model="scripted/nobody"),
            AgentChange(model=self.model),
        )
        await conversation.configure(changes[how % len(changes)])

    async def _do_reload(self, harness: Harness, how: int) -> None:
        """Another version of the same extension, while its old one may be at work."""
        del harness
        self.tools.reloads += 1
        self.registry.install(self.tools.extension())
        self.book.add("reloaded", reloads=self.tools.reloads)

    async def _do_wait(self, harness: Harness, how: int) -> None:
        del harness
        await trio.sleep(min(WAITS[how % len(WAITS)] * self.pace, self.patience))

    async def _do_turns(self, harness: Harness, many: int) -> None:
        """Let the loop go round so many times."""
        del harness
        for _ in range(many):
            await trio.lowlevel.checkpoint()

    # --- the end ---------------------------------------------------------------------------

    async def finish(self, harness: Harness, calm: Callable[[], None]) -> dict[str, Any]:
        """Let everything come to rest, ask once more everywhere, and tell what is there.

        Args:
            harness: What is open.
            calm: Called when the model is to answer by plain texts from now on.
        """
        harness.start()
        await self._rest(harness)
        self.tools.calm = True
        calm()
        for conversation in await self.places(harness):
            await conversation.configure(AgentChange(model=self.model, tools=None, turns_max=None))
            if await self._last(harness, conversation) == "context_overflow":
                # The newest round alone may be larger than a tiny window; there is a way out.
                await conversation.reset()
                await self._last(harness, conversation)
                self.book.add("reset after overflow")
        await self._rest(harness)
        ids = {line["submission"] for line in self.book.find("acked")}
        return await facts(harness, sorted(ids))

    async def _last(self, harness: Harness, conversation: Conversation) -> str | None:
        """Ask once more, and return why there is no answer."""
        marker = await self.send(harness, conversation, "follow_up")
        line = self.book.find("acked", marker=marker)[-1]
        settled = await harness.submission(line["submission"]).wait()
        self.book.add("last", marker=marker, status=settled.status, reason=settled.reason)
        return settled.reason

    async def _rest(self, harness: Harness) -> None:
        """Wait until nothing runs; whatever is still open then is refused."""
        with trio.fail_after(1e4 * self.patience):
            while True:
                with trio.move_on_after(self.patience):
                    await harness.wait_for_idle()
                    # What makes room in the background is not waited for by that.
                    for task in harness.tasks(limit=10_000):
                        if task.outcome is None:
                            await harness.wait_for_task(task.id)
                    return
                if self.tools.dead():
                    # What is left of a host that died sleeps, and nobody asks the storage again.
                    raise OSError("this host is dead")
                for request in harness.permissions():
                    await self._decide(harness, request, 2)


# --- what the store holds -------------------------------------------------------------------------


async def facts(harness: Harness, submissions: list[int]) -> dict[str, Any]:
    """All that the judge wants to know of the store, as JSON."""
    owners: list[int | None] = [None, *(task.id for task in harness.tasks(limit=100_000))]
    conversations: dict[str, Any] = {}
    for owner in owners:
        for row in harness.session.storage.conversations_by_owner(owner):
            conversation = harness.conversation(row.id)
            entries = await conversation.history(limit=100_000)
            live = conversation.live()
            conversations[str(row.id)] = {
                "owner": owner,
                "fork": conversation.record.parent is not None,
                "own after": conversation.record.parent_entry or 0,
                "entries": [told_entry(entry) for entry in entries],
                "busy": live["run"] is not None or bool(live["calls"]) or live["partial"],
                "open": [each.id for each in await conversation.open_submissions()],
                "inbox": len(conversation.inbox()),
            }
    return {
        "conversations": conversations,
        "submissions": await told_submissions(harness, submissions),
        "live": [
            f"{task.kind} {task.id}" for task in harness.tasks(limit=100_000) if not task.outcome
        ],
    }


async def told_submissions(harness: Harness, ids: list[int]) -> dict[str, Any]:
    """How submissions stand."""
    told: dict[str, Any] = {}
    for id in ids:
        record = await harness.submission(id).status()
        told[str(id)] = {
            "conversation": record.conversation_id,
            "status": record.status,
            "reason": record.reason,
            "kind": record.kind,
            "mode": record.when_busy,
            "entry": record.entry,
            "answer": record.answer,
            "run": record.run,
        }
    return told


def told_entry(entry: Entry) -> dict[str, Any]:
    """An entry, as JSON."""
    return {
        "id": entry.id,
        "kind": entry.kind,
        "head": entry.head,
        "data": entry.data if entry.kind in ("observed", "note") else None,
        "messages": [told_message(message) for message in entry.messages],
    }


def told_message(message: Message) -> dict[str, Any]:
    """A message, as JSON: who speaks, what, which calls."""
    if isinstance(message, SystemMessage):
        return {"role": "system", "text": ""}
    text = "".join(block.text for block in message.blocks if isinstance(block, TextBlock))
    if isinstance(message, AssistantMessage):
        calls = [[call.name, call.arguments] for call in message.tool_calls]
        return {"role": "assistant", "text": text, "status": message.status, "calls": calls}
    if isinstance(message, ToolResultMessage):
        return {
            "role": "result",
            "text": text,
            "call": list(message.call),
            "name": message.name,
            "is_error": message.is_error,
            "code": message.code,
        }
    assert isinstance(message, UserMessage)
    return {"role": "user", "text": text}


__all__ = ["Host", "facts", "told_message", "told_submissions"]
