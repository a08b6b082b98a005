"""The model itself: right histories pass, wrong ones are refused by the rule that they break."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import Oracle, Refused

ROOT = 1
KIND = {"object": 1, "version": 1, "migrate": False, "undo": True, "tries": 0, "park": False}
FRESH = {
    "conversation": ROOT,
    "kind": "k",
    "version": 1,
    "owner": None,
    "background": False,
    "on_restart": None,
    "deadline": None,
    "status": "pending",
    "mark": None,
    "outcome": None,
    "blocked": None,
    "woken_by": None,
    "wait": None,
    "tag": "start",
    "digest": "",
    "invocations": 0,
    "recoveries": 0,
    "tries": 0,
    "ready_at": 0,
    "let_go": False,
}


def on(*ids: int, policy: str = "all_settled", signals: bool = False, deadline: Any = None) -> Any:
    return {"on": ids or None, "policy": policy, "signals": signals, "deadline": deadline}


class History:
    """Commits told to a model, one line each."""

    def __init__(self, limits: dict[str, int] | None = None, running_max: int = 1000) -> None:
        self.model = Oracle(limits or {}, running_max)
        self.model.started = True
        self.definitions: dict[str, Any] = {"k": KIND}
        self.now = 1000
        self.seq = 0
        self.tell("host", conversations={ROOT: None})

    def tell(self, by: Any, *, tasks: Any = None, **more: Any) -> None:
        self.seq += 1
        full = {
            id: {**self.model.tasks.get(id, FRESH), **given} for id, given in (tasks or {}).items()
        }
        empty: dict[str, Any] = {"conversations": {}, "requests": {}, "renewed": ()}
        empty |= {
            "signals": [],
            "received": [],
            "raised": {},
            "published": self.seq - 1,
            "definitions": self.definitions,
        }
        self.model.commit(
            {
                **empty,
                "seq": self.seq,
                "now": self.now,
                "alive": self.now,
                "by": by,
                "tasks": full,
                **more,
            }
        )

    def make(self, id: int, by: Any = "host", **given: Any) -> None:
        self.tell(by, tasks={id: given})

    def run(self, *ids: int) -> None:
        times = {id: self.model.tasks[id]["invocations"] + 1 for id in ids}
        self.tell(
            "scheduler", tasks={id: {"status": "running", "invocations": times[id]} for id in ids}
        )

    def end(self, id: int, outcome: str, status: str = "terminal", **more: Any) -> None:
        self.tell(id, tasks={id: {"status": status, "outcome": outcome}}, **more)

    def family(self) -> None:
        """2 runs; it owns 3 and 4, which run."""
        self.make(2)
        self.run(2)
        self.make(3, by=2, owner=2)
        self.make(4, by=2, owner=2)
        self.run(3, 4)

    def join(self, policy: str) -> None:
        self.family()
        self.tell(2, tasks={2: {"status": "waiting", "wait": on(3, 4, policy=policy)}})

    def due(self) -> list[str]:
        model = self.model
        running = [id for id, task in model.tasks.items() if task["status"] == "running"]
        found = model.due(self.now, self.now, {id: model.books[id]["invocation"] for id in running})
        return [each.partition(";")[0] for each in found]


@pytest.fixture
def history() -> History:
    return History()


def test_a_right_history_passes_and_comes_to_rest(history: History) -> None:
    """A join over two children, one failing, wakes and completes, and nothing is left to do."""
    history.join("fail_fast")
    history.end(3, "failed")
    assert history.due() == ["4 (running): not marked by the join of 2, decided by [3]"]
    history.tell("scheduler", tasks={4: {"mark": "join"}})
    history.tell(4, tasks={4: {"status": "pending"}})
    history.run(4)
    history.end(4, "aborted")
    assert history.due() == ["2 (waiting): not woken by tasks"]
    woken = {"status": "running", "invocations": 2, "woken_by": "tasks", "wait": None}
    history.tell("scheduler", tasks={2: woken})
    history.end(2, "completed")

    assert history.due() == []


def wrong_owner(h: History) -> None:
    h.family()
    h.end(2, "completed")


def two_outcomes(h: History) -> None:
    h.family()
    h.end(2, "completed", status="completing")
    h.tell("scheduler", tasks={2: {"outcome": "failed"}})


def lost_mark(h: History) -> None:
    h.make(2)
    h.tell("host", tasks={2: {"mark": "user"}}, requests={2: "user"})
    h.tell("scheduler", tasks={2: {"mark": None}})


def mark_without_cause(h: History) -> None:
    h.make(2)
    h.tell("scheduler", tasks={2: {"mark": "join"}})


def decider_marked(h: History) -> None:
    h.join("fail_fast")
    h.make(5, by=3, owner=3)
    h.end(3, "failed", status="completing")
    h.tell("scheduler", tasks={3: {"mark": "join"}})


def early_wake(h: History) -> None:
    h.join("all_settled")
    h.end(3, "completed")
    woken = {"status": "pending", "woken_by": "tasks", "wait": None}
    h.tell("scheduler", tasks={2: woken})


def wrong_cause(h: History) -> None:
    h.make(2)
    h.run(2)
    h.tell(2, tasks={2: {"status": "waiting", "wait": on(signals=True, deadline=0)}})
    h.tell("host", signals=[(9, 2, None)])
    h.tell("scheduler", tasks={2: {"status": "pending", "woken_by": "deadline", "wait": None}})


def start_below_intent(h: History) -> None:
    h.make(2)
    h.run(2)
    h.make(3, by=2, owner=2)
    h.tell("host", tasks={2: {"mark": "user"}}, requests={2: "user"})
    h.run(3)


def handler_too_early(h: History) -> None:
    h.family()
    h.tell("host", tasks={2: {"mark": "user"}}, requests={2: "user"})
    h.tell(2, tasks={2: {"status": "pending"}})
    h.run(2)


def late_commit(h: History) -> None:
    h.make(2)
    h.run(2)
    h.tell("host", tasks={2: {"mark": "user"}}, requests={2: "user"})
    h.tell(2, tasks={2: {"tag": "next"}})


def below_an_ended_owner(h: History) -> None:
    h.make(2)
    h.run(2)
    h.tell(2, tasks={2: {"status": "completing", "outcome": "failed"}, 3: {"owner": 2}})


def cycle(h: History) -> None:
    h.family()
    h.tell(3, tasks={3: {"status": "waiting", "wait": on(2)}})


def cycle_in_memory(h: History) -> None:
    h.family()
    h.model.held = {4: (3,)}
    h.tell(3, tasks={3: {"status": "waiting", "wait": on(4)}})


def signal_twice(h: History) -> None:
    h.make(2)
    h.run(2)
    h.tell("host", signals=[(9, 2, None), (10, 2, None)])
    h.tell(2, received=[9])
    h.tell(2, received=[9])


def signals_out_of_order(h: History) -> None:
    h.make(2)
    h.run(2)
    h.tell("host", signals=[(9, 2, None), (10, 2, None)])
    h.tell(2, received=[10])


def uncharged_death(h: History) -> None:
    h.make(2)
    h.run(2)
    h.model.died()
    h.tell("open", tasks={2: {"status": "pending"}})


def charged_close(h: History) -> None:
    h.make(2)
    h.run(2)
    h.tell("close", tasks={2: {"status": "pending", "recoveries": 1}})


def idle_handover(h: History) -> None:
    h.make(2)
    h.run(2)
    h.tell(2, tasks={2: {"status": "pending"}})


def too_early(h: History) -> None:
    h.make(2, ready_at=5000)
    h.run(2)


def over_the_limit(h: History) -> None:
    h.model.limits = {"k": 1}
    h.make(2)
    h.make(3)
    h.run(2, 3)


def id_twice(h: History) -> None:
    h.make(5)
    h.make(4)


def blocked_for_nothing(h: History) -> None:
    h.make(2)
    h.tell("scheduler", tasks={2: {"blocked": "missing_definition"}})


def foreign_join(h: History) -> None:
    h.family()
    h.tell(3, tasks={3: {"status": "waiting", "wait": on(4, policy="fail_fast")}})


def orphan_too_early(h: History) -> None:
    h.family()
    h.tell("host", tasks={2: {"mark": "user"}}, requests={2: "user"})
    h.tell(2, tasks={2: {"status": "pending"}})
    h.definitions = {}
    h.tell("scheduler", tasks={2: {"status": "terminal", "outcome": "orphaned"}})


WRONG = {
    "work holds its owner": [wrong_owner, orphan_too_early],
    "one outcome": [two_outcomes],
    "marks stay": [lost_mark],
    "a mark has a cause": [mark_without_cause, decider_marked],
    "a wait ends when it may": [early_wake],
    "woken by": [wrong_cause],
    "no start below an intent": [start_below_intent],
    "handlers run bottom-up": [handler_too_early],
    "no commit of a phase after the mark": [late_commit],
    "no owned work below an ended or cancelled owner": [below_an_ended_owner],
    "a wait that cannot end is refused": [cycle, cycle_in_memory],
    "signals are read once, in order": [signal_twice, signals_out_of_order],
    "a death is charged": [uncharged_death],
    "only a death charges": [charged_close],
    "a handover has a successor": [idle_handover],
    "not before it is ready": [too_early],
    "within the limit": [over_the_limit],
    "ids go up": [id_twice],
    "blocked for a reason": [blocked_for_nothing],
    "a deciding join is over its own": [foreign_join],
}


@pytest.mark.parametrize(
    ("rule", "tell"), [(rule, each) for rule, several in WRONG.items() for each in several]
)
def test_a_wrong_history_is_refused_by_its_rule(rule: str, tell: Any, history: History) -> None:
    """Each planted mistake is refused at the commit that makes it, by the rule that it breaks."""
    with pytest.raises(Refused) as caught:
        tell(history)

    assert caught.value.rule == rule


def test_work_behind_a_background_task_neither_holds_nor_is_cancelled(history: History) -> None:
    """A background task in an owned conversation lets its owner end, and lives on."""
    history.make(2)
    history.run(2)
    history.tell(2, conversations={3: 2}, tasks={4: {"conversation": 3, "background": True}})
    history.tell(2, tasks={5: {"conversation": 3}})
    history.run(4, 5)
    assert history.model.working()[2] == 1
    history.end(5, "completed")
    history.end(2, "failed")

    assert not history.model.cancelled(4)
    assert history.due() == []


def test_work_below_an_ended_task_still_holds_what_is_live_above(history: History) -> None:
    """New work in the conversation of an ended task holds, and is cancelled with, its root."""
    history.make(2)
    history.run(2)
    history.make(3, by=2, owner=2)
    history.run(3)
    history.tell(3, conversations={4: 3})
    history.end(3, "completed")
    history.make(5, conversation=4)

    assert [history.model.working()[id] for id in (2, 3)] == [1, 1]
    history.tell("host", tasks={2: {"mark": "user"}}, requests={2: "user"})
    assert "5 (pending): not marked below an intent to cancel" in history.due()


def test_a_lent_slot_is_free_for_what_is_below(history: History) -> None:
    """A running owner holds no slot while work is below it, and may exceed the limit after."""
    history.model.limits = {"k": 1}
    history.make(2)
    history.run(2)
    history.make(3, by=2, owner=2)
    history.run(3)
    history.make(4)
    history.end(3, "completed")

    assert history.due() == []
    assert history.model.slots(history.model.working()) == {"k": 1, "": 1}


def test_what_was_lost_with_a_batch_is_forgotten(history: History) -> None:
    """Going back to a snapshot undoes every commit after it."""
    history.make(2)
    kept = history.model.snapshot()
    history.run(2)
    history.end(2, "completed")
    history.model.restore(kept)

    assert history.model.tasks[2]["status"] == "pending"
    assert history.due() == ["2 (pending): not started, and nothing stands in its way"]


def suspected_caller(h: History) -> None:
    """2 owns 3; both were running in three deaths, and 2 is on trial."""
    h.make(2)
    h.run(2)
    h.make(3, by=2, owner=2)
    h.run(3)
    for charge in (1, 2, 3):
        h.model.died()
        died = {"status": "pending", "recoveries": charge}
        h.tell("open", tasks={2: died, 3: died})
        h.model.started = True
        if charge < 3:
            h.run(2, 3)
    h.run(2)


def start_below(h: History, *, caller: int) -> None:
    runs = {"status": "running", "invocations": 4}
    h.tell("scheduler", tasks={2: {"recoveries": caller}, 3: runs})


def test_a_suspect_that_waits_is_let_off_by_the_next_trial_and_by_nothing_else() -> None:
    """The charge of a waiting suspect goes below suspicion as another starts; else it is kept."""
    right, kept, runs, alone = histories = [History() for _ in range(4)]
    for each in histories:
        suspected_caller(each)
        if each is not runs:
            each.model.held[2] = (3,)
    start_below(right, caller=2)
    assert right.model.suspect_running(3) is None
    with pytest.raises(Refused) as refused:
        start_below(kept, caller=3)
    assert refused.value.rule == "who waits is let off by the next trial"
    with pytest.raises(Refused) as refused:
        start_below(runs, caller=3)
    assert refused.value.rule == "suspects one at a time"
    with pytest.raises(Refused) as refused:
        start_below(runs, caller=2)
    assert refused.value.rule == "charges are kept"
    with pytest.raises(Refused) as refused:
        alone.tell("scheduler", tasks={2: {"recoveries": 2}})
    assert refused.value.rule == "charges are kept"
