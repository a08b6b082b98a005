"""Conformance: one holder at a time, fenced by its epoch."""

from __future__ import annotations

import threading

from pidurable.errors import HolderLostError, StorageHeldError
from pidurable.storage import Head, HolderRecord, Storage
from pidurable.testing._conformance_base import (
    LEASE_SECONDS,
    NOW_US,
    Store,
    claim,
    conformance_case,
    conversation,
    equal,
    raises,
)

_LATER_US = NOW_US + int(LEASE_SECONDS * 1_000_000)


@conformance_case
def a_new_store_is_held_by_nobody(store: Store) -> None:
    """Epoch 0, seq 0, next id 1, clean, with an identity, and without a holder."""
    head = store.storage.head()
    equal(head[2:], (0, 0, 1, True))
    equal(bool(head.uuid) and head.created_us > 0, True)
    equal(store.storage.holder(), None)


@conformance_case
def acquiring_raises_the_epoch_and_writes_the_record(store: Store) -> None:
    """The record says who, from where and since when; the answer is the head with the new epoch."""
    before = store.storage.head()
    head = store.storage.acquire(claim(), takeover=False)
    equal(head, before._replace(epoch=1))
    record = store.storage.holder()
    lock_file = record.lock_file if record is not None else None
    equal(
        record,
        HolderRecord(
            epoch=1,
            holder_id="holder-1",
            host="host-1",
            pid=4711,
            started_us=NOW_US,
            heartbeat_us=NOW_US,
            lock_file=lock_file,
            released=False,
        ),
    )


@conformance_case
def acquiring_marks_the_store_unclean(store: Store) -> None:
    """The claimant gets the mark as it was; whoever comes after a crash finds it unclean."""
    storage = store.hold()
    equal(store.head.clean, True)
    equal(storage.head().clean, False)
    storage.close()
    second = store.other()
    head = second.acquire(claim(holder_id="holder-2"), takeover=False)
    equal((head.epoch, head.clean), (2, False))


@conformance_case
def a_clean_close_is_found_clean(store: Store) -> None:
    """After the closing batch and a release the next holder is told so."""
    storage = store.hold()
    store.write(conversation(1), clean=True)
    storage.release(store.head.epoch)
    storage.close()
    head = store.other().acquire(claim(holder_id="holder-2"), takeover=False)
    equal((head.epoch, head.seq, head.clean), (2, 1, True))


@conformance_case
def a_live_holder_is_left_alone(store: Store) -> None:
    """StorageHeldError names it and says how old its heartbeat is; nothing is changed."""
    storage = store.hold()
    record = storage.holder()
    later = claim(holder_id="holder-2", pid=9, at_us=NOW_US + 2_500_000)
    error = raises(StorageHeldError, lambda: store.other().acquire(later, takeover=False))
    equal((error.store, error.pid, error.host), (storage.store, 4711, "host-1"))
    equal(error.heartbeat_age, 2.5)
    equal(storage.holder(), record)
    equal(storage.head().epoch, 1)
    store.write(conversation(1))


@conformance_case
def takeover_replaces_a_live_holder(store: Store) -> None:
    """The epoch goes up and the old holder can do nothing any more."""
    storage = store.hold()
    other = store.other()
    head = other.acquire(claim(holder_id="holder-2"), takeover=True)
    equal(head.epoch, 2)
    for call in (
        lambda: store.write(conversation(1)),
        lambda: storage.heartbeat(1, _LATER_US),
        lambda: storage.release(1),
    ):
        error = raises(HolderLostError, call)
        equal((error.epoch, error.current), (1, 2))
    record = other.holder()
    equal(record and (record.holder_id, record.released), ("holder-2", False))


@conformance_case
def a_silent_holder_is_replaced_after_its_lease(store: Store) -> None:
    """A living holder without a heartbeat for a lease loses the session, not a moment before."""
    store.hold()
    other = store.other()
    early = claim(holder_id="holder-2", at_us=_LATER_US - 1)
    raises(StorageHeldError, lambda: other.acquire(early, takeover=False))
    head = other.acquire(claim(holder_id="holder-2", at_us=_LATER_US), takeover=False)
    equal(head.epoch, 2)
    raises(HolderLostError, lambda: store.write(conversation(1)))


@conformance_case
def a_heartbeat_prolongs_the_lease(store: Store) -> None:
    """The lease counts from the last heartbeat, and a heartbeat changes nothing else."""
    storage = store.hold()
    head = storage.head()
    storage.heartbeat(1, _LATER_US)
    record = storage.holder()
    equal(record and (record.heartbeat_us, record.started_us), (_LATER_US, NOW_US))
    equal(storage.head(), head)
    late = claim(holder_id="holder-2", at_us=_LATER_US + 1_000_000)
    error = raises(StorageHeldError, lambda: store.other().acquire(late, takeover=False))
    equal(error.heartbeat_age, 1.0)


@conformance_case
def a_dead_holder_is_replaced_at_once(store: Store) -> None:
    """A holder that crashed (closed, not released) is replaced however young its heartbeat."""
    store.hold()
    store.storage.close()
    head = store.other().acquire(claim(holder_id="holder-2"), takeover=False)
    equal(head.epoch, 2)


@conformance_case
def a_released_session_is_free(store: Store) -> None:
    """Releasing marks the record and lets the next one in while the handle is still open."""
    storage = store.hold()
    storage.release(1)
    record = storage.holder()
    equal(record and record.released, True)
    head = store.other().acquire(claim(holder_id="holder-2"), takeover=False)
    equal(head.epoch, 2)


@conformance_case
def a_heartbeat_from_the_future_is_taken_as_just_now(store: Store) -> None:
    """A clock that was set back does not make a live holder look dead."""
    store.hold()
    early = claim(holder_id="holder-2", at_us=NOW_US - 3_600_000_000)
    error = raises(StorageHeldError, lambda: store.other().acquire(early, takeover=False))
    equal(error.heartbeat_age, 0.0)


@conformance_case
def of_racing_claimants_exactly_one_wins(store: Store) -> None:
    """Several handles that acquire at the same moment: one holder, one step of the epoch."""
    handles = [store.other() for _ in range(4)]
    barrier = threading.Barrier(len(handles))
    won: list[Head] = []
    lost: list[BaseException] = []

    def race(number: int, storage: Storage) -> None:
        barrier.wait()
        try:
            won.append(storage.acquire(claim(holder_id=f"holder-{number}"), takeover=False))
        except StorageHeldError as error:
            lost.append(error)

    threads = [
        threading.Thread(target=race, args=(number, storage))
        for number, storage in enumerate(handles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal((len(won), len(lost)), (1, 3))
    equal(store.storage.head().epoch, 1)


@conformance_case
def identity_survives_every_holder(store: Store) -> None:
    """The uuid and the moment of creation never change."""
    identity = store.storage.head()[:2]
    store.hold()
    store.write(conversation(1))
    store.storage.close()
    other = store.other()
    equal(other.acquire(claim(), takeover=False)[:2], identity)
    equal(other.head()[:2], identity)


@conformance_case
def the_same_handle_may_take_over_from_itself(store: Store) -> None:
    """A handle that holds the session is refused like any other, and may insist."""
    storage = store.hold()
    raises(StorageHeldError, lambda: storage.acquire(claim(), takeover=False))
    store.head = storage.acquire(claim(holder_id="holder-2"), takeover=True)
    equal(store.head.epoch, 2)
    raises(StorageHeldError, lambda: store.other().acquire(claim(), takeover=False))
    store.write(conversation(1))
