"""Saying things in a conversation from the command line: alone, and beside a process that works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from pidurable import AgentChange, Harness, Registry, Settings, open_client, open_harness
from pidurable.agent._documents import InboxDocument, address_of
from pidurable.agent._inbox import write
from pidurable.cli import _conversation_writes
from pidurable.errors import (
    ConversationBusyError,
    NotFoundError,
    NothingToContinueError,
    WaitTimeoutError,
)
from pidurable.records._messages import TextBlock, UserMessage
from pidurable.testing import ScriptedModel, Step

Command = Callable[..., Any]


@pytest.fixture
def store(command: Command, tmp_path: Path) -> Path:
    """A store whose root was asked once; the script answers by position, then fails."""
    (tmp_path / "s.yaml").write_text("- text: first answer\n- text: second answer\n")
    assert command("run", "one", "--script", "s.yaml").code == 0
    return tmp_path / ".pidurable" / "session.sqlite"


def shown(command: Command) -> Any:
    """Where the root stands."""
    return json.loads(command("conversation", "show", "-o", "json").out)["documents"]


def test_input_without_a_holder_waits_for_a_resume(command: Command, store: Path) -> None:
    """It is stored and named, nothing runs, and `resume` answers it."""
    made = command("conversation", "submit", "two", "--request-id", "r")
    again = command("conversation", "submit", "two", "--request-id", "r")
    busy = command("conversation", "submit", "three", "--reject")
    last = command("resume")

    assert made.code == again.code == 0
    assert "handed in: placed" in made.out
    assert made.out == again.out
    assert "nothing was run. `pidurable resume` goes on" in made.err
    assert (busy.code, "is busy with run" in busy.err) == (1, True)
    assert (last.code, last.out) == (0, "second answer\n")


def test_what_is_queued_is_shown_and_taken_back_with_its_text(
    command: Command, store: Path
) -> None:
    """Steers, follow-ups and notes stand in the queue in order, until somebody takes them back."""
    command("conversation", "submit", "two")
    command("conversation", "submit", "-", "--steer", stdin="steer\x1b[2J me")
    command("conversation", "write", "a note")
    sheet = command("conversation", "show").out
    ids = command("conversation", "show", "-o", "ids").out
    taken = command("conversation", "withdraw", "-", stdin=ids)
    late = command("conversation", "withdraw", ids.split()[0])

    assert '(steer): "steer\\u001b[2J me"' in sheet
    assert '(write): "a note"' in sheet
    assert taken.code == 0
    assert "steer me" in taken.out
    assert "a note" in taken.out
    assert shown(command)["pi.inbox"]["items"] == []
    assert (late.code, late.err) == (0, "")


def test_what_was_taken_back_is_shown_also_where_the_next_cannot_be(
    command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is out of the queue is on the screen, whatever ends the command."""
    for text in ("two", "three", "four"):
        command("conversation", "submit", text)
    ids = command("conversation", "show", "-o", "ids").out.split()
    change, count = _conversation_writes.change, iter(range(9))

    async def silent_from_the_second_on(*args: Any, **options: Any) -> Any:
        if next(count):
            raise WaitTimeoutError("the answer", 1)
        return await change(*args, **options)

    monkeypatch.setattr(_conversation_writes, "change", silent_from_the_second_on)
    found = command("conversation", "withdraw", *ids)

    assert found.code == 8
    assert f"submission {ids[0]} taken back\n    three" in found.out


def test_a_note_is_seen_by_the_next_request_and_asks_nothing(command: Command, store: Path) -> None:
    """Written while nothing runs it stands in the log at once."""
    note = command("conversation", "write", "mind the gap")
    log = command("conversation", "log")

    assert "written: done" in note.out
    assert "mind the gap" in log.out
    assert "busy" not in log.err


def test_an_aborted_run_gives_back_what_was_queued_and_can_be_continued(
    command: Command, store: Path
) -> None:
    """Abort prints the queued text, `resume` ends the run, and `continue` asks the model again."""
    command("conversation", "submit", "two")
    command("conversation", "submit", "queued text")
    aborted = command("conversation", "abort")
    command("resume")
    again = command("conversation", "continue")
    last = command("resume")
    nothing = command("conversation", "continue")

    assert "queued text" in aborted.out
    assert "is to be aborted" in aborted.err
    assert "continues the run: placed" in again.out
    assert (last.code, last.out) == (0, "second answer\n")
    assert nothing.code == 1
    assert "continue" in nothing.err


def test_what_is_said_after_an_abort_is_answered_by_a_resume(command: Command, store: Path) -> None:
    """The sheet says when its turn comes, and `resume` ends the one run and answers the other."""
    command("conversation", "submit", "two")
    command("conversation", "abort")
    late = command("conversation", "submit", "no, this")
    run = shown(command)["pi.live"]["run"]
    sheet = command("conversation", "show").out
    last = command("resume")

    assert "handed in: queued" in late.out
    assert f'(when run {run} has been aborted): "no, this"' in sheet
    # One of the two that were open has no answer.
    assert (last.code, last.out) == (1, "second answer\n")
    assert shown(command)["pi.inbox"]["items"] == []


def test_a_compaction_is_a_task_that_a_resume_runs(command: Command, store: Path) -> None:
    """It is stored with its instructions; nothing is old enough here, so it skips."""
    made = command("conversation", "compact", "--instructions", "keep names", "-o", "json")
    task = json.loads(made.out)["task"]
    command("resume")
    found = json.loads(command("task", "show", str(task), "-o", "json").out)

    assert made.code == 0
    assert found["input"]["instructions"] == "keep names"
    assert found["outcome"]["status"] == "completed"


def test_a_reset_lets_the_context_start_anew(command: Command, store: Path) -> None:
    """It stands in the log, and everything before it does too."""
    reset = command("conversation", "reset")
    log = command("conversation", "log").out

    assert "reset: done" in reset.out
    assert log.index("first answer") < log.index("pi.reset")


async def test_what_is_queued_by_name_is_shown_with_its_text(
    command: Command, tmp_path: Path
) -> None:
    """A summary that the full queue has no room for stands with its submission."""
    store = tmp_path / "s.sqlite"
    models = ScriptedModel([Step(text=("a",) * 1_000, delay=0.05)]).models()
    settings = Settings(queued_max=1)
    note = UserMessage(blocks=(TextBlock(text="what was said"),), at_us=0)
    async with open_harness(
        store, registry=Registry(), models=models, settings=settings, create=True
    ) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        await root.submit("go")
        await root.submit("later")
        session, runtime = harness.session, harness._runtime
        await runtime.commit(
            lambda tx: write(session, tx, root.id, kind="note", messages=[note], crowds=False)
        )
        items = session.doc_value(address_of(InboxDocument, root.id))["items"]

    def show() -> str:
        return command("conversation", "show", "--store", str(store)).out  # type: ignore[no-any-return]

    sheet = await trio.to_thread.run_sync(show)

    assert [each.get("entry", "") for each in items] == ["", None]
    assert '(follow_up): "later"' in sheet
    assert '(write): "what was said"' in sheet


@pytest.mark.parametrize(
    "argv",
    [
        ("submit", " "),
        ("submit", "x", "--conversation", "99"),
        ("submit", "x", "--steer", "--reject"),
        ("write", ""),
        ("withdraw", "99"),
        ("withdraw",),
        ("continue", "99"),
        ("compact", "--instructions", ""),
        ("show", "99"),
    ],
    ids=" ".join,
)
def test_mistakes_are_refused_with_what_to_do(
    command: Command, store: Path, argv: tuple[str, ...]
) -> None:
    """Nothing is stored, and the way out is named."""
    before = command("conversation", "show", "-o", "json").out
    found = command("conversation", *argv)

    assert found.code in (2, 4)
    assert found.err.startswith("pidurable: ")
    assert command("conversation", "show", "-o", "json").out == before


async def test_a_client_does_the_same_beside_a_holder(command: Command, tmp_path: Path) -> None:
    """Write, withdraw, continue, compact and abort give what the calls of a harness give."""
    store = tmp_path / "s.sqlite"
    models = ScriptedModel([Step(text=("a",) * 1_000, delay=0.05), "done"]).models()
    async with _held(store, models) as harness, open_client(store) as client:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        note = UserMessage(blocks=(TextBlock(text="mind the gap"),), at_us=0)
        written = await client.write(kind="note", messages=[note], request_id="n")
        same = await client.write(kind="note", messages=[note], request_id="n")
        with pytest.raises(NothingToContinueError):
            await client.continue_run((await harness.create_conversation()).id)
        first = await client.submit("go")
        later = await client.submit("later")
        last = await client.submit("last")
        with pytest.raises(ConversationBusyError):
            await client.continue_run(root.id)
        taken = await client.withdraw_submission(later)
        late = await client.withdraw_submission(first)
        with pytest.raises(NotFoundError):
            await client.withdraw_submission(10**6)
        aborted = await client.abort_conversation(root.id, "enough")
        settled = await client.wait_for_submission(first, timeout=60)
        again = await client.continue_run(root.id, key="k")
        twice = await client.continue_run(root.id, key="k")
        await client.abort_conversation(root.id)
        await client.wait_for_submission(again, timeout=60)
        task = await client.compact(root.id, "keep names")
        outcome = await harness.wait_for_task(task)  # type: ignore[arg-type]
        entries = [entry.kind for entry in await root.history()]

    assert written == same
    assert entries[0] == "note"
    assert taken is not None
    assert (taken.content[0]["text"], late) == ("later", None)
    assert [record.id for record in aborted] == [last]
    assert (settled.reason, settled.detail) == ("aborted", "enough")
    assert again == twice
    assert outcome.status in ("completed", "failed")


def _held(store: Path, models: Any) -> Any:
    return open_harness(
        store,
        registry=Registry(),
        models=models,
        settings=Settings(commands_seconds=0.01),
        create=True,
    )


async def test_the_verbs_ask_the_holder(command: Command, tmp_path: Path) -> None:
    """Beside a process that works, each verb says who does it, and it is done at once."""
    store = tmp_path / "s.sqlite"
    models = ScriptedModel([Step(text=("a",) * 1_000, delay=0.05)]).models()
    async with _held(store, models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))

        def verbs(harness: Harness = harness) -> list[Any]:
            more = ("--store", str(store))
            return [
                command("conversation", "submit", "go", *more),
                command("conversation", "submit", "later", "--steer", *more),
                command("conversation", "write", "a note", *more),
                command("conversation", "abort", *more),
            ]

        found = await trio.to_thread.run_sync(verbs)
        await harness.wait_for_idle()
        history = [entry.kind for entry in await root.history()]

    assert [each.code for each in found] == [0, 0, 0, 0]
    assert all("holds this session: asking it" in each.err for each in found)
    assert not any("nothing was run" in each.err for each in found)
    assert "later" in found[3].out
    assert history[-1] == "note"
