"""An agent run on SQLite, killed at the n-th pass of a crash point and resumed: for every n.

A program of its own, started by the tests as `python agent_lives.py FOLDER MODEL [BASE_URL]`. It
imports once and forks for each life, since starting an interpreter costs more than all the rest.
Each line that it prints is the JSON of one case, in no order.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from pidurable import (
    AgentChange,
    AssistantMessage,
    Extension,
    Harness,
    Models,
    Registry,
    Settings,
    ToolCall,
    ToolResultMessage,
    default_models,
    open_harness,
    tool,
)
from pidurable.testing import CountPoints, Failpoints, KillAt

CASES = (
    ("none", 0),
    ("CP5", 1),
    # A stream has many pieces, which differ less and less.
    *(("CP7", nth) for nth in (1, 2, 4, 7, 11)),
    *((point, nth) for point in ("CP1", "CP2", "CP3", "CP4") for nth in (1, 2, 3)),
    # The points are passed three times in a run; this life is not killed.
    ("CP3", 4),
)
AT_ONCE = 4
"""Cases that run beside each other: most of a life is waiting for the disk and the model."""


def ledger_registry() -> Registry:
    """Two tools that leave a line for every effect, one of them not to be repeated."""

    def effect(call: ToolCall, what: str) -> None:
        # Each life begins in the folder of its store.
        with Path("ledger").open("a") as file:
            file.write(f"{call.name} {call.id} {what}\n")

    @tool
    async def once(what: str, call: ToolCall) -> str:
        """Do something that must not happen twice.

        Args:
            what: Which.
        """
        effect(call, what)
        return f"did {what}"

    @tool(replay="safe")
    async def safe(what: str, call: ToolCall) -> str:
        """Do something that may happen twice.

        Args:
            what: Which.
        """
        await call.output(f"looking at {what}\n")
        effect(call, what)
        return f"saw {what}"

    registry = Registry()
    registry.install(Extension("ledger", tools=[once, safe]))
    return registry


# Made before the forks: it is the same in every life, and imports a good deal.
REGISTRY = ledger_registry()


async def live(name: str, models: Models, failpoints: Failpoints | None) -> dict[str, Any]:
    """One life of a host: it asks, waits, and tells what the store holds."""
    async with open_harness(
        "agent.sqlite",
        registry=REGISTRY,
        models=models,
        settings=Settings(progress_seconds=0.001),
        failpoints=failpoints,
    ) as harness:
        root = await harness.root(agent=AgentChange(model=name, instructions="be brief"))
        with trio.fail_after(60):
            submission = await root.submit("go", request_id="r1")
            settled = await submission.wait()
            await root.wait_for_idle()
        return {
            "status": settled.status,
            "text": settled.text if settled.status == "done" else settled.detail,
            **await described(harness),
        }


async def described(harness: Harness) -> dict[str, Any]:
    """The transcript, as far as the test judges it."""
    root = await harness.root()
    asked: list[list[int]] = []
    results: list[Any] = []
    answers: list[Any] = []
    for entry in await root.history(limit=1000):
        for message in entry.messages:
            if isinstance(message, AssistantMessage):
                answers.append([message.status, message.text])
                if message.status == "complete":
                    asked += [[entry.id, index] for index in range(len(message.tool_calls))]
            elif isinstance(message, ToolResultMessage):
                results.append([list(message.call), message.name, message.code])
    return {"calls": asked, "results": results, "answers": answers}


def forked(run: Callable[[], dict[str, Any]], store: Path) -> bool:
    """Run a life in a process of its own; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(store)
            Path("report.json").write_text(json.dumps(run()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    if os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"a life ended with {os.WEXITSTATUS(status)}")
    return False


def case(folder: Path, name: str, models: Models, point: str, nth: int) -> dict[str, Any]:
    """One store: a life that dies at the point, if it passes it so often, and one that ends."""
    store = folder / f"{point}-{nth}"
    store.mkdir()
    failpoints: Failpoints = CountPoints() if not nth else KillAt(point, nth=nth)
    killed = forked(lambda: trio.run(live, name, models, failpoints), store)
    before = ledger_of(store)
    if killed:
        assert not forked(lambda: trio.run(live, name, models, None), store)
    return {
        "point": point,
        "nth": nth,
        "killed": killed,
        "ledger_at_kill": before,
        "ledger": ledger_of(store),
        **json.loads((store / "report.json").read_text()),
    }


def ledger_of(store: Path) -> list[str]:
    """The effects that happened, in order."""
    ledger = store / "ledger"
    return ledger.read_text().splitlines() if ledger.exists() else []


def main() -> None:
    """Run every case, a few at a time; each prints its line."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    environ = {"OPENAI_BASE_URL": sys.argv[3], "OPENAI_API_KEY": "x"} if len(sys.argv) > 3 else {}
    models = default_models(environ)
    models.resolve(name)
    if environ:
        importlib.import_module("pydantic_ai.models.openai")

    running = 0
    for point, nth in CASES:
        if running == AT_ONCE:
            running -= ended()
        if os.fork() == 0:
            code = 1
            try:
                # One write of less than a page: lines of several processes do not mix.
                line = json.dumps(case(folder, name, models, point, nth)) + "\n"
                os.write(sys.stdout.fileno(), line.encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        running += 1
    while running:
        running -= ended()


def ended() -> int:
    """Wait for one case; its failure is ours."""
    _, status = os.wait()
    if status != 0:
        raise SystemExit("a case failed")
    return 1


if __name__ == "__main__":
    main()
