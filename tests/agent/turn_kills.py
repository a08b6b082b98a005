"""Programs of turns with real kills: real processes on a SQLite store, SIGKILL, a server outside.

    python tests/agent/turn_kills.py [programs] [seed]

This process is the outside: it serves the answers of a program as a strict OpenAI-compatible server
on loopback, starts the lives of the host one after the other, and kills each at a drawn moment, or
lets it kill itself at a drawn pass of a point. The last life is not killed; it brings everything to
rest and tells what the store holds. The judge is that of turn_judge.py, the book is a file. Lives
are forks of one process that has imported everything (`turn_lives.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import attrs
import trio
from turn_judge import judge
from turn_outside import Book, DrawnScript
from turn_player import Program, draw_program

from pidurable.testing._strict_server import StrictServer

LIVES = Path(__file__).with_name("turn_lives.py")
STEPS = 20
KILLS_MAX = 6
SECONDS_MAX = 90.0
"""A life that takes longer is stuck."""


@attrs.define
class Report:
    """What was played, and what was found."""

    seed: int
    programs: int = 0
    kills: int = 0
    lives: int = 0
    inputs: int = 0
    requests: int = 0
    refusals: int = 0
    effects: int = 0
    differences: list[str] = attrs.Factory(list)
    deaths: Counter[str] = attrs.Factory(Counter)
    seconds: float = 0.0

    def line(self) -> str:
        """The last line."""
        passed = not self.differences and not self.refusals and self.kills >= self.programs
        return (
            f"turns killed: programs={self.programs} kills={self.kills} lives={self.lives} "
            f"inputs={self.inputs} requests={self.requests} effects={self.effects} "
            f"refusals={self.refusals} differences={len(self.differences)} seed={self.seed} "
            f"{self.seconds:.1f} s {'PASS' if passed else 'FAIL'}"
        )


def draw_killed(seed: int) -> Program:
    """The program of a seed, as far as real time allows: no long waits, no long retries."""
    program = draw_program(seed, STEPS)
    random = Random(f"{seed}/kills")
    program["settings"] |= {"request_tries": 1, "window": None, "permission_seconds_max": None}
    program["ops"] = [op for op in program["ops"] if op[0] not in ("crash", "close")]
    # A retry takes seconds of real time; that it survives is shown with virtual ones.
    program["answers"] = [
        # Nor does the chat API that is spoken here know answers that come later.
        ["error", 1 + answer[1] % 3, 0]
        if answer[0] in ("error", "cut", "empty", "deferred")
        else answer
        for answer in program["answers"]
    ]
    program["deaths"] = [_draw_death(random) for _ in range(random.randint(2, KILLS_MAX))]
    return program


def _draw_death(random: Random) -> list[Any]:
    """At a pass of a point, or at any moment."""
    among = random.random()
    if among < 0.35:
        return ["moment", random.uniform(0.0, 0.5)]
    if among < 0.8:
        return [random.choice(("commit.before", "commit.after")), random.randint(1, 14)]
    # A life that does not pass its point is the last one, so each is the first pass.
    return [random.choice(("CP1", "CP2", "CP3", "CP4", "CP5", "CP7")), 1]


class Zygote:
    """The process that the lives are forks of: a line to it is a life, a line from it its end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(LIVES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live(self, **life: Any) -> str:
        """Let one life be lived, and return how it ended: `done` or `killed`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(life) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        """End it; it has no lives then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


async def play_killed(program: Program, folder: Path, zygote: Zygote, report: Report) -> list[str]:
    """Play one program over as many lives as it has deaths, and one more; what is wrong."""
    (folder / "program.json").write_text(json.dumps(program))
    script = DrawnScript(program["answers"])
    server = StrictServer(script, api_key=None, log=None)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server.port = listeners[0].socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, server.serve, listeners)
        for death in [*program["deaths"], None]:
            # What a life asks is answered by plain texts once it has come to its end.
            def ended(death: list[Any] | None = death) -> str:
                return zygote.live(folder=str(folder), url=server.base_url, death=death)

            async def calm() -> None:
                while not (folder / "calm").exists():  # noqa: ASYNC110 - another process makes it
                    await trio.sleep(0.005)
                script.calm = True

            async with trio.open_nursery() as lives:
                lives.start_soon(calm)
                how = await trio.to_thread.run_sync(ended)
                lives.cancel_scope.cancel()
            report.lives += 1
            if how == "done":
                break
            if how != "killed":
                nursery.cancel_scope.cancel()
                return [f"a life ended so: {how}"]
            report.kills += 1
            report.deaths[death[0] if death is not None else "?"] += 1
        nursery.cancel_scope.cancel()
    return _judged(server, script, folder, report)


def _judged(server: StrictServer, script: DrawnScript, folder: Path, report: Report) -> list[str]:
    book = Book(folder / "book")
    facts = json.loads((folder / "facts.json").read_text())
    refused = [exchange.problem for exchange in server.requests if exchange.problem]
    # Only what the strict checks let through was given an answer; they come in one order.
    answered = sorted(
        (each for each in server.requests if each.step is not None), key=lambda each: each.step
    )
    requests = [_told(exchange.body) for exchange in answered]
    report.inputs += len(book.find("sent"))
    report.requests += len(server.requests)
    report.refusals += len(refused)
    report.effects += len(book.find("effect"))
    found = [f"refused: {problem}" for problem in refused]
    return found + judge(book.lines, requests, script.given, facts)


def _told(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat body, as the judge takes them."""
    told = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        told.append({"role": message["role"], "text": content})
    return told


def run(
    programs: int, seed: int, *, differences_max: int = 1, seconds_max: float | None = None
) -> Report:
    """Play the programs of consecutive seeds."""
    report = Report(seed)
    started = time.perf_counter()
    zygote = Zygote()
    try:
        for one in range(seed, seed + programs):
            with tempfile.TemporaryDirectory() as name:
                program = draw_killed(one)
                found = trio.run(play_killed, program, Path(name), zygote, report)
            report.programs += 1
            report.seconds = time.perf_counter() - started
            if found:
                report.differences.append(f"seed {one}: {found[0]}")
            if len(report.differences) >= differences_max:
                break
            if seconds_max is not None and report.seconds > seconds_max:
                break
    finally:
        zygote.close()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=int, nargs="?", default=100)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--differences", type=int, default=1, help="stop after so many")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    given: Any = parser.parse_args()
    report = run(
        given.programs,
        given.seed,
        differences_max=given.differences,
        seconds_max=given.seconds,
    )
    for point, count in sorted(report.deaths.items()):
        print(f"  {count:6} killed at {point}")
    for each in report.differences:
        print(each)
    print(report.line())
    return int(not report.line().endswith("PASS"))


if __name__ == "__main__":
    sys.exit(main())
