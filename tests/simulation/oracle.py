"""An independent model of the task tree: plain dicts, written from the design, nothing imported.

The model is told every commit as plain data and refuses a transition that the design does not
allow (`Refused` names the rule). At rest it computes alone what must be: `due` lists whatever
should have been marked, woken, ended, blocked or started and was not. A commit is a dict::

    seq, now, alive         alive: a clock that is never stepped
    by                      "host", "scheduler", "open", "close", or the id of a task
    definitions             kind -> {object, version, migrate, undo, tries, park}
    conversations           id -> owning task or None, of those made in this commit
    tasks                   id -> the whole task as it is after the commit (FIELDS)
    requests                id -> reason, of the aborts asked for in this commit
    published               the last commit that everybody could see when it was made
    renewed                 ids that retry_task or resume_task was asked for
    raised                  id -> "nothing", "raise" or "oserror", of handlers that left so
    signals, received       (id, task, key) of those stored; ids of those read

A task is a dict that is never changed once it is in the model, so that `snapshot` is a few shallow
copies: the model follows the line, and falls back to what was durable when a batch is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

LIVE = ("pending", "running", "waiting", "completing")
FIXED = ("conversation", "kind", "owner", "background", "on_restart", "deadline")
FIELDS = (
    *FIXED,
    *("version", "status", "mark", "outcome", "blocked", "woken_by", "wait", "tag", "digest"),
    *("invocations", "recoveries", "tries", "ready_at", "let_go"),
)
EDGES = {
    "pending": ("pending", "running", "terminal"),
    "running": ("running", "pending", "waiting", "completing", "terminal"),
    "waiting": ("waiting", "pending", "running", "terminal"),
    "completing": ("completing", "terminal"),
    "terminal": ("terminal",),
}
CODE_REASONS = (
    "missing_definition",
    "definition_too_old",
    "migration_failed",
    "checkpoint_unreadable",
)
SUSPECT_AFTER = 3
SUSPECT_US = 60_000_000
LATE_US = 5

TaskDict = dict[str, Any]


class Refused(AssertionError):
    """The product did something that the design does not allow, or not what it demands."""

    def __init__(self, rule: str, path: str, expected: Any, found: Any) -> None:
        super().__init__(f"{rule}: {path}: expected {expected!r}, found {found!r}")
        self.rule = rule


def live(task: TaskDict) -> bool:
    return bool(task["status"] != "terminal")


def intends(task: TaskDict) -> bool:
    """The intent to cancel: a mark, or a held outcome other than completed."""
    return live(task) and (task["mark"] is not None or task["outcome"] not in (None, "completed"))


def decisive(task: TaskDict, policy: str) -> bool:
    """Whether how a task ended, or will end, decides a join."""
    if task["outcome"] is None or policy == "all_settled":
        return False
    return bool((task["outcome"] == "completed") == (policy == "first_success"))


class Oracle:
    """The tree as it must be after the commits that it was told."""

    def __init__(self, limits: dict[str, int], running_max: int, recoveries_max: int = 5) -> None:
        self.limits, self.running_max, self.recoveries_max = limits, running_max, recoveries_max
        self.tasks: dict[int, TaskDict] = {}
        self.conversations: dict[int, int | None] = {}
        self.signals: dict[int, tuple[int, ...]] = {}
        self.keys: frozenset[tuple[int, str]] = frozenset()
        self.books: dict[int, dict[str, Any]] = {}
        """What the model notes for itself: invocation, object, deciders, since."""
        self.since: dict[int, int] = {}
        """When a task ended, and when a signal was stored, as a commit's number."""
        self.last_id = self.last_seq = 0
        self.started = False
        self.alive_us = 0
        """A clock that nobody steps: for how long a suspect has been alive."""
        self.definitions: dict[str, dict[str, Any]] = {}
        self.held: dict[int, tuple[int, ...]] = {}
        """What invocations wait for in memory, as the driver says."""
        self.trials: dict[tuple[int, int], int] = {}
        """By task and invocation: since when everybody can see that it was reserved."""
        self.reserved: set[int] = set()
        """Tasks that the commit looked at reserves an invocation of."""
        self.begun: dict[int, int] = {}
        """By task: the invocation whose first handler has begun."""
        self.rare: Counter[str] = Counter()

    def snapshot(self) -> tuple[Any, ...]:
        return (
            dict(self.tasks),
            dict(self.conversations),
            dict(self.signals),
            self.keys,
            dict(self.books),
            self.last_id,
            self.last_seq,
            dict(self.since),
        )

    def restore(self, kept: tuple[Any, ...]) -> None:
        self.tasks, self.conversations, self.signals = (dict(each) for each in kept[:3])
        # Ids may be given again after a loss: nobody saw them.
        self.keys, self.books, self.last_id, self.last_seq = kept[3], dict(kept[4]), *kept[5:7]
        self.since = dict(kept[7])

    # --- the tree ------------------------------------------------------------------------

    def nodes_above(self, id: int) -> Iterator[int]:
        """The tasks and conversations that an ordinary task is below; ended ones are among them."""
        node: int | None = id
        while node is not None:
            task = self.tasks.get(node)
            if task is None:
                node = self.conversations[node]
            elif task["background"]:
                return
            else:
                node = task["owner"] if task["owner"] is not None else task["conversation"]
            if node is not None:
                yield node

    def above(self, id: int) -> Iterator[int]:
        """The tasks that an ordinary task holds and that cancel it; ended ones are among them."""
        return (node for node in self.nodes_above(id) if node in self.tasks)

    def cancelled(self, id: int) -> bool:
        """Whether a live owner above has the intent to cancel."""
        return any(intends(self.tasks[each]) for each in self.above(id))

    def working(self, published: int | None = None) -> Counter[int]:
        """How many live ordinary tasks are below, by node; as published, if that is given."""
        count: Counter[int] = Counter()
        for id, task in self.tasks.items():
            if live(task) or (published is not None and self.since.get(id, 0) > published):
                count.update(self.nodes_above(id))
        return count

    def settled(self, id: int, published: int | None = None) -> bool:
        """Whether what a wait is for is there: a task that has ended, an idle conversation."""
        if id in self.tasks:
            seen = published is None or self.since.get(id, 0) <= published
            return not live(self.tasks[id]) and seen
        return not self.working(published)[id]

    def policies_of_restart(self, id: int) -> set[str]:
        """What a restart may do to a task: the nearest owner's `on_restart`, its own first.

        Ended owners are transparent. Of an ended background task, which stays a boundary, the
        design does not say it: both are right.
        """
        found: set[str] = set()
        for each in (id, *self.above(id)):
            task = self.tasks[each]
            if task["on_restart"] is not None and (live(task) or task["background"]):
                found.add(task["on_restart"])
                if live(task):
                    return found
        return found | {"go"}

    def halted(self, id: int) -> bool:
        """Whether a restart interrupted an owner above, and nothing nearer says otherwise."""
        shields = self.tasks[id]["on_restart"] in ("go", "abort")
        for each in self.above(id):
            if shields:
                return False
            owner = self.tasks[each]
            if owner["blocked"] == "interrupted":
                return True
            shields = live(owner) and owner["on_restart"] in ("go", "abort")
        return False

    def let_go(self, id: int) -> bool:
        """Whether it, or something above it, was resumed where nothing has run since."""
        return any(self.tasks[each]["let_go"] for each in (id, *self.above(id)))

    def cycle(
        self, waiter: int, on: tuple[int, ...], *, marked_too: bool, owned: bool = True
    ) -> bool:
        """Whether a wait could never end: a plain search from what it waits for."""
        below: dict[int, list[int]] = {}
        for id, task in self.tasks.items() if owned else ():
            if live(task):
                for each in self.nodes_above(id):
                    below.setdefault(each, []).append(id)
        todo, seen = list(on), set()
        while todo:
            id = todo.pop()
            if id == waiter:
                return True
            task = self.tasks.get(id)
            if id in seen or (task is not None and not live(task)):
                continue
            seen.add(id)
            wait = None if task is None else task["wait"]
            if wait and task and (marked_too or not task["mark"]) and endless(wait):
                todo += wait["on"] or ()
            todo += [*self.held.get(id, ()), *below.get(id, ())]
        return False

    # --- what commits may do ---------------------------------------------------------------

    def commit(self, commit: dict[str, Any]) -> None:
        """Apply a commit, or refuse it."""
        self.alive_us = commit["alive"]
        self._must(commit["seq"] > self.last_seq, "seq goes up", "seq", self.last_seq, commit)
        self.last_seq, self.definitions = commit["seq"], commit["definitions"]
        before = self.tasks
        changed = {id: t for id, t in commit["tasks"].items() if t != before.get(id)}
        self.tasks = {**before, **changed}
        self.reserved = {
            id
            for id, task in changed.items()
            if id in before and task["invocations"] > before[id]["invocations"]
        }
        self._new_ids(commit, before)
        self.conversations = {**self.conversations, **commit["conversations"]}
        self.books = dict(self.books)
        ended = [id for id, task in changed.items() if id in before and not live(task)]
        arrived = [id for id, _, _ in commit["signals"]]
        self.since = {**self.since, **dict.fromkeys([*ended, *arrived], commit["seq"])}
        working = self.working()
        self._author(commit, before)
        self._signals(commit, before)
        for id, task in changed.items():
            old = before.get(id)
            if old is None:
                self._created(commit, id, task)
                continue
            self._fields(commit, id, old, task)
            self._mark(commit, id, old, task, before)
            self._blocked(commit, id, old, task)
            self._step(commit, id, old, task, working)
        self._deciders()
        self._slots(commit, changed, before)

    def _must(self, holds: Any, rule: str, path: Any, expected: Any, found: Any) -> None:
        if not holds:
            raise Refused(rule, str(path), expected, found)

    def _new_ids(self, commit: dict[str, Any], before: dict[int, TaskDict]) -> None:
        made = [id for id in commit["tasks"] if id not in before]
        made += [*commit["conversations"], *(id for id, _, _ in commit["signals"])]
        for id in sorted(made):
            self._must(id > self.last_id, "ids go up", id, f"> {self.last_id}", id)
            self.last_id = id

    def _author(self, commit: dict[str, Any], before: dict[int, TaskDict]) -> None:
        """An invocation commits only while it runs, and a marked phase never."""
        by = commit["by"]
        if not isinstance(by, int):
            return
        old = before[by]
        self._must(
            old["status"] == "running", "only a running task commits", by, "running", old["status"]
        )
        ends = commit["tasks"].get(by, old)["status"] == "pending"
        late = old["mark"] is not None and self.books[by]["invocation"] == "phase"
        self._must(ends or not late, "no commit of a phase after the mark", by, "refused", "done")

    def _created(self, commit: dict[str, Any], id: int, task: TaskDict) -> None:
        self._must(
            task["status"] == "pending" and task["outcome"] is None,
            "starts pending",
            id,
            "pending",
            task["status"],
        )
        self._must(task["mark"] is None or self.cancelled(id), "no mark at birth", id, None, task)
        self._must(task["kind"] in commit["definitions"], "known kind", id, "installed", task)
        self._must(task["conversation"] in self.conversations, "a conversation", id, True, task)
        self.books[id] = {"invocation": None, "object": None, "definition": None}
        if task["owner"] is None:
            return
        owner = self.tasks[task["owner"]]
        usable = owner["outcome"] is None and owner["mark"] is None
        self._must(usable, "no owned work below an ended or cancelled owner", id, "live", owner)
        self._must(
            owner["conversation"] == task["conversation"],
            "one conversation",
            id,
            owner["conversation"],
            task["conversation"],
        )
        handler = self.books[task["owner"]]["invocation"] == "abort"
        self._must(not handler, "an abort handler creates nothing of its own", id, None, task)
        self._must(not task["background"], "background is the conversation's", id, False, True)
        self._must(
            commit["by"] == task["owner"], "a task creates its own", id, commit["by"], task["owner"]
        )

    def _fields(self, commit: dict[str, Any], id: int, old: TaskDict, task: TaskDict) -> None:
        for name in FIXED:
            self._must(old[name] == task[name], "never changes", (id, name), old[name], task[name])
        mine = commit["by"] == id
        reserved = task["invocations"] == old["invocations"] + 1
        fresh = task["status"] == "running" and old["status"] != "running"
        self._must(
            (reserved or task["invocations"] == old["invocations"])
            and (task["status"] == "running" if reserved else not fresh),
            "an invocation is a reservation",
            id,
            old["invocations"],
            task["invocations"],
        )
        if (old["tag"], old["digest"]) != (task["tag"], task["digest"]) and live(task):
            moved = mine or (reserved and task["version"] != old["version"])
            self._must(moved, "only the task moves on", id, old["tag"], task["tag"])
        if task["recoveries"] > old["recoveries"]:
            charged = commit["by"] == "open" and old["status"] == "running"
            self._must(
                charged and task["recoveries"] == old["recoveries"] + 1,
                "only a death charges",
                id,
                old["recoveries"],
                task["recoveries"],
            )
        if task["recoveries"] < old["recoveries"]:
            gives = mine or commit["by"] == "close" or id in commit["renewed"] or task["mark"]
            gives = gives or not live(task) or (old["blocked"] and not task["blocked"])
            self._must(
                (gives and task["recoveries"] == 0) or self.let_off(commit, id, old, task),
                "charges are kept",
                id,
                old["recoveries"],
                task["recoveries"],
            )
        if task["version"] != old["version"]:
            self._must(
                reserved and task["version"] > old["version"],
                "migrated at reservation",
                id,
                old["version"],
                task["version"],
            )
        self._must(
            old["outcome"] in (None, task["outcome"]),
            "one outcome",
            id,
            old["outcome"],
            task["outcome"],
        )

    def _mark(
        self,
        commit: dict[str, Any],
        id: int,
        old: TaskDict,
        task: TaskDict,
        before: dict[int, TaskDict],
    ) -> None:
        """Marks only grow, and each has its cause: a request, an owner, a join, a deadline."""
        if old["mark"] == task["mark"]:
            return
        self._must(old["mark"] is None, "marks stay", id, old["mark"], task["mark"])
        self._must(live(old), "a receipt is not marked", id, None, task["mark"])
        if id in commit["requests"]:
            return
        # One commit may mark what is below an owner and then end both.
        if self.cancelled(id) or any(
            intends(before[each]) for each in self.above(id) if each in before
        ):
            return
        past = task["deadline"] is not None and task["deadline"] <= commit["now"]
        if task["mark"] == "deadline" and past:
            return
        if task["mark"] == "join" and self._joined(id, before):
            return
        restarted = commit["by"] == "open" and "abort" in self.policies_of_restart(id)
        self._must(restarted, "a mark has a cause", id, None, task["mark"])

    def _joined(self, id: int, before: dict[int, TaskDict]) -> bool:
        """Whether a join over this task was decided by another one; it may end by this commit."""
        for waiter, task in before.items():
            if task["wait"] and id in (task["wait"]["on"] or ()):
                deciders = self.books[waiter].get("deciders") or self._decided_by(task["wait"])
                if set(deciders) - {id}:
                    return True
        return False

    def _decided_by(self, wait: dict[str, Any]) -> list[int]:
        on = wait["on"] or ()
        if wait["policy"] == "all_settled":
            return []
        return [each for each in on if decisive(self.tasks[each], wait["policy"])]

    def _deciders(self) -> None:
        """Remember who decided each join: whoever did so in the first commit in which one did."""
        for id, task in self.tasks.items():
            if task["wait"] is None or task["status"] != "waiting":
                if self.books[id].get("deciders"):
                    self.books[id] = {**self.books[id], "deciders": None}
            elif not self.books[id].get("deciders"):
                found = self._decided_by(task["wait"])
                if found:
                    self.books[id] = {**self.books[id], "deciders": found}

    def _blocked(self, commit: dict[str, Any], id: int, old: TaskDict, task: TaskDict) -> None:
        if old["blocked"] == task["blocked"]:
            return
        if task["blocked"] is not None:
            self._must(
                task["blocked"] in self.reasons(id, old, commit),
                "blocked for a reason",
                id,
                self.reasons(id, old, commit),
                task["blocked"],
            )
            self.books[id] = {
                **self.books[id],
                "object": self._object(task["kind"]),
                "under": self.halted(id),
            }
            return
        marked = task["mark"] is not None and old["mark"] is None
        looked = marked or id in (*commit["renewed"], *commit["requests"]) or not live(task)
        changed = self.books[id]["object"] != self._object(task["kind"])
        # A new process has new code.
        changed = changed or (commit["by"] == "open" and old["blocked"] in CODE_REASONS)
        if old["blocked"] == "interrupted":
            changed = self.books[id]["under"] and not self.halted(id)
            changed = changed or (commit["by"] == "open" and self.let_go(id))
        self._must(looked or changed, "blocked until looked at", id, old["blocked"], None)

    def reasons(self, id: int, task: TaskDict, commit: dict[str, Any] | None) -> list[str]:
        """Every reason for which a task may be blocked now."""
        found = [self.unusable(task)] if self.unusable(task) else []
        if commit is None:
            return found
        restarted = commit["by"] == "open" and not self.let_go(id)
        if restarted and "wait" in self.policies_of_restart(id):
            found.append("interrupted")
        if commit["by"] in ("open", "scheduler") and self.looping(id, commit["tasks"][id]):
            found.append("crash_loop")
        if commit["by"] == id and self.books[id]["definition"]["park"]:
            found.append("faulted")
        return found

    def looping(self, id: int, task: TaskDict) -> bool:
        """Whether a task is blamed for the deaths that it was charged with."""
        return task["recoveries"] >= self.recoveries_max and not self.books[id].get("others")

    def unusable(self, task: TaskDict) -> str | None:
        """Why the installed definition cannot take a task."""
        definition = self.definitions.get(task["kind"])
        if definition is None:
            return "missing_definition"
        if definition["version"] < task["version"]:
            return "definition_too_old"
        if definition["version"] > task["version"] and not definition["migrate"]:
            return "migration_failed"
        return None

    def _object(self, kind: str) -> int | None:
        definition = self.definitions.get(kind)
        return None if definition is None else definition["object"]

    # --- one step of one task --------------------------------------------------------------

    def _step(
        self, commit: dict[str, Any], id: int, old: TaskDict, task: TaskDict, working: Counter[int]
    ) -> None:
        was, now = old["status"], task["status"]
        self._must(now in EDGES[was], "an edge of the table", id, EDGES[was], now)
        again = task["invocations"] > old["invocations"]
        if was == "terminal" or (was == now and not again):
            self._must(was != "terminal" or old == task, "a receipt stays", id, old, task)
            return
        if was == now == "running":
            # The phase was stopped by a mark, and its abort handler follows at once.
            stopped = task["mark"] is not None and self.books[id]["invocation"] == "phase"
            self._must(stopped, "one invocation at a time", id, "running", "reserved again")
        if was == "waiting" and now in ("pending", "running") and task["mark"] is None:
            self._wake(commit, id, old, task)
        if now == "running":
            self._reserve(commit, id, task, working)
        elif now == "waiting" and was == "running":
            self._wait(commit, id, task)
        elif now == "pending" and was == "running":
            self._back(commit, id, old, task)
        elif now in ("completing", "terminal"):
            self._end(commit, id, old, task, working)

    def _wake(self, commit: dict[str, Any], id: int, old: TaskDict, task: TaskDict) -> None:
        self._must(not self.cancelled(id), "no waking below an intent", id, "waiting", task)
        self._must(old["blocked"] is None, "blocked wakes for nothing", id, "waiting", task)
        cause = self.wakes(id, old, commit["now"])
        self._must(cause is not None, "a wait ends when it may", id, old["wait"], task["status"])
        seen = self.wakes(id, old, commit["now"], commit["published"])
        self._must(task["woken_by"] in (cause, seen), "woken by", id, (cause, seen), task)

    def wakes(self, id: int, task: TaskDict, now: int, published: int | None = None) -> str | None:
        """What ends a wait, the first in the given order; None if nothing is there yet.

        With `published` what came after that commit does not count.
        """
        wait = task["wait"]

        on, unread = wait["on"], self.signals.get(id, ())
        if on is not None and all(self.settled(each, published) for each in on):
            return "tasks"
        seen = [n for n in unread if published is None or self.since.get(n, 0) <= published]
        if wait["signals"] and seen:
            return "signal"
        if wait["deadline"] is not None and wait["deadline"] <= now:
            return "deadline"
        return None

    def _reserve(
        self, commit: dict[str, Any], id: int, task: TaskDict, working: Counter[int]
    ) -> None:
        self._must(commit["by"] == "scheduler", "the scheduler reserves", id, "scheduler", commit)
        self._must(task["blocked"] is None, "blocked starts nothing", id, None, task["blocked"])
        self._must(
            task["ready_at"] <= commit["now"],
            "not before it is ready",
            id,
            task["ready_at"],
            commit["now"],
        )
        self._must(
            self.unusable(task) is None
            and task["version"] == self.definitions[task["kind"]]["version"],
            "with code that can take it",
            id,
            self.definitions.get(task["kind"]),
            task["version"],
        )
        kind = "phase" if task["mark"] is None else "abort"
        if kind == "phase":
            self._must(self.started, "nothing before start", id, "pending", "running")
            self._must(not self.cancelled(id), "no start below an intent", id, "pending", task)
            self._must(not self.halted(id), "no start below an interruption", id, "pending", task)
        else:
            self._must(not working[id], "handlers run bottom-up", id, 0, working[id])
            undoes = self.definitions[task["kind"]]["undo"] and task["invocations"] > 1
            self._must(undoes, "settled without an invocation", id, "aborted", "running")
        self._must(not self.looping(id, task), "a crash loop ends", id, "blocked", task)
        if task["recoveries"] >= SUSPECT_AFTER:
            other = self.suspect_running(id)
            self._must(other is None, "suspects one at a time", id, other, task["recoveries"])
            kept = [
                each
                for each, found in self.tasks.items()
                if each != id and found["status"] == "running" and self.holds(each)
                if found["recoveries"] >= SUSPECT_AFTER and found["mark"] is None
            ]
            self._must(not kept, "who waits is let off by the next trial", id, [], kept)
        self.books[id] = {
            **self.books[id],
            "invocation": kind,
            "object": self._object(task["kind"]),
            "definition": self.definitions[task["kind"]],
        }

    def let_off(self, commit: dict[str, Any], id: int, old: TaskDict, task: TaskDict) -> bool:
        """Whether a suspect waits in memory, and another one is tried in its place from now on."""
        tried = (
            each
            for each, found in commit["tasks"].items()
            if each in self.reserved and found["recoveries"] >= SUSPECT_AFTER
        )
        waits = old["status"] == task["status"] == "running" and self.holds(id)
        below = old["recoveries"] >= SUSPECT_AFTER and task["recoveries"] == SUSPECT_AFTER - 1
        return commit["by"] == "scheduler" and waits and below and any(tried)

    def holds(self, id: int) -> bool:
        """Whether the code of a task waits in memory for what has not ended."""
        found = (self.tasks.get(each) for each in self.held.get(id, ()))
        return any(each is not None and live(each) for each in found)

    def suspect_running(self, but: int) -> int | None:
        for id, task in self.tasks.items():
            stopped = task["mark"] is not None and self.books[id]["invocation"] == "phase"
            if task["status"] != "running" or stopped or id == but or self.holds(id):
                continue
            began = self.trials.get((id, task["invocations"]), self.alive_us)
            young = self.alive_us - began < SUSPECT_US
            if young and task["recoveries"] >= SUSPECT_AFTER:
                return id
        return None

    def _wait(self, commit: dict[str, Any], id: int, task: TaskDict) -> None:
        self._must(commit["by"] == id, "a task parks itself", id, id, commit["by"])
        wait = task["wait"]
        self._must(wait is not None, "a wait has a condition", id, "a wait", None)
        unknown = [each for each in wait["on"] or () if each not in self.tasks]
        unknown = [each for each in unknown if each not in self.conversations]
        self._must(not unknown, "waits on what is known", id, "tasks", unknown)
        if self.books[id]["invocation"] == "abort":
            free = wait["on"] is None and not wait["signals"]
            self._must(free, "an abort handler waits on nothing", id, None, wait)
        if wait["policy"] != "all_settled":
            foreign = [each for each in wait["on"] or () if not self._owns(id, each)]
            self._must(not foreign, "a deciding join is over its own", id, [], foreign)
        if endless(wait):
            # What is marked leaves its wait, so only a cycle without such waits can never end.
            closed = self.cycle(id, tuple(wait["on"] or ()), marked_too=False)
            self._must(not closed, "a wait that cannot end is refused", id, "refused", wait)

    def _owns(self, id: int, other: int) -> bool:
        return other in self.tasks and id in self.above(other)

    def _back(self, commit: dict[str, Any], id: int, old: TaskDict, task: TaskDict) -> None:
        """Running becomes pending: a death, close, mark, retry, handover or parked fault."""
        by = commit["by"]
        if by == "open":
            charged = task["recoveries"] == old["recoveries"] + 1 or bool(task["mark"])
            self._must(charged, "a death is charged", id, old["recoveries"] + 1, task)
            return
        self._must(task["recoveries"] <= old["recoveries"], "uncharged", id, old, task)
        raised, definition = commit["raised"].get(id), self.books[id]["definition"]
        retries = raised == "oserror" and old["tries"] + 1 < definition["tries"]
        if task["tries"] > old["tries"]:
            self._must(retries, "a retry follows a raise", id, definition, task["tries"])
        elif task["blocked"] == "faulted":
            self._must(raised and not retries, "parked by a fault", id, raised, "parked")
        elif by != "close" and task["mark"] is None and task["blocked"] is None:
            replaced = self._object(task["kind"]) != self.books[id]["object"]
            left = replaced or self.cancelled(id)
            self._must(left, "a handover has a successor", id, "running", "pending")

    def _end(
        self, commit: dict[str, Any], id: int, old: TaskDict, task: TaskDict, working: Counter[int]
    ) -> None:
        self._must(task["outcome"], "an end has an outcome", id, "an outcome", None)
        held = bool(working[id])
        self._must(
            held == (task["status"] == "completing"),
            "work holds its owner",
            id,
            "completing" if held else "terminal",
            task["status"],
        )
        if old["status"] == "completing":
            return
        if commit["by"] == id:
            if task["outcome"] == "aborted":
                handler = self.books[id]["invocation"] == "abort"
                self._must(handler, "only a handler ends aborted", id, "abort", "phase")
            if task["outcome"] == "faulted":
                self._fault(commit, id, old)
            return
        self._must(task["mark"] is not None, "others end only what is marked", id, "mark", task)
        ended = old["status"] != "running" or self.books[id]["invocation"] == "phase"
        self._must(ended, "a running handler ends itself", id, id, commit)
        self._must(task["status"] == "terminal", "settled after what is below", id, 0, working[id])
        definition = self.definitions.get(task["kind"])
        right = set()
        if not old["invocations"] or (definition and not definition["undo"]):
            right.add("aborted")
        if old["invocations"] and self.unusable(task) is not None:
            right.add("orphaned")
        self._must(task["outcome"] in right, "settled by the scheduler", id, right, task)

    def _fault(self, commit: dict[str, Any], id: int, old: TaskDict) -> None:
        """Only what left the handler faults a task, and only where nothing milder follows."""
        raised, definition = commit["raised"].get(id), self.books[id]["definition"]
        self._must(raised, "a fault has a cause", id, "an error", raised)
        retries = raised == "oserror" and old["tries"] + 1 < definition["tries"]
        self._must(not retries, "tried again while there are tries", id, definition["tries"], old)
        self._must(not definition["park"], "a fault is parked", id, "blocked", "faulted")

    # --- limits, signals -------------------------------------------------------------------

    def slots(self, working: Counter[int]) -> Counter[str]:
        """The slots that are held, by kind and in all (""): of phases with nothing below.

        A phase below an intent was stopped, or never started.
        """
        held: Counter[str] = Counter()
        for id, task in self.tasks.items():
            phase = task["status"] == "running" and self.books[id]["invocation"] == "phase"
            if phase and not working[id] and task["mark"] is None and not self.cancelled(id):
                held.update([task["kind"], ""])
        return held

    def _slots(
        self, commit: dict[str, Any], changed: dict[int, TaskDict], before: dict[int, TaskDict]
    ) -> None:
        """What was reserved had a slot, by what was published when the commit was made.

        Work that ends at the same time gives its owner the slot back, which may exceed the limit.
        """
        working = self.working(commit["published"])
        held = self.slots(working)
        for id, task in changed.items():
            fresh = id in before and before[id]["status"] != "running"
            if fresh and task["status"] == "running" and not working[id] and task["mark"] is None:
                for name, most in (
                    (task["kind"], self.limits.get(task["kind"])),
                    ("", self.running_max),
                ):
                    free = most is None or held[name] <= most
                    self._must(free, "within the limit", (id, name), most, held[name])
        held = self.slots(self.working())
        if any(n > self.limits.get(k, self.running_max) for k, n in held.items()):
            self.rare["lent slot exceeding a limit"] += 1

    def _signals(self, commit: dict[str, Any], before: dict[int, TaskDict]) -> None:
        self.signals = dict(self.signals)
        for id, task, key in commit["signals"]:
            there = live(before.get(task) or self.tasks[task])
            self._must(there, "signals are for live tasks", id, "live", task)
            self._must(
                key is None or (task, key) not in self.keys, "one signal a key", id, "once", key
            )
            if key is not None:
                self.keys |= {(task, key)}
            self.signals[task] = (*self.signals.get(task, ()), id)
        if commit["received"]:
            by = commit["by"]
            read, unread = tuple(commit["received"]), self.signals.get(by, ())
            self._must(
                read == unread[: len(read)], "signals are read once, in order", by, unread, read
            )
            self.signals[by] = unread[len(read) :]
        for id in [id for id in self.signals if not live(self.tasks[id])]:
            del self.signals[id]

    # --- processes ---------------------------------------------------------------------------

    def died(self) -> None:
        """The process is gone; what invocations held in memory is gone with it."""
        suspects = {
            id
            for id, task in self.tasks.items()
            if task["status"] == "running" and task["recoveries"] >= SUSPECT_AFTER
        }
        # Code that comes with a new process is nothing new to a task that is blocked otherwise.
        self.books = {
            id: {
                **book,
                "invocation": None,
                "object": self._object(self.tasks[id]["kind"]),
                "others": suspects - {id}
                if self.tasks[id]["status"] == "running"
                else book.get("others"),
            }
            for id, book in self.books.items()
        }
        self.held.clear()
        self.trials.clear()
        self.started = False

    def opened(self) -> None:
        """The store is open again: no survivor runs, and `on_restart` was obeyed."""
        for id, task in self.tasks.items():
            if not live(task):
                continue
            self._must(task["status"] != "running", "opening recovers", id, "pending", "running")
            policies = self.policies_of_restart(id)
            aborted = policies != {"abort"} or task["mark"] is not None
            self._must(aborted, "a restart aborts", id, "a mark", task)
            free = task["mark"] is None and task["status"] != "completing"
            free = free and not self.let_go(id)
            halted = policies != {"wait"} or not free or task["blocked"] is not None
            self._must(halted, "a restart interrupts", id, "interrupted", task)

    def entered(self, id: int, handler: str, tag: str, object: int) -> None:
        """A handler's body begins, with what is durable as its ground."""
        task, book = self.tasks[id], self.books[id]
        self._must(task["status"] == "running", "runs what is reserved", id, "running", task)
        self._must(
            book["invocation"] == handler,
            "the handler reserved for",
            id,
            book["invocation"],
            handler,
        )
        self._must(task["tag"] == tag, "at the checkpoint stored", id, task["tag"], tag)
        self._must(
            book["object"] == object, "under the code reserved with", id, book["object"], object
        )
        newer = self._object(task["kind"]) not in (None, object) and self.unusable(task) is None
        further = self.begun.get(id) == task["invocations"]
        self.begun[id] = task["invocations"]
        self._must(not (newer and further), "new code takes over", id, "a handover", handler)
        stopped = handler == "phase" and (task["mark"] is not None or self.cancelled(id))
        self._must(not stopped, "no phase begins below an intent", id, "abort", handler)
        early = handler == "phase" and not self.started
        self._must(not early, "no phase begins before start", id, "nothing", handler)

    # --- at rest -----------------------------------------------------------------------------

    def due(self, now: int, alive: int, invocations: dict[int, str]) -> list[str]:
        """What should have happened by now and has not; empty when all agrees."""
        # A sleep may end a little later than asked, never earlier.
        now, self.alive_us = now - LATE_US, alive
        working, found = self.working(), []
        held = self.slots(working)
        for id, task in self.tasks.items():
            if not live(task):
                continue
            missing = self._must_be_marked(id, task, now) or self._must_move(
                id, task, now, working, held
            )
            if missing:
                found.append(f"{id} ({task['status']}): {missing}; {task}")
            runs = self.books[id]["invocation"] if task["status"] == "running" else None
            if task["mark"] is not None and runs == "phase":
                runs = None  # It was stopped; the record says so when its handler is reserved.
            if runs != invocations.get(id):
                found.append(f"{id}: invocation expected {runs}, found {invocations.get(id)}")
        gone = [id for id in invocations if not live(self.tasks[id])]
        return found + [f"{id}: ended, and its invocation goes on" for id in gone]

    def _must_be_marked(self, id: int, task: TaskDict, now: int) -> str | None:
        if task["mark"] is not None:
            return None
        if self.cancelled(id):
            return "not marked below an intent to cancel"
        if task["deadline"] is not None and task["deadline"] <= now:
            return "not marked past its deadline"
        for waiter, other in self.tasks.items():
            if other["status"] != "waiting" or id not in (other["wait"]["on"] or ()):
                continue
            deciders = self.books[waiter].get("deciders") or ()
            # Of several that decided in one commit any one may stand for the first.
            if deciders and id not in deciders:
                return f"not marked by the join of {waiter}, decided by {deciders}"
        return None

    def _must_move(
        self, id: int, task: TaskDict, now: int, working: Counter[int], held: Counter[str]
    ) -> str | None:
        status, quiet = task["status"], not working[id]
        if task["let_go"] and self.started:
            return "its resumption still counts, though tasks run"
        if status == "completing":
            return "not terminal with nothing below" if quiet else None
        if task["blocked"] == "interrupted" and task["mark"] is None:
            freed = self.books[id]["under"] and not self.halted(id)
            return "still interrupted, though what is above was resumed" if freed else None
        tried = task["recoveries"] >= SUSPECT_AFTER and self.suspect_running(id) is not None
        if task["mark"] is not None:
            if task["blocked"] is not None:
                return self._still_blocked(id, task)
            runs = status == "running" and self.books[id]["invocation"] == "abort"
            ready = quiet and task["ready_at"] <= now and not runs and not tried
            return "no abort handler with nothing below" if ready else None
        if status == "running":
            return None
        if status == "waiting":
            cause = None if self.halted(id) else self.wakes(id, task, now)
            return f"not woken by {cause}" if cause else None
        if task["ready_at"] > now or not self.started or self.halted(id):
            return None
        return self._must_start(id, task, now, working, held)

    def _must_start(
        self, id: int, task: TaskDict, now: int, working: Counter[int], held: Counter[str]
    ) -> str | None:
        reason = self.unusable(task)
        if task["blocked"] is not None:
            return self._still_blocked(id, task)
        full = held[""] >= self.running_max
        full = full or held[task["kind"]] >= self.limits.get(task["kind"], self.running_max)
        tried = task["recoveries"] >= SUSPECT_AFTER and self.suspect_running(id) is not None
        if full or tried:
            return None
        if reason is not None:
            return f"not blocked with {reason}"
        return "not started, and nothing stands in its way"

    def _still_blocked(self, id: int, task: TaskDict) -> str | None:
        reason = self.unusable(task)
        stale = self._object(task["kind"]) not in (None, self.books[id]["object"])
        wrong = stale and reason != task["blocked"]
        return f"still blocked with {task['blocked']}, now {reason}" if wrong else None


def endless(wait: dict[str, Any]) -> bool:
    """Whether only what it waits for can end a wait."""
    return bool(wait["on"]) and wait["deadline"] is None and not wait["signals"]
