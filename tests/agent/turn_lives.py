"""Lives of a host that plays a program of turns: forks, each of which may be killed.

Started by turn_kills.py, which writes a line of JSON for each life and gets a line when it has
ended. Where a life before has died in the middle of an operation, this one goes on with the next:
what was not acknowledged is handed in again first, as a host would.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import trio
from turn_host import Host
from turn_outside import Book, Tools
from turn_player import settings_of

from pidurable.agent._default_models import default_models
from pidurable.agent._models import Models
from pidurable.harness._open import open_harness
from pidurable.registry import Registry
from pidurable.testing import Failpoints, KillAt

MODEL = "openai/model"
PACE = 0.02
"""Of what takes virtual seconds in the programs without kills."""
SECONDS_MAX = 60.0


async def live(folder: Path, models: Models, death: list[Any] | None) -> None:
    """Play on from where the life before has died."""
    program = json.loads((folder / "program.json").read_text())
    book = Book(folder / "book")
    tools = Tools(book, pace=PACE)
    tools.reloads = len(book.find("reloaded"))
    registry = Registry()
    registry.install(tools.extension())
    host = Host(book, tools, registry, model=MODEL, pace=PACE)
    points: Failpoints | None = None
    if death is not None and death[0] != "moment":
        points = KillAt(death[0], nth=death[1])
    with trio.fail_after(SECONDS_MAX):
        async with open_harness(
            folder / "turns.sqlite",
            registry=registry,
            models=models,
            settings=settings_of(program),
            durability="process",
            failpoints=points,
        ) as harness:
            if death is not None and death[0] == "moment":
                _kill_in(death[1])
            await host.begin(harness)
            begun = len(book.find("begun"))
            for name, *numbers in program["ops"][begun:]:
                book.add("begun", op=name)
                await host.act(harness, name, *numbers)
            facts = await host.finish(harness, (folder / "calm").touch)
    part = folder / "facts.part"
    part.write_text(json.dumps(facts))
    part.rename(folder / "facts.json")


def _kill_in(seconds: float) -> None:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def forked(life: dict[str, Any], models: Models) -> str:
    """Live a life in a process of its own; how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            logging.getLogger("pidurable").setLevel(logging.CRITICAL + 1)
            trio.run(live, Path(life["folder"]), models, life["death"])
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # the fork must not run what is below
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "done", -signal.SIGKILL: "killed"}.get(code, f"exit code {code}")


def main() -> None:
    """Live what is written to this process, line by line."""
    importlib.import_module("pydantic_ai.models.openai")
    for line in sys.stdin:
        life = json.loads(line)
        environ = {"OPENAI_BASE_URL": life["url"], "OPENAI_API_KEY": "x"}
        models = default_models(environ)
        models.resolve(MODEL)
        sys.stdout.write(forked(life, models) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
