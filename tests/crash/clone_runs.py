"""`pidurable run` on a clone of this repository, killed at a point and resumed: for every pass.

A program of its own, started by the test as `python clone_runs.py FOLDER short|full`. It imports
once and forks for each life, since starting an interpreter costs more than a life does. Each line
that it prints is the JSON of one run; the first one is the undisturbed run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from pidurable import AssistantMessage, open_reader
from pidurable.cli import _app, _run, main  # noqa: F401 - imported once, before the forks
from pidurable.cli._demo_project import leftover_processes, transcript_problem
from pidurable.testing import Failpoints, KillAt

CHECKOUT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("clone_model.yaml")
PROMPT = "Tell ids from other values, with a test, and note it twice outside."
POINTS = ("CP1", "CP2", "CP3", "CP4", "CP5", "CP7")
SHORT_POINTS = ("CP3", "CP7")
"""Between an effect and its outcome, and in the middle of an answer."""
LIVES_MAX = 4
GONE_SECONDS_MAX = 60.0
AT_ONCE = 2


class Passes(Failpoints):
    """Counts how often each point is passed."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def hit(self, name: str) -> None:
        self.counted[name] += 1


@attrs.frozen
class Kill:
    """Where the first process is killed, and whether the second one is, at its own first pass."""

    point: str
    nth: int
    again: bool = False


# --- one run ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Case:
    """One run, from the prompt to the answer, however many processes it takes."""

    folder: Path

    @property
    def clone(self) -> Path:
        return self.folder / "clone"

    @property
    def store(self) -> Path:
        return self.folder / "session.sqlite"

    def prepare(self, original: Path) -> None:
        shutil.copytree(original, self.clone, symlinks=True)
        text = SCRIPT.read_text(encoding="utf-8")
        for mark, value in (
            ("@PYTHON@", sys.executable),
            ("@LEDGER@", self.folder / "ledger"),
            ("@LOG@", self.folder / "log"),
        ):
            text = text.replace(mark, str(value))
        (self.folder / "model.yaml").write_text(text, encoding="utf-8")

    def live(self, *argv: str, failpoints: Any = None) -> int:
        """Run a command line in a fork; returns its exit code, or minus the signal."""
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                said = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(said, 1)
                os.dup2(said, 2)
                options = ["--store", str(self.store), "--cwd", str(self.clone)]
                options += ["--script", str(self.folder / "model.yaml")]
                status = main([*argv, *options], failpoints=failpoints)
                if isinstance(failpoints, Passes):
                    passes = json.dumps(failpoints.counted)
                    (self.folder / "passes").write_text(passes, encoding="utf-8")
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # the fork must not run what is below
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def run(self, kill: Kill | None) -> dict[str, Any]:
        """Run, be killed, resume until it is done; report what there is then."""
        points: Any = Passes() if kill is None else KillAt(kill.point, nth=kill.nth)
        codes = [self.live("run", PROMPT, failpoints=points)]
        left = [self.leftover()]
        while codes[-1] == -signal.SIGKILL and len(codes) < LIVES_MAX:
            again = KillAt(kill.point) if kill and kill.again and len(codes) == 1 else None
            codes.append(self.live("resume", failpoints=again))
            left.append(self.leftover())
        report = trio.run(self.look)
        report["kill"] = None if kill is None else attrs.asdict(kill)
        if kill is None:
            report["passes"] = json.loads((self.folder / "passes").read_text(encoding="utf-8"))
        report["codes"] = codes
        report["leftover"] = [pid for found in left for pid in found]
        return report

    def leftover(self) -> list[int]:
        """The processes of the run that do not end by themselves at once."""
        deadline = time.monotonic() + GONE_SECONDS_MAX
        while (left := leftover_processes(self.clone)) and time.monotonic() < deadline:
            time.sleep(0.01)  # other processes end when they do; nobody tells us
        return left

    # --- what there is at the end --------------------------------------------------------

    async def look(self) -> dict[str, Any]:
        """The result, and everything that must not be there."""
        async with open_reader(self.store) as reader:
            conversations = await reader.conversations()
            entries = [entry for c in conversations for entry in await reader.entries(c.id)]
            live = await reader.tasks(live=True)
            ids = self.query("select id from submissions order by id")
            submissions = [await reader.submission(id) for (id,) in ids]
        answers = [
            (entry.id, message)
            for entry in entries
            for message in entry.messages
            if isinstance(message, AssistantMessage)
        ]
        final = [(id, m.text) for id, m in answers if m.status == "complete" and not m.tool_calls]
        problems = [f"an answer failed: {m.error}" for _, m in answers if m.status == "failed"]
        problems += [f"task {task.id} is still live" for task in live]
        problem = transcript_problem(entries)
        if problem is not None:
            problems.append(problem)
        ended = [(each.status, each.answer) for each in submissions]
        if ended != [("done", id) for id, _ in final] or len(final) != 1:
            problems.append(f"submissions ended as {ended}, the final answers are {final}")
        check = self.query("pragma integrity_check")
        if check != [("ok",)]:
            problems.append(f"integrity_check says {check}")
        return {
            "result": {"files": self.files(), "answer": [text for _, text in final]},
            "ledger": self.ledger(),
            "problems": problems,
            "requests": [line["refused"] for line in self.logged()],
            "cut": sum(m.status == "aborted" for _, m in answers),
            "turns": sum(m.status == "complete" for _, m in answers),
        }

    def query(self, sql: str) -> list[Any]:
        connection = sqlite3.connect(f"file:{self.store}?mode=ro", uri=True)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def files(self) -> dict[str, str]:
        """Every file of the clone by its content, what Python and git keep for themselves apart."""
        found: dict[str, str] = {}
        for path in sorted(self.clone.rglob("*")):
            relative = path.relative_to(self.clone)
            if {".git", "__pycache__"} & set(relative.parts) or not path.is_file():
                continue
            found[str(relative)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return found

    def ledger(self) -> list[str]:
        path = self.folder / "ledger"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def logged(self) -> Iterator[dict[str, Any]]:
        for line in (self.folder / "log").read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote this line


# --- the sweep --------------------------------------------------------------------------------


def make_clone(folder: Path) -> Path:
    """Clone the checkout's HEAD once; each run gets a copy, compiled already."""
    clone = folder / "clone"
    quiet: Any = {"check": True, "capture_output": True, "text": True}
    # One commit deep: what each run copies is one small pack.
    shallow = ["git", "clone", "--depth", "1", CHECKOUT.as_uri(), str(clone)]
    subprocess.run(shallow, **quiet)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(clone / "pidurable")], **quiet)
    return clone


def kills_for(passes: dict[str, int], *, full: bool) -> list[Kill]:
    """Every pass of every point; or of some points the one in the middle, of CP7 the last."""
    kills: list[Kill] = []
    for point in POINTS if full else SHORT_POINTS:
        count = passes[point]
        middle = (count + 2) // 2
        one = count if point == "CP7" else middle
        numbers = range(1, count + 1) if full else (one,)
        kills += [Kill(point, nth) for nth in numbers]
        if full and point != "CP5":
            kills.append(Kill(point, middle, again=True))
    return kills


def run_cases(folder: Path, clone: Path, kills: Sequence[Kill | None]) -> Iterator[dict[str, Any]]:
    """Run one case per kill, some at once, each in a process that reports in a file."""
    running: dict[int, Case] = {}
    waiting = list(enumerate(kills))
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, kill = waiting.pop(0)
            case = Case(folder / ("undisturbed" if kill is None else f"{number}"))
            case.folder.mkdir()
            pid = os.fork()
            if pid == 0:
                _report_and_exit(case, clone, kill)
            running[pid] = case
        pid, status = os.wait()
        case = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        assert code == 0, f"{case.folder.name}: exit code {code}"
        yield json.loads((case.folder / "report").read_text(encoding="utf-8"))
        shutil.rmtree(case.folder)


def _report_and_exit(case: Case, clone: Path, kill: Kill | None) -> None:
    status = 1
    try:
        case.prepare(clone)
        report = case.run(kill)
        assert report["codes"][-1] == 0, report["codes"]
        (case.folder / "report").write_text(json.dumps(report), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
        said = case.folder / "said"
        if said.exists():
            print(said.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)


def sweep(folder: Path, *, full: bool) -> None:
    """Run undisturbed, then once per kill; print a line for each."""
    clone = make_clone(folder)
    first = next(run_cases(folder, clone, [None]))
    print(json.dumps(first), flush=True)
    passes = first["passes"]
    for report in run_cases(folder, clone, kills_for(passes, full=full)):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sweep(Path(sys.argv[1]).resolve(), full=sys.argv[2] == "full")
