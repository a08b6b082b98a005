"""Commands from outside: many processes ask one holder, and any of them is stopped or killed.

    python tests/verify/commands.py
    python tests/verify/commands.py --plant "answer apart"      must print FAIL

The holder works on a store, with commits of its own every few milliseconds. Outsiders hand in
signals, forks, decisions and commands that are refused, several at a time. All are disturbed:
outsiders are stopped (SIGSTOP) and continued, and killed and begun again, at random moments and
between the calls by which they hand in; the holder is killed, also around the commit of an answer,
and opened again.

In the end the logs of the outsiders are held against the store:

* each effect is there once at most (`twice=0`), and once where an answer was told or stored;
* what was handed in and not withdrawn has an answer once the box is empty (`lost=0`);
* what was withdrawn for certain has neither answer nor effect;
* what is refused has its error for an answer, and no file is taken for a bad one;
* of all who decide a permission request one is first, and its grant is given once.

That the holder never waits for an outsider is measured in one run: how long its own commits take
before there is any outsider, and while all of them stand still at whatever point they were
stopped, with handles, parts and read locks as they are. No lock is shared by design: a command is
a file that is renamed.

Settings: PIDURABLE_COMMANDS (600; 10,000 in `make verify`), PIDURABLE_COMMANDS_OUTSIDERS (6; 20
there), PIDURABLE_COMMANDS_SEED.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import trio
from commands_life import PLANTS, Counter as CountingTask

from pidurable import Extension, Registry, open_harness
from pidurable.agent._grants import grants_addresses, stored_grants
from pidurable.agent._permissions import Asked, open_request, stored_request
from pidurable.session import _documents
from pidurable.storage import SqliteStorage

HERE = Path(__file__).parent
TASKS = 10
FREEZES = 3
COMMITS_COMPARED = 40
"""So many commits of the holder are timed alone, and at each freeze."""
COMMITS_SECONDS_MAX = 10.0
HOLDER_KILLS = 6
RATIO_MAX = 3.0
"""Of commits beside stopped outsiders to commits alone, on a machine that does other things."""
SECONDS_MAX = 1_200.0
ASKED = Asked(
    subject="call",
    tool="act",
    extension="verify",
    arguments={},
    text="act",
    matchable=True,
    digest="0" * 64,
    place="here",
    directory="/",
    boundary="none",
    risk="low",
    reason="",
    principal="",
    expires_us=None,
)


@attrs.define(eq=False)
class Child:
    """One process of ours."""

    facts: dict[str, Any]
    process: subprocess.Popen[bytes]
    stopped_at: float | None = None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs. Its id is its own until it is waited for."""
        if self.process.poll() is None:
            self.process.send_signal(number)


class Run:
    """One run of the proof in a folder."""

    def __init__(self, folder: Path, commands: int, outsiders: int, seed: int, plant: str | None):
        self.store = folder / "session.sqlite"
        self.folder = folder
        self.commands, self.outsiders, self.plant = commands, outsiders, plant
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.requests: list[int] = []
        """Permission requests that outsiders decide, each of them all."""
        self.children: dict[int, Child] = {}
        self.holder: Child | None = None
        self.quiet = (0.0, 0.0)
        self.frozen: list[tuple[float, float]] = []
        self.until = time.monotonic() + SECONDS_MAX

    # --- processes -----------------------------------------------------------------------

    def begin(self, facts: dict[str, Any]) -> Child:
        """Begin a process in a group of its own, with its own log."""
        command = [sys.executable, str(HERE / "commands_life.py"), json.dumps(facts)]
        path = os.pathsep.join([str(HERE), *sys.path])
        stderr = (self.folder / "stderr").open("ab")
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=stderr, stderr=stderr
        )
        stderr.close()
        return Child(facts, process)

    def begin_holder(self) -> None:
        number = self.counts["holders"]
        self.counts["holders"] += 1
        self.holder = self.begin(
            {
                "role": "holder",
                "store": str(self.store),
                "log": str(self.folder / f"holder.{number}"),
                "seed": self.draw.getrandbits(32),
                "dies": 0 < number <= HOLDER_KILLS * 3,
                "plant": self.plant,
            }
        )

    def begin_outsider(self, who: int) -> None:
        """Begin an outsider, or the next life of one: it asks again what has no answer."""
        facts = {
            "role": "outsider",
            "store": str(self.store),
            "log": str(self.folder / f"outsider.{who}"),
            "who": who,
            "commands": self.open_commands(who),
            "requests": self.requests,
            "seed": self.draw.getrandbits(32),
        }
        self.children[who] = self.begin(facts)

    def open_commands(self, who: int) -> list[int]:
        """The commands that the earlier lives of an outsider were told nothing of."""
        seen = {
            int(line["key"].partition(".")[2])
            for line in self.log(who)
            if line["what"] in ("answered", "not seen", "failed")
        }
        return [each for each in range(1, self.commands // self.outsiders + 1) if each not in seen]

    def log(self, who: int | str) -> list[dict[str, Any]]:
        path = self.folder / (who if isinstance(who, str) else f"outsider.{who}")
        with suppress(FileNotFoundError):
            lines = path.read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    # --- the run -------------------------------------------------------------------------

    def play(self) -> None:
        trio.run(self.prepare)
        try:
            self.begin_holder()
            began = time.monotonic()
            self.wait_for_commits()
            self.quiet = (began, time.monotonic())
            for who in range(self.outsiders):
                self.begin_outsider(who)
            self.disturb()
            self.finish()
        finally:
            for child in (*self.children.values(), self.holder):
                if child is not None:
                    child.send(signal.SIGKILL)
                    child.process.wait()

    async def prepare(self) -> None:
        registry = Registry()
        registry.install(Extension("verify", tasks=[CountingTask()]))
        async with open_harness(self.store, registry=registry) as harness:
            root = await harness.root()
            for number in range(TASKS):
                task = await root.create_task(CountingTask, f"{number}")
            for _ in range(self.commands // self.outsiders // 10 + 1):
                async with harness.commit() as tx:
                    id = open_request(tx, task=task, conversation=root.id, asked=ASKED)
                self.requests.append(id)

    def disturb(self) -> None:
        """Stop, continue, kill and begin again until every outsider is done."""
        total = self.commands // self.outsiders * self.outsiders
        next_kill, next_freeze = 1, 1
        while not self.all_done() and time.monotonic() < self.until:
            time.sleep(self.draw.uniform(0.02, 0.08))
            self.tend()
            done = total - sum(len(self.open_commands(who)) for who in range(self.outsiders))
            if next_freeze <= FREEZES and done * (FREEZES + 1) > total * next_freeze:
                next_freeze += 1
                self.freeze()
            if next_kill <= HOLDER_KILLS and done * (HOLDER_KILLS + 1) > total * next_kill:
                next_kill += 1
                assert self.holder is not None
                self.holder.send(signal.SIGKILL)
                self.counts["holder killed"] += 1
            child = self.children[self.draw.randrange(self.outsiders)]
            drawn = self.draw.random()
            if drawn < 0.02:
                child.send(signal.SIGKILL)
            elif drawn < 0.25 and child.stopped_at is None:
                child.send(signal.SIGSTOP)
                self.counts["stopped"] += 1

    def tend(self) -> None:
        """Let the stopped go on after a while, and begin anew what has died."""
        self.tend_holder()
        for who, child in list(self.children.items()):
            code = child.process.poll()
            if code is not None:
                if code != 0:
                    self.counts["outsider died"] += 1
                    self.begin_outsider(who)
                continue
            if is_stopped(child.process.pid):
                now = time.monotonic()
                child.stopped_at = child.stopped_at or now
                if now - child.stopped_at > self.draw.uniform(0.1, 0.5):
                    self.counts["stops"] += 1
                    child.stopped_at = None
                    child.send(signal.SIGCONT)

    def tend_holder(self) -> None:
        assert self.holder is not None
        if self.holder.process.poll() is not None:
            self.counts["holder died"] += 1
            self.begin_holder()

    def freeze(self) -> None:
        """All outsiders stand still at once; the holder works on, and its commits are timed."""
        for child in self.children.values():
            child.send(signal.SIGSTOP)
        began = time.monotonic()
        self.wait_for_commits()
        self.frozen.append((began, time.monotonic()))
        for child in self.children.values():
            child.stopped_at = None
            child.send(signal.SIGCONT)

    def wait_for_commits(self) -> None:
        """Wait until the holder has made some commits of its own, or has not for too long."""
        started, until = len(self.own_commits()), time.monotonic() + COMMITS_SECONDS_MAX
        while len(self.own_commits()) < started + COMMITS_COMPARED:
            self.tend_holder()
            if time.monotonic() > until:
                return
            time.sleep(0.05)

    def own_commits(self) -> list[dict[str, Any]]:
        logs = (self.log(path.name) for path in sorted(self.folder.glob("holder.*")))
        return [line for log in logs for line in log if line["what"] == "own"]

    def all_done(self) -> bool:
        return all(child.process.poll() == 0 for child in self.children.values())

    def finish(self) -> None:
        """Let a last holder, that nobody disturbs, take what is left; then end it."""
        assert self.holder is not None
        self.holder.send(signal.SIGKILL)
        self.holder.process.wait()
        self.counts["holders"] = max(self.counts["holders"], HOLDER_KILLS * 3 + 1)
        self.begin_holder()
        box = Path(f"{self.store}.commands")
        until = time.monotonic() + 60
        while time.monotonic() < until and any(
            path.suffix in (".command", ".taken") for path in box.iterdir()
        ):
            time.sleep(0.05)
        # What was signalled last is still to be taken by the tasks.
        time.sleep(1.0)

    # --- judging -------------------------------------------------------------------------

    def judge(self) -> list[str]:
        """What is wrong; and the counts of the line."""
        storage = SqliteStorage(self.store, create=False, read_only=True)
        try:
            return list(self.wrong(storage))
        finally:
            storage.close()

    def wrong(self, storage: SqliteStorage) -> Iterator[str]:
        (root,) = storage.conversations_by_owner(None, limit=1)
        effects = self.effects(storage, root.id)
        forks = Counter(each.id for each in self.conversations(storage) if each.parent == root.id)
        told = self.told()
        given: list[int] = []
        decided: defaultdict[int, list[str]] = defaultdict(list)
        for key, what in told.items():
            row = storage.command(key)
            answer = None if row is None else json.loads(row.answer)
            refused = answer is not None and "error" in answer
            self.counts["sent"] += 1
            self.counts["applied"] += row is not None and not refused
            self.counts["refused"] += refused
            self.counts["not_seen"] += "not seen" in what and row is None
            kind = what["asks"]["kind"]
            if kind == "bad" and answer is not None and not refused:
                yield f"{key}: a command that must be refused was applied"
            late = kind == "decide" and refused and "AlreadyDecided" in row.answer
            if kind != "bad" and refused and not late:
                yield f"{key}: refused with {answer}"
            if kind == "decide" and answer is not None and not refused:
                decided[what["asks"]["request"]].append(key)
            count = effects[key] if kind == "signal" else 0
            self.counts["twice"] += count > 1
            if count > 1:
                yield f"{key}: its effect is there {count} times"
            if kind == "signal" and row is None and count:
                yield f"{key}: an effect without an answer"
            if kind == "signal" and row is not None and not refused and not count:
                self.counts["lost"] += 1
                yield f"{key}: answered, and no effect"
            if kind == "fork" and answer is not None and "value" in answer:
                given.append(answer["value"])
                if told_value(what) not in (None, answer["value"]):
                    yield f"{key}: told {told_value(what)}, stored {answer['value']}"
            yield from self.unanswered(key, what, row is not None)
        extra = set(forks) - set(given)
        self.counts["twice"] += len(extra)
        if extra:
            yield f"{len(extra)} forks that no answer names"
        if len(set(given)) != len(given) or not set(given) <= set(forks):
            self.counts["lost"] += 1
            yield "forks that answers name are missing, or named twice"
        yield from self.wrong_decisions(storage, told, decided)
        ends = Counter(path.suffix for path in Path(f"{self.store}.commands").iterdir())
        self.counts["parts"] = ends.pop(".part", 0)
        if ends:
            yield f"left in the folder: {dict(ends)}"

    def wrong_decisions(
        self,
        storage: SqliteStorage,
        told: dict[str, dict[str, Any]],
        decided: dict[int, list[str]],
    ) -> Iterator[str]:
        """Each request is decided by one command, which is told so, and gives one grant."""
        values = [_documents.load(storage, each) for each in grants_addresses(storage)]
        documents = [None if value is None else value.value for value in values]
        grants = Counter(grant.request for grant in stored_grants(documents, 0))
        for id in self.requests:
            request = stored_request(storage, id)
            assert request is not None
            winners = decided.get(id, [])
            self.counts["decided"] += len(winners) == 1
            if len(winners) > 1 or grants[id] > 1:
                self.counts["twice"] += 1
                yield f"request {id}: decided by {winners}, which gave {grants[id]} grants"
            elif [request.decided_by] != winners and (request.state != "open" or winners):
                self.counts["lost"] += 1
                yield f"request {id}: {request.state} by {request.decided_by}, told {winners}"
            elif grants[id] != len(winners):
                self.counts["lost"] += 1
                yield f"request {id}: decided by {winners}, which gave {grants[id]} grants"

    def unanswered(self, key: str, what: dict[str, Any], answered: bool) -> Iterator[str]:
        """What a command that was told about may not be."""
        withdrawn = what.get("withdrawn", {}).get("certain")
        if withdrawn and answered:
            yield f"{key}: withdrawn for certain, and applied"
        if answered:
            return
        if "answered" in what:
            self.counts["lost"] += 1
            yield f"{key}: an answer was told, and none is stored"
        # Who was killed while withdrawing could not say whether it did.
        if "not seen" in what and "withdraws" not in what:
            self.counts["lost"] += 1
            yield f"{key}: handed in, never withdrawn, and never answered"
        if "failed" in what:
            yield f"{key}: {what['failed']['error']}"

    def told(self) -> dict[str, dict[str, Any]]:
        """By command, what its outsider noted of it: the last of each sort."""
        found: dict[str, dict[str, Any]] = {}
        for who in range(self.outsiders):
            for line in self.log(who):
                if "key" in line:
                    found.setdefault(line["key"], {})[line["what"]] = line
        return found

    def effects(self, storage: SqliteStorage, root: int) -> Counter[str]:
        found: Counter[str] = Counter()
        after = 0
        while rows := storage.entries(root, after=after):
            after = rows[-1].id
            found.update(
                json.loads(row.data or "")["key"] for row in rows if row.kind == "verify.seen"
            )
        return found

    def conversations(self, storage: SqliteStorage) -> Iterator[Any]:
        after = 0
        while rows := storage.conversations_by_owner(None, after=after):
            after = rows[-1].id
            yield from rows

    def commits(self) -> tuple[list[float], list[float]]:
        """How long the holder's own commits took: alone, and beside stopped outsiders."""
        own = self.own_commits()

        def within(*spans: tuple[float, float]) -> list[float]:
            return [
                line["seconds"]
                for line in own
                if any(a < line["at"] - line["seconds"] and line["at"] < b for a, b in spans)
            ]

        return within(self.quiet), within(*self.frozen)


def told_value(what: dict[str, Any]) -> Any:
    return what.get("answered", {}).get("given")


def is_stopped(pid: int) -> bool:
    """Whether a process of ours is stopped, as the kernel says."""
    with suppress(OSError):
        done = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return done is not None and done.si_code == os.CLD_STOPPED
    return False


def main(argv: list[str] | None = None) -> int:
    """Run the proof and print its line; 0 where it holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--plant", choices=sorted(PLANTS))
    given = parser.parse_args(argv)
    environ = os.environ
    commands = int(environ.get("PIDURABLE_COMMANDS", "600"))
    outsiders = int(environ.get("PIDURABLE_COMMANDS_OUTSIDERS", "6"))
    seed = int(environ.get("PIDURABLE_COMMANDS_SEED", str(random.SystemRandom().getrandbits(32))))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pidurable-commands-") as name:
        run = Run(Path(name), commands, outsiders, seed, given.plant)
        run.play()
        problems = run.judge()
        quiet, frozen = run.commits()
        said = (Path(name) / "stderr").read_text(errors="replace")
    if "Traceback" in said:
        problems.append(f"a process said: {said[-2_000:]}")
    if time.monotonic() > run.until:
        problems.append("the outsiders did not come to their end in time")
    if len(frozen) < 20 or len(quiet) < 20:
        problems.append(f"too few commits to compare: {len(quiet)} alone, {len(frozen)} beside")
        ratio = float("nan")
    else:
        ratio = statistics.median(frozen) / statistics.median(quiet)
        if ratio > RATIO_MAX:
            problems.append(f"commits beside stopped outsiders took {ratio:.2f} times as long")
    for problem in problems[:20]:
        print(f"  {problem}")
    counts = run.counts
    facts = " ".join(
        f"{name.replace(' ', '_')}={counts[name]}"
        for name in (
            *("sent", "applied", "refused", "decided", "not_seen", "twice", "lost"),
            *("stops", "outsider died", "holder killed", "holder died", "parts"),
        )
    )
    print(
        f"commands: {facts} commit_ratio={ratio:.2f} problems={len(problems)} seed={seed} "
        f"seconds={time.monotonic() - began:.0f} {'FAIL' if problems else 'PASS'}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
