"""A tree of sub-agents under one slot for tools, killed again and again, and aborted at its root.

    python tests/agent/subagent_tree.py [kills] [seed]

Every agent but the leaves asks the agents below it, all in one round, and waits for them in its
tools; one tool may run at a time (`{"pi.tool": 1}`). Each life of the host is a process of its own,
which kills itself with SIGKILL at a drawn pass of a drawn point, until there were enough kills; the
next life asks for the same thing and waits. In the end there is one conversation for each agent,
with one input and one answer, and the answer of the root holds that of each leaf once. A second
tree is aborted at the root while it grows, and killed while it ends: then nothing is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import attrs
import trio

from pidurable import (
    AgentChange,
    AssistantMessage,
    Extension,
    Harness,
    Registry,
    Settings,
    ToolCall,
    UserMessage,
    open_harness,
    tool,
)
from pidurable.agent._script import RequestView, ScriptedCall, Step
from pidurable.agent._scripted import ScriptedModel
from pidurable.testing import Failpoints, KillAt

POINTS = ("commit.before", "commit.after", "CP1", "CP2", "CP3", "CP4", "CP5")
SECONDS_MAX = 60.0
"""A life that takes longer is stuck."""


class TreeScript:
    """What an agent answers depends on its place alone: `r` is the root, `r.0.1` a leaf."""

    repeat_last = False
    context_window = None

    def __init__(self, widths: tuple[int, ...], log: str) -> None:
        self.widths = widths
        self.log = log
        self.steps: list[Step] = []

    def choose(self, view: RequestView) -> int:
        """Ask those below, and then answer with what they said."""
        path = view.user.split()[-1]
        level = path.count(".")
        if view.turn:
            step = Step(text=f"<{path} {' '.join(view.results)}>")
        elif level < len(self.widths):
            below = [f"{path}.{number}" for number in range(self.widths[level])]
            step = Step(calls=tuple(_call("subagent", each) for each in below))
        else:
            step = Step(calls=(_call("leaf", path),))
        self.steps.append(step)
        return len(self.steps) - 1


def _call(name: str, path: str) -> ScriptedCall:
    return ScriptedCall(name=name, arguments={"path": path})


def registry_of(folder: Path) -> Registry:
    """The tools; what they do outside is a line of the ledger."""

    def book(call: ToolCall, what: str) -> None:
        line = f"{what} {call.id}\n".encode()
        file = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line)
        os.close(file)

    @tool(replay="safe")
    async def subagent(path: str, call: ToolCall) -> str:
        """Ask the agent at a place.

        Args:
            path: The place.
        """
        child = await call.child(agent=AgentChange(instructions="answer"))
        book(call, f"asked {path} {child.id}")
        submission = await child.submit(f"grow {path}", request_id=call.key("task"))
        return str((await submission.wait()).text)

    @tool
    async def leaf(path: str, call: ToolCall) -> str:
        """Do what a leaf does, which may happen once only.

        Args:
            path: The place.
        """
        book(call, f"leaf {path}")
        await trio.sleep(0.002)
        return f"leaf {path}"

    registry = Registry()
    registry.install(Extension("tree", tools=[subagent, leaf]))
    return registry


def ledger(folder: Path) -> list[str]:
    """What happened outside."""
    path = folder / "ledger"
    return path.read_text().splitlines() if path.exists() else []


# --- lives ----------------------------------------------------------------------------------------


async def live(
    folder: Path, widths: tuple[int, ...], failpoints: Failpoints | None, *, abort_at: int | None
) -> None:
    """Ask the root and wait; or abort it once so many leaves have begun."""
    model = ScriptedModel(())
    model._script = TreeScript(widths, str(folder / "requests"))  # type: ignore[assignment]
    # Each of these deaths is planned: nobody is to be blamed for them.
    settings = Settings(limits={"pi.tool": 1}, recoveries_max=1_000)
    async with open_harness(
        folder / "tree.sqlite",
        registry=registry_of(folder),
        models=model.models(),
        settings=settings,
        durability="process",
        failpoints=failpoints,
    ) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/model"))
        with trio.fail_after(SECONDS_MAX):
            submission = await root.submit("grow r", request_id="r")
            if abort_at is not None:
                while _leaves(folder) < abort_at:  # noqa: ASYNC110 - other lives wrote it too
                    await trio.sleep(0.002)
                await root.abort()
            settled = await submission.wait()
            await harness.wait_for_idle()
            model.check()
            found = await described(harness)
    found["status"] = settled.status
    found["text"] = settled.text if settled.status == "done" else settled.reason
    (folder / "report.json").write_text(json.dumps(found))


def _leaves(folder: Path) -> int:
    return sum(line.startswith("leaf ") for line in ledger(folder))


async def described(harness: Harness) -> dict[str, Any]:
    """Each conversation: how often it was asked, and what it answered."""
    owners: list[int | None] = [None, *(task.id for task in harness.tasks(limit=100_000))]
    told: list[dict[str, Any]] = []
    for owner in owners:
        for row in harness.session.storage.conversations_by_owner(owner):
            conversation = harness.conversation(row.id)
            messages = [
                message
                for entry in await conversation.history(limit=10_000)
                for message in entry.messages
            ]
            told.append(
                {
                    "asked": [str(m.blocks) for m in messages if isinstance(m, UserMessage)],
                    "answers": [
                        m.text
                        for m in messages
                        if isinstance(m, AssistantMessage)
                        if m.status == "complete" and not m.tool_calls
                    ],
                    "open": len(await conversation.open_submissions()),
                    "busy": conversation.live()["run"] is not None,
                }
            )
    live = [task.kind for task in harness.tasks(limit=100_000) if task.outcome is None]
    return {"conversations": told, "live": live}


def in_process(
    folder: Path, widths: tuple[int, ...], kill: KillAt | None, *, abort_at: int | None = None
) -> bool:
    """Live one life in a fork; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            logging.getLogger("pidurable").setLevel(logging.CRITICAL + 1)
            trio.run(lambda: live(folder, widths, kill, abort_at=abort_at))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # the fork must not run what is below
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"a life ended with {code}")
    return code != 0


# --- trees ----------------------------------------------------------------------------------------


@attrs.define
class Report:
    """What the trees have shown."""

    agents: int
    kills: int = 0
    wanted: int = 0
    answers: int = 0
    twice: int = 0
    effects: int = 0
    requests: int = 0
    refusals: int = 0
    left: int = 0
    abort_kills: int = 0
    problems: list[str] = attrs.Factory(list)
    seconds: float = 0.0

    def line(self) -> str:
        """The last line."""
        passed = (
            not self.problems
            and (self.answers, self.twice, self.left) == (self.agents, 0, 0)
            and self.kills >= self.wanted
            and self.refusals == 0
        )
        return (
            f"subagents: agents={self.agents} kills={self.kills} answers={self.answers} "
            f"twice={self.twice} effects={self.effects} requests={self.requests} "
            f"refusals={self.refusals} abort-kills={self.abort_kills} left={self.left} "
            f"{self.seconds:.1f} s {'PASS' if passed else 'FAIL'}"
        )


def run(widths: tuple[int, ...], kills: int, seed: int) -> Report:
    """Grow one tree to its end and abort another."""
    agents = 1
    level = 1
    for width in widths:
        level *= width
        agents += level
    report = Report(agents=agents, wanted=kills)
    started = time.perf_counter()
    random = Random(f"{seed}/subagents")
    with tempfile.TemporaryDirectory() as name:
        grown, aborted = Path(name) / "grown", Path(name) / "aborted"
        grown.mkdir()
        aborted.mkdir()
        _grow(report, grown, widths, random)
        _abort(report, aborted, widths, random)
    report.seconds = time.perf_counter() - started
    return report


def _kill(random: Random, most: int) -> KillAt:
    point = random.choice(POINTS)
    # Commits are many; a named point is passed once or twice by an agent.
    return KillAt(point, nth=random.randint(1, most if point.startswith("commit") else most // 6))


def _grow(report: Report, folder: Path, widths: tuple[int, ...], random: Random) -> None:
    # Each life gets about as far as it must for the kills to be spread over the whole tree.
    most = max(6, report.agents * 16 // max(1, report.wanted))
    # A life may pass its point too rarely and end; a drawn point that is passed at once is next.
    while report.kills < report.wanted and in_process(folder, widths, _kill(random, most)):
        report.kills += 1
    in_process(folder, widths, None)
    found = json.loads((folder / "report.json").read_text())
    _judge(report, found, folder)
    if found["status"] != "done":
        report.problems.append(f"the root is {found['status']}: {found['text']}")


def _judge(report: Report, found: dict[str, Any], folder: Path) -> None:
    conversations = found["conversations"]
    report.answers = sum(bool(each["answers"]) for each in conversations)
    report.twice = sum(
        len(each["answers"]) > 1 or len(each["asked"]) != 1 for each in conversations
    )
    leaves = Counter(line.split()[1] for line in ledger(folder) if line.startswith("leaf "))
    report.effects = sum(leaves.values())
    report.twice += sum(count > 1 for count in leaves.values())
    children: dict[str, set[str]] = {}
    for line in ledger(folder):
        if line.startswith("asked "):
            _, path, child, call = line.split()
            children.setdefault(path, set()).add(f"{child} {call}")
    report.twice += sum(len(each) > 1 for each in children.values())
    for path in (*children, "r"):
        if found["text"].count(f"<{path} ") != 1:
            report.problems.append(f"the answer of {path} is not there once")
    report.left += len(found["live"])
    lines = [json.loads(line) for line in _whole(folder / "requests")]
    report.requests += len(lines)
    report.refusals += sum(line["refused"] is not None for line in lines)


def _whole(path: Path) -> list[str]:
    """The lines of a log; the last one of a killed process may be torn."""
    return [line for line in path.read_text().split("\n") if line.endswith("}")]


def _abort(report: Report, folder: Path, widths: tuple[int, ...], random: Random) -> None:
    leaves = report.agents // 4
    for _ in range(max(1, report.wanted // 4)):
        if not in_process(folder, widths, _kill(random, 60), abort_at=leaves):
            break
        report.abort_kills += 1
    in_process(folder, widths, None, abort_at=min(leaves, _leaves(folder)))
    found = json.loads((folder / "report.json").read_text())
    if (found["status"], found["text"]) != ("unanswered", "aborted"):
        report.problems.append(f"the aborted root is {found['status']}: {found['text']}")
    report.left += len(found["live"])
    report.left += sum(each["open"] + each["busy"] for each in found["conversations"])
    before = ledger(folder)
    in_process(folder, widths, None, abort_at=0)
    if ledger(folder) != before:
        report.problems.append("something went on after the abort")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--widths", type=int, nargs="*", default=[3, 12])
    given: Any = parser.parse_args()
    report = run(tuple(given.widths), given.kills, given.seed)
    for problem in report.problems:
        print(problem)
    print(report.line())
    return int(not report.line().endswith("PASS"))


if __name__ == "__main__":
    sys.exit(main())
