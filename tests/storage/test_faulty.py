"""FaultyStorage does exactly the planned wrong, and otherwise what the inner storage does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pidurable.errors import InvalidArgumentError, StorageAccessError, StorageRefusedError
from pidurable.storage import Batch, CommandBox, MemoryStorage, Storage
from pidurable.testing import Fault, FaultyStorage, Gate, ReopeningStorage
from pidurable.testing._conformance_base import claim, conversation, ids
from pidurable.testing._faulty import READ_CALLS, WRITE_CALLS
from pidurable.testing._forwarding import BOX_CALLS


def opened(*plan: Fault) -> FaultyStorage:
    storage = FaultyStorage(MemoryStorage(), plan)
    storage.acquire(claim(), takeover=False)
    return storage


def batch(id: int) -> Batch:
    return Batch(epoch=1, seq=id, next_id=id + 1, flush=True, writes=[conversation(id)])


def stored(storage: FaultyStorage) -> list[int]:
    return ids(storage.inner.conversations_by_owner(None))


def test_every_call_of_a_storage_is_a_point() -> None:
    """No method of the protocol escapes the plan."""
    methods = {name for name in vars(Storage) if not name.startswith("_")} - {
        "store",
        "command_box",
    }
    of_box = {f"command_box.{name}" for name in vars(CommandBox) if not name.startswith("_")}

    assert methods == READ_CALLS | WRITE_CALLS
    assert of_box == BOX_CALLS
    assert isinstance(FaultyStorage(MemoryStorage()), Storage)


def test_faults_strike_the_planned_calls_only() -> None:
    """The second and third apply are refused, the first and fourth go through."""
    storage = opened(Fault.refuse(at=2, times=2, problem="busy"))

    storage.apply(batch(1))
    for _ in range(2):
        with pytest.raises(StorageRefusedError, match="busy"):
            storage.apply(batch(2))
    storage.apply(batch(2))

    assert stored(storage) == [1, 2]
    assert storage.count("apply") == 4


@pytest.mark.parametrize(
    ("fault", "raised", "expected"),
    [
        (Fault.refuse(), StorageRefusedError, []),
        (Fault.lose(), StorageAccessError, []),
        (Fault.fail("apply"), StorageAccessError, []),
        (Fault.store_then_raise(), StorageAccessError, [1]),
        (Fault.drop(), None, []),
    ],
)
def test_each_fault_stores_what_it_says(
    fault: Fault, raised: type[Exception] | None, expected: list[int]
) -> None:
    """Refused and lost ones store nothing, the uncertain one stores, the dropped one lies."""
    storage = opened(fault)

    if raised is None:
        storage.apply(batch(1))
    else:
        with pytest.raises(raised):
            storage.apply(batch(1))

    assert stored(storage) == expected


def test_reads_fail_by_name_or_all_together() -> None:
    """`read` counts every read; a name counts its own."""
    storage = opened(Fault.fail("read", at=2), Fault.fail("task", at=2))

    storage.head()
    with pytest.raises(StorageAccessError):
        storage.conversation(1)
    storage.task(1)
    with pytest.raises(StorageAccessError):
        storage.task(1)
    storage.task(1)

    assert storage.count("read") == 5


def test_a_fault_added_later_counts_from_then() -> None:
    """`at=1` is the next call, whatever came before; cleared faults do not strike."""
    storage = opened()
    storage.apply(batch(1))
    storage.add(Fault.refuse())

    with pytest.raises(StorageRefusedError):
        storage.apply(batch(2))
    storage.add(Fault.refuse())
    storage.clear()
    storage.apply(batch(2))

    assert stored(storage) == [1, 2]


@pytest.mark.parametrize(("after", "expected"), [(False, []), (True, [1])])
def test_a_call_is_held_inside_the_storage(after: bool, expected: list[int]) -> None:
    """Until the gate opens the call has not returned, and was stored or not, as planned."""
    gate = Gate()
    storage = opened(Fault.hold(gate, after=after))
    thread = threading.Thread(target=storage.apply, args=(batch(1),))

    thread.start()
    assert gate.reached.wait(60)
    held = stored(storage)
    alive = thread.is_alive()
    gate.release()
    thread.join()

    assert held == expected
    assert alive
    assert stored(storage) == [1]


def test_a_gate_that_nobody_opens_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing test ends, with an error that says so."""
    monkeypatch.setattr("pidurable.testing._faulty.GATE_SECONDS", 0)
    storage = opened(Fault.hold(Gate()))

    with pytest.raises(TimeoutError, match="nobody released the gate"):
        storage.apply(batch(1))

    assert stored(storage) == []


def test_a_callback_runs_inside_the_call() -> None:
    """It sees the state at that moment, and what it raises comes out."""
    seen: list[list[int]] = []

    def fail() -> None:
        raise ZeroDivisionError

    storage = opened()
    storage.add(Fault.call(lambda: seen.append(stored(storage))))
    storage.add(Fault.call(lambda: seen.append(stored(storage)), at=2, after=True))
    storage.add(Fault.call(fail, at=3))

    storage.apply(batch(1))
    storage.apply(batch(2))
    with pytest.raises(ZeroDivisionError):
        storage.apply(batch(3))

    assert seen == [[], [1, 2]]
    assert stored(storage) == [1, 2]


def test_a_frozen_storage_is_a_dead_process() -> None:
    """Every call raises and stores nothing; closing frees the session for a successor."""
    storage = opened()
    storage.apply(batch(1))

    storage.freeze()

    assert storage.frozen
    calls: list[Callable[[], object]] = [
        lambda: storage.apply(batch(2)),
        lambda: storage.heartbeat(1, 5),
        lambda: storage.release(1),
        lambda: storage.head(),
        lambda: storage.checkpoint(),
    ]
    for call in calls:
        with pytest.raises(StorageAccessError, match="frozen"):
            call()
    storage.close()
    inner = storage.inner
    assert isinstance(inner, MemoryStorage)
    successor = inner.reopen()
    head = successor.acquire(claim(holder_id="second"), takeover=False)
    assert (head.epoch, head.seq, head.clean) == (2, 1, False)


@pytest.mark.parametrize(("after", "expected"), [(False, []), (True, [1])])
def test_freezing_kills_the_call_that_is_held(after: bool, expected: list[int]) -> None:
    """A call inside the storage at that moment does not return, and stores nothing more."""
    storage = opened()
    storage.add(Fault.call(storage.freeze, after=after))

    with pytest.raises(StorageAccessError, match="frozen"):
        storage.apply(batch(1))

    assert stored(storage) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault.refuse("appyl"),
        lambda: Fault.refuse(at=0),
        lambda: Fault.refuse(times=0),
        lambda: Fault.lose("head"),
        lambda: Fault.drop("acquire"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(make: Callable[[], Fault]) -> None:
    """A misspelt point would make a test that cannot fail."""
    with pytest.raises(InvalidArgumentError):
        make()


def test_a_reopening_storage_shows_what_the_store_holds() -> None:
    """After a batch there is a new handle on the same data, and the old one is closed."""
    first = MemoryStorage()
    storage = ReopeningStorage(first, lambda inner: first.reopen())
    storage.acquire(claim(), takeover=False)

    storage.apply(batch(1))

    assert storage.inner is not first
    assert ids(storage.conversations_by_owner(None)) == [1]


def test_a_memory_handle_is_opened_again_by_acquiring() -> None:
    """The same object serves one session after another."""
    storage = MemoryStorage("shop", uuid="u", created_us=5)
    storage.acquire(claim(), takeover=False)
    storage.apply(batch(1))
    storage.close()

    head = storage.acquire(claim(), takeover=False)

    assert head == ("u", 5, 2, 1, 2, False)
    assert storage.store == "shop"
    assert ids(storage.conversations_by_owner(None)) == [1]
