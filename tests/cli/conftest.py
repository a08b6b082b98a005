"""What the command line's tests share: running a command, and a store with known contents."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import terminals
from one_application import build_the_application_once

from pidurable.cli import main
from pidurable.cli._host import Host
from pidurable.records import _codec, _json
from pidurable.records._messages import (
    AssistantMessage,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.records._tasks import ErrorInfo, OutcomeRecord, Status, Wait
from pidurable.session._seams import Failpoints
from pidurable.storage import (
    Batch,
    ConversationRow,
    EntryRow,
    HolderClaim,
    Op,
    SqliteStorage,
    TaskRow,
)

SNAPSHOTS = Path(__file__).with_name("snapshots")
START_US = 1_760_000_000_000_000
"""2025-10-09 08:53:20Z."""
HOSTILE = "safe\x1b[2K\rrm -rf /\x1b]0;title\x07\u202egnp.exe\x00\x9b31m\ud83d"


@attrs.frozen
class Result:
    """What a command left."""

    code: int
    out: str
    err: str


class Keyboard(io.StringIO):
    """A standard input that a person types at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session", autouse=True)
def _terminals_are_warm(slow_run: bool) -> Iterator[None]:
    terminals.Warm.used = not slow_run
    yield
    terminals.Warm.close()


@pytest.fixture(autouse=True)
def _the_application_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build_the_application_once(monkeypatch)


Command = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command line in this process, in an empty folder, at a known moment."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PIDURABLE_") and name != "PIDURABLE_SNAPSHOTS":
            monkeypatch.delenv(name)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(
        *argv: str,
        stdin: str = "",
        terminal: bool = False,
        failpoints: Failpoints | None = None,
    ) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", Keyboard(stdin) if terminal else io.StringIO(stdin))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = main(list(argv), failpoints=failpoints)
        assert "Traceback" not in err.getvalue()
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def check_snapshot() -> Callable[[str, str], None]:
    """Compare with a stored screen; PIDURABLE_SNAPSHOTS=write stores it."""

    def check(name: str, text: str) -> None:
        path = SNAPSHOTS / name
        if os.environ.get("PIDURABLE_SNAPSHOTS") == "write":
            path.write_text(text, encoding="utf-8")

        assert path.read_text(encoding="utf-8") == text

    return check


@pytest.fixture
def known_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A released store with a run in the middle, ended tasks of every kind, and hostile text."""
    monkeypatch.setattr(Host, "now_us", lambda self: START_US + 90_000_000)
    folder = tmp_path / ".pidurable"
    folder.mkdir()
    path = folder / "session.sqlite"
    storage = SqliteStorage(path)
    claim = HolderClaim(holder_id="test", host="here", pid=1, at_us=START_US, lease_seconds=15.0)
    head = storage.acquire(claim, takeover=False)
    writes = [*_conversations(), *_tasks(), *_entries()]
    storage.apply(Batch(epoch=head.epoch, seq=9, next_id=100, flush=True, writes=writes))
    storage.release(head.epoch)
    storage.close()
    return path


Write = tuple[Op, tuple[object, ...]]


def _conversations() -> list[Write]:
    def row(id: int, owner: int | None, key: str | None) -> Write:
        return Op.CONVERSATION, ConversationRow(id, f"u{id}", None, None, owner, key, "", START_US)

    return [row(1, None, "root"), row(30, 12, "child")]


def _task(
    id: int,
    kind: str,
    *,
    owner: int | None = None,
    conversation: int = 1,
    status: Status = Status.TERMINAL,
    seconds: float = 1.5,
    outcome: OutcomeRecord | None = None,
    blocked: str | None = None,
    recoveries: int = 0,
    input: object = None,
    phase: tuple[str, object] | None = None,
    wait: Wait | None = None,
    abort: str | None = None,
) -> list[Write]:
    ended = START_US + int(seconds * 1e6) if status is Status.TERMINAL else None
    row = TaskRow(
        id,
        conversation,
        kind,
        1,
        owner,
        None,
        0,
        None,
        None,
        START_US,
        int(status),
        START_US,
        ended,
        START_US if abort else None,
        abort,
        1 + recoveries,
        recoveries,
        0,
        START_US,
        None,
        blocked,
        outcome.status if outcome else None,
    )
    writes: list[Write] = [(Op.TASK, row), (Op.TASK_INPUT, (id, _json.dumps(input)))]
    if phase is not None:
        writes.append((Op.CHECKPOINT, (id, phase[0], _json.dumps(phase[1]), START_US)))
    if wait is not None:
        writes.append((Op.WAIT, (id, _json.dumps(_codec.encode_wait(wait)))))
    if outcome is not None:
        writes.append((Op.OUTCOME, (id, _json.dumps(_codec.encode_outcome(outcome)))))
    return writes


def _tasks() -> list[Write]:
    error = ErrorInfo(
        type="ValueError", message="no\x1b[31m good", traceback="Traceback\n  line 1\x1b[2J\nend"
    )
    done = OutcomeRecord(status="completed", result={"entry": 6}, has_result=True)
    return [
        *_task(3, "pi.generation", input={"run": None, "turn": 1}, outcome=done),
        *_task(5, "pi.tool", owner=3, input={"name": "bash", "arguments": {}}, outcome=done),
        *_task(
            10,
            "pi.generation",
            status=Status.WAITING,
            input={"run": 3, "turn": 2},
            phase=("tools", {"assistant": 8}),
            wait=Wait(on=(12, 13)),
        ),
        *_task(
            12,
            "pi.tool",
            owner=10,
            status=Status.RUNNING,
            recoveries=2,
            input={"name": "bash", "arguments": {"command": "echo \x1b]0;t\x07"}},
            phase=("execute", {"arguments": {}, "replay": "interrupt"}),
        ),
        *_task(13, "pi.tool", owner=10, outcome=OutcomeRecord(status="aborted", reason="user")),
        *_task(20, "shop.payment", outcome=OutcomeRecord(status="faulted", error=error)),
        *_task(
            21,
            "shop.\x1b[31mrefund",
            status=Status.PENDING,
            blocked="missing_definition",
            phase=("charge", {"key": "k"}),
        ),
        *_task(31, "pi.generation", conversation=30, status=Status.COMPLETING, outcome=done),
    ]


def _entries() -> list[Write]:
    def row(id: int, kind: str, message: object) -> Write:
        messages = _json.dumps(_codec.encode_messages([message]))  # type: ignore[list-item]
        return Op.ENTRY, EntryRow(id, 1, 2, kind, None, None, None, messages, None, START_US + id)

    hostile = HOSTILE.replace("\ud83d", "").replace("\x00", "")
    calls = (
        ThinkingBlock(text="hm"),
        TextBlock(text=f"I run it.\n{hostile}"),
        ToolCallBlock(name="bash", arguments={"command": "echo \x1b[1A\u202e"}),
    )

    def answer(blocks: tuple[object, ...], status: str, error: str | None = None) -> object:
        return AssistantMessage(
            blocks=blocks,  # type: ignore[arg-type]
            status=status,  # type: ignore[arg-type]
            stop_reason="stop" if status == "complete" else "aborted",
            model="scripted/m",
            usage=Usage(requests=1, output_tokens=7),
            at_us=START_US,
            error=error,
        )

    def result(call: int, text: str, code: str | None) -> object:
        return ToolResultMessage(
            call=(call, 0),
            name="bash",
            blocks=(TextBlock(text=text),),
            is_error=code is not None,
            at_us=START_US,
            code=code,
        )

    tools = (ToolDeclaration(name="bash", description="d", schema={}),)
    return [
        row(2, "pi.user", UserMessage(blocks=(TextBlock(text="Do it"),), at_us=START_US)),
        row(
            4,
            "pi.system",
            SystemMessage(sections={"cwd": "here", "old": None}, tools_added=tools, at_us=START_US),
        ),
        row(6, "pi.assistant", answer(calls, "complete")),
        row(7, "pi.tool_result", result(6, "\n".join(f"line {n}" for n in range(100)), None)),
        row(8, "pi.assistant", answer((TextBlock(text="cut he"),), "aborted", "the process died")),
        row(9, "pi.tool_result", result(8, "outcome unknown", "interrupted")),
    ]
