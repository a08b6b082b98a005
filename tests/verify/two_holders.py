"""R5: two holders of one store, of which one is stopped, replaced, and let go on.

    python tests/verify/two_holders.py
    python tests/verify/two_holders.py --round 17 --seed 5     one round again, its files kept
    python tests/verify/two_holders.py --plant "heartbeat without epoch"     must print FAIL

A round is two processes on one store. The first one commits and runs tasks, is stopped (SIGSTOP) at
a place that the round has drawn, and stays so past its lease, or until it is taken over by force.
The second one takes the session, works on, and the first one is let go on beside it. Then:

* nothing of the first one is stored that the second one did not find when it took over;
* a commit, a sign of life and a close with the old epoch are each refused, `HolderLostError`;
* what ran in the first one is cancelled within one heartbeat of its waking (and some time for a
  machine that does other things, too);
* effects that must not be repeated are in the ledger at most once;
* where the first one was stopped with SQLite's write lock, the second one has said so, with the
  number of the process, and got the session once that went on;
* the lock files are gone, the file is sound, and the history of all commits is in order (R7).

In some rounds the first one is not stopped, but keeps its loop busy for longer than its lease; in
others two harnesses of one process take the session from each other.

Settings: PIDURABLE_R5_ROUNDS (200 in `make verify`, 2,000 in the long tier), PIDURABLE_R5_SEED,
PIDURABLE_R5_LANES (rounds at a time: they mostly wait for leases).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import attrs
import trio
from commit_history import judge_history, read_log
from two_holders_life import (
    CLOSING,
    FILE_CALLS,
    HEARTBEAT_SECONDS,
    PLANTS,
    Life,
    both,
    live,
    parts_of,
)

from pidurable.storage import SqliteStorage

ROUNDS = 20
LANES = 4
WAIT_SECONDS = 60.0
STOP_WAIT_SECONDS = 2.0
LATE_SECONDS = 3.0
"""Beyond one heartbeat, for a machine that is busy with other things."""
KINDS = (
    "anywhere",
    "apply",
    "heartbeat",
    "checkpoint",
    "closing",
    "wal write",
    "wal sync",
    "store",
    "quiet",
    "busy",
    "one process",
)
STALE_CALLS = {"apply", "heartbeat", "release"}
RARE = (
    "blocked",
    "stopped in a commit",
    "stopped in a checkpoint",
    "stopped while closing",
    "replaced while busy",
)
"""What must have happened at least once in 100 rounds or more."""


class RoundError(Exception):
    """A round did not go as it must."""


@attrs.frozen(kw_only=True)
class Plan:
    """What a round does, drawn from the seed and its number."""

    number: int
    kind: str
    first: Life
    second: Life
    stop_after: float
    """Seconds of work after which the first one is stopped, unless it stops itself before."""
    beside: float
    """Seconds that the second one works before the first one goes on."""


def draw(number: int, seed: int, plant: str | None) -> Plan:
    rng = random.Random(f"{seed}/{number}")
    kind, turn = KINDS[number % len(KINDS)], number // len(KINDS)
    if plant is not None:
        # Where the bug is within reach: each line of the planted method in turn.
        kind = PLANTS[plant][0] if plant.startswith("epoch") else ("quiet", "anywhere")[number % 2]
        turn = number
    # What a call passes: `apply` about 25 lines of the storage, the others fewer.
    lines = {"apply": 24, "heartbeat": 14, "checkpoint": 6}
    first: dict[str, Any] = {}
    if kind in lines:
        first = {"stop_in": kind, "stop_at": turn % lines[kind], "stop_call": rng.randint(0, 3)}
        if kind == "apply":
            first["stop_call"] += rng.randint(2, 30)
    elif kind == "closing" and turn % 2:
        first = {"stop_in": "release", "stop_at": turn // 2 % 14, "leaves": True}
    elif kind == "closing":
        first = {"stop_in": CLOSING, "leaves": True}
    elif kind == "store":
        first = {"stop_in": FILE_CALLS[2 + turn % 2], "stop_at": rng.randint(2, 20)}
    elif kind in FILE_CALLS:
        first = {"stop_in": kind, "stop_at": rng.randint(5, 60)}
    elif kind == "quiet":
        first = {"quiet": True}
    elif kind == "busy":
        first = {"busy": True}
    return Plan(
        number=number,
        kind=kind,
        first=Life(who="first", plant=plant, **first),
        second=Life(who="second", takeover=rng.random() < 0.5 and kind != "busy", plant=plant),
        stop_after=rng.random() * 0.25,
        beside=rng.random() * 0.15,
    )


# --- one round ----------------------------------------------------------------------------------


class Process:
    """A life in a process of its own."""

    def __init__(self, folder: Path, life: Life) -> None:
        self.log = folder / f"{life.who}.log"
        self.who = life.who
        self.status: int | None = None
        self.stopped = False
        self.pid = os.fork()
        if self.pid == 0:
            live(folder, life)

    def look(self) -> None:
        """See whether it has ended or was stopped."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.stopped = True
            else:
                self.status = status

    def stop(self) -> None:
        self.look()
        if self.status is None and not self.stopped:
            os.kill(self.pid, signal.SIGSTOP)
            self.wait(lambda: self.stopped, "be stopped")

    def go_on(self) -> int:
        """Let it go on; returns the moment."""
        self.stopped = False
        at = time.monotonic_ns()
        if self.status is None:
            os.kill(self.pid, signal.SIGCONT)
        return at

    def wait(self, done: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until something is so, or it has ended.

        Raises:
            RoundError: It took too long.
        """
        until = time.monotonic() + seconds
        while True:
            self.look()
            if self.status is not None or done():
                return
            if time.monotonic() > until:
                raise RoundError(f"the {self.who} process did not {what} within {seconds:g} s")
            time.sleep(0.004)

    def noted(self, *what: str) -> list[dict[str, Any]]:
        return [line for line in read_log(self.log) if line["what"] in what]

    def end(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@attrs.define
class Seen:
    """What a round has shown."""

    commits: int = 0
    effects: int = 0
    unknown: int = 0
    late_ms: float = 0.0
    rare: list[str] = attrs.Factory(list)
    wrong: list[str] = attrs.Factory(list)


def run_two_processes(plan: Plan, folder: Path, seen: Seen) -> None:
    first = Process(folder, plan.first)
    second: Process | None = None
    try:
        first.wait(lambda: bool(first.noted("working")) or first.stopped, "begin to work")
        wait_for_stop(first, plan)
        place = next((line["place"] for line in first.noted("stops")), None)
        second = Process(folder, plan.second)
        blocked = second.noted
        second.wait(lambda: bool(blocked("held")) or any_busy(second), "take the session over")
        if not second.noted("held"):
            seen.rare.append("blocked")
            check_blocked(first, second, seen)
            woken = first.go_on()
            second.wait(lambda: bool(blocked("held")), "take the session once it could")
        else:
            time.sleep(plan.beside)
            woken = first.go_on()
        first.wait(lambda: False, "notice that it was replaced")
        (folder / "finish").touch()
        second.wait(lambda: False, "finish the work and close")
        note_rare(plan, place, seen)
        judge_first(plan, first, second, woken, seen)
    finally:
        for process in (first, second):
            if process is not None:
                process.end()


def wait_for_stop(first: Process, plan: Plan) -> None:
    """Wait until the first one is where the round wants it: stopped, or busy."""
    if plan.first.busy:
        first.wait(lambda: bool(first.noted("busy")), "be busy")
        return
    waits = STOP_WAIT_SECONDS if plan.first.stop_in is not None else plan.stop_after
    until = time.monotonic() + waits
    while time.monotonic() < until and not first.stopped and first.status is None:
        first.look()
        time.sleep(0.004)
    first.stop()


def any_busy(second: Process) -> bool:
    refused = second.noted("refused")
    return any(line["error"] == "StorageRefusedError" for line in refused)


def check_blocked(first: Process, second: Process, seen: Seen) -> None:
    """The second one has to say who keeps it out: the stopped process that has the write lock."""
    said = [line["message"] for line in second.noted("refused") if "Busy" in line["message"]]
    named = [text for text in said if f"process {first.pid} (" in text and "stopped" in text]
    if not named and sys.platform == "linux":
        seen.wrong.append(f"the second one did not name the process in its way: {said}")


def note_rare(plan: Plan, place: str | None, seen: Seen) -> None:
    if plan.kind == "busy":
        seen.rare.append("replaced while busy")
    if place is None:
        return
    if plan.kind in ("apply", "wal write", "wal sync"):
        seen.rare.append("stopped in a commit")
    elif plan.kind in ("checkpoint", "store"):
        seen.rare.append("stopped in a checkpoint")
    elif plan.kind == "closing":
        seen.rare.append("stopped while closing")


def judge_first(plan: Plan, first: Process, second: Process, woken: int, seen: Seen) -> None:
    """What the first one did after it was let go on, and how both ended."""
    wrong = seen.wrong
    for process in (first, second):
        wrong += [f"{process.who}: {line['error']}" for line in process.noted("crashed")]
        if process.status != 0:
            wrong.append(f"the {process.who} process ended with status {process.status}")
    held = second.noted("held")
    if not held or not second.noted("finished"):
        wrong.append("the second one did not finish the work")
        return
    taken = held[0]["at"]
    lost, left = first.noted("lost"), first.noted("left")
    if not lost and not left:
        wrong.append("the first one neither left nor learned that it was replaced")
    if left and left[0]["at"] > taken and not plan.first.leaves:
        wrong.append("the first one left as if it still held the session")
    refused = {line["call"] for line in first.noted("refused stale")}
    if (lost or refused) and not first.noted("crashed") and refused != STALE_CALLS:
        wrong.append(f"stale calls that were refused: {sorted(refused)}")
    late = [line["at"] - max(woken, taken) for line in first.noted("cancelled")]
    if lost and late:
        seen.late_ms = max(0, *late) / 1e6
        if seen.late_ms > (HEARTBEAT_SECONDS + LATE_SECONDS) * 1e3:
            wrong.append(f"an invocation went on for {seen.late_ms:.0f} ms after it was replaced")


def judge_store(plan: Plan, folder: Path, seen: Seen) -> None:
    """What the store, the ledger, the logs and the folder show in the end."""
    wrong = seen.wrong
    logs = [read_log(folder / f"{who}.log") for who in ("first", "second")]
    storage = SqliteStorage(folder / "s", create=False, read_only=True)
    try:
        holder = storage.holder()
        root = storage.conversation_by_key(None, "root")
        stored = {} if root is None else parts_of(storage, root.id)
        live_tasks = storage.live_tasks()
        clean = storage.head().clean
    finally:
        storage.close()
    wrong += judge_history(logs, stored)
    seen.commits = len(stored)
    seen.unknown = sum(line["what"] == "unknown" for log in logs for line in log)
    if plan.kind != "one process":
        held = next((line for line in logs[1] if line["what"] == "held"), None)
        found = {name for name in stored if name[0] == "first"}
        known = set() if held is None else {tuple(name) for name in held["seen"]}
        for name in sorted(found - known):
            wrong.append(f"stale commit: {name} was stored after the session was taken over")
        if not clean or holder is None or not holder.released or holder.epoch != 2:
            wrong.append(f"the second one did not close cleanly: {holder}, clean={clean}")
        unended = [row for row in live_tasks if row.kind != "r5.sleeper"]
        wrong += [f"task {row.id} ({row.kind}) has not ended" for row in unended]
    ledger = folder / "ledger"
    effects = [] if not ledger.exists() else ledger.read_text().splitlines()
    seen.effects = len(effects)
    counts = Counter(line.split()[0] for line in effects)
    wrong += [f"effect {key} happened {n} times" for key, n in counts.items() if n > 1]
    left = sorted(path.name for path in folder.glob("s*.lock.*"))
    if left:
        wrong.append(f"lock files are left: {left}")
    connection = apsw.Connection(str(folder / "s"), flags=apsw.SQLITE_OPEN_READONLY)
    sound = connection.execute("pragma integrity_check").get
    connection.close()
    if sound != "ok":
        wrong.append(f"the file is damaged: {sound}")


def play(plan: Plan, folder: Path) -> Seen:
    """Play one round in an empty folder."""
    seen = Seen()
    try:
        if plan.kind == "one process":
            trio.run(both, folder, 6)
        else:
            run_two_processes(plan, folder, seen)
        judge_store(plan, folder, seen)
    except Exception:
        seen.wrong.append(traceback.format_exc())
    return seen


# --- all rounds ---------------------------------------------------------------------------------


def play_lane(numbers: range, seed: int, plant: str | None, base: Path, result: Path) -> None:
    """Play every n-th round, in a process of its own; a line of JSON for each."""
    with result.open("w") as file:
        for number in numbers:
            folder = base / f"round-{number}"
            folder.mkdir()
            seen = play(draw(number, seed, plant), folder)
            file.write(json.dumps([number, attrs.asdict(seen)]) + "\n")
            file.flush()
            if not seen.wrong:
                shutil.rmtree(folder)


def play_all(
    rounds: int, seed: int, plant: str | None, base: Path, lanes: int
) -> list[tuple[int, Seen]]:
    pids = []
    for lane in range(lanes):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                result = base / f"lane-{lane}"
                play_lane(range(lane, rounds, lanes), seed, plant, base, result)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    found = []
    for lane in range(lanes):
        for line in (base / f"lane-{lane}").read_text().splitlines():
            number, facts = json.loads(line)
            found.append((number, Seen(**facts)))
    if any(statuses) or len(found) != rounds:
        raise RoundError(f"{len(found)} of {rounds} rounds were played, lanes ended {statuses}")
    return sorted(found, key=lambda each: each[0])


def report(results: list[tuple[int, Seen]], seed: int, base: Path, seconds: float) -> bool:
    """Print what was found, and the goal's line; tell whether it is met."""
    failed = [(number, seen) for number, seen in results if seen.wrong]
    for number, seen in failed[:5]:
        print(f"R5 round {number} of seed {seed}, files kept in {base}/round-{number}:")
        for problem in seen.wrong[:5]:
            print("  " + problem.replace("\n", "\n  "))
        print(f"  again: python tests/verify/two_holders.py --round {number} --seed {seed}")
    every = [problem for _, seen in results for problem in seen.wrong]
    rare = Counter(name for _, seen in results for name in seen.rare)
    unseen = [name for name in RARE if not rare[name]] if len(results) >= 100 else []
    if unseen:
        print(f"never seen: {', '.join(unseen)}")
    counts = {
        "rounds": len(results),
        "commits": sum(seen.commits for _, seen in results),
        "stale_commits": sum(problem.startswith("stale commit") for problem in every),
        "effects": sum(seen.effects for _, seen in results),
        "repeated": sum(problem.startswith("effect") for problem in every),
        "blocked": rare["blocked"],
        "cancelled_ms_max": round(max((seen.late_ms for _, seen in results), default=0)),
        "unknown": sum(seen.unknown for _, seen in results),
        "failed_rounds": len(failed),
        "rare-unseen": len(unseen),
        "seed": seed,
    }
    met = bool(results) and not failed and not unseen
    facts = " ".join(f"{name}={value}" for name, value in counts.items())
    print(f"R5 two holders: {facts} {seconds:.1f}s {'PASS' if met else 'FAIL'}")
    return met


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="R5: two holders of one store.")
    environ = os.environ
    rounds = int(environ.get("PIDURABLE_R5_ROUNDS", ROUNDS))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=int(environ.get("PIDURABLE_R5_SEED", "1")))
    parser.add_argument("--lanes", type=int, default=int(environ.get("PIDURABLE_R5_LANES", LANES)))
    parser.add_argument("--round", type=int, help="play this one alone")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant a bug, to be found")
    given = parser.parse_args(arguments)
    base = Path(tempfile.mkdtemp(prefix="pidurable-r5-"))
    started = time.monotonic()
    if given.round is not None:
        folder = base / f"round-{given.round}"
        folder.mkdir()
        plan = draw(given.round, given.seed, given.plant)
        print(plan)
        results = [(given.round, play(plan, folder))]
        print(f"its files are in {folder}")
    else:
        lanes = min(given.lanes, given.rounds)
        results = play_all(given.rounds, given.seed, given.plant, base, lanes)
    met = report(results, given.seed, base, time.monotonic() - started)
    if met and given.round is None:
        shutil.rmtree(base)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
