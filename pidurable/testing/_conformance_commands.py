"""Conformance: commands from outside wait in order, are taken once, and can be taken back."""

from __future__ import annotations

import threading

from pidurable.errors import StorageRefusedError
from pidurable.records._limits import COMMAND_BYTES_MAX
from pidurable.storage import TakenCommand
from pidurable.testing._conformance_base import Store, conformance_case, equal, raises


def _texts(taken: list[TakenCommand]) -> list[str | None]:
    return [each.text for each in taken]


@conformance_case
def commands_are_taken_in_order_of_arrival_and_once(store: Store) -> None:
    """A handle without ownership hands in, the holder takes, and is given nothing twice."""
    holder, outside = store.hold(), store.other()
    for number in range(5):
        outside.command_box.hand_in(f"id {number}", f"text {number} é")
    equal(holder.command_box.has_news(), True)
    equal(_texts(holder.command_box.take(limit=2)), ["text 0 é", "text 1 é"])
    equal(holder.command_box.has_news(), True)
    equal(_texts(holder.command_box.take()), ["text 2 é", "text 3 é", "text 4 é"])
    equal(holder.command_box.take(), [])


@conformance_case
def a_command_is_found_where_it_stands(store: Store) -> None:
    """It waits, is taken, and is gone when it is forgotten; asking needs no ownership."""
    holder, outside = store.hold(), store.other()
    equal(outside.command_box.find("one"), None)
    outside.command_box.hand_in("one", "text")
    equal(outside.command_box.find("one"), "waiting")
    (taken,) = holder.command_box.take()
    equal(outside.command_box.find("one"), "taken")
    holder.command_box.forget(taken.name)
    equal(outside.command_box.find("one"), None)
    holder.command_box.forget(taken.name)
    equal(store.other().command_box.take(), [])


@conformance_case
def what_waits_can_be_withdrawn_and_what_is_taken_cannot(store: Store) -> None:
    """Exactly one of the two that want a command has it, and is told so."""
    holder, outside = store.hold(), store.other()
    outside.command_box.hand_in("back", "1")
    outside.command_box.hand_in("kept", "2")
    equal(outside.command_box.withdraw("back"), True)
    equal(outside.command_box.withdraw("back"), False)
    equal(_texts(holder.command_box.take()), ["2"])
    equal(outside.command_box.withdraw("kept"), False)
    equal(outside.command_box.find("kept"), "taken")


@conformance_case
def what_a_dead_holder_took_is_taken_again(store: Store) -> None:
    """Another handle is given what an earlier one took and never forgot, and newer ones behind."""
    first, outside = store.hold(), store.other()
    outside.command_box.hand_in("old", "1")
    equal(_texts(first.command_box.take()), ["1"])
    outside.command_box.hand_in("new", "2")
    first.close()
    equal(_texts(store.other().command_box.take()), ["1", "2"])


@conformance_case
def the_same_id_may_be_handed_in_twice(store: Store) -> None:
    """Both are given: it is the answer in the store that makes one of them count."""
    holder, outside = store.hold(), store.other()
    for text in ("1", "2"):
        outside.command_box.hand_in("same", text)
    found = holder.command_box.take()
    equal(_texts(found), ["1", "2"])
    holder.command_box.forget(found[0].name)
    outside.command_box.hand_in("same", "3")
    equal(outside.command_box.find("same"), "taken", "the one that is farthest counts")
    equal(outside.command_box.withdraw("same"), True, "the one that waits")
    equal(outside.command_box.find("same"), "taken")


@conformance_case
def what_is_set_aside_waits_no_more(store: Store) -> None:
    """It is given to nobody again, and whoever handed it in can see what became of it."""
    holder, outside = store.hold(), store.other()
    outside.command_box.hand_in("bad", "no command")
    (taken,) = holder.command_box.take()
    holder.command_box.set_aside(taken.name)
    equal(outside.command_box.find("bad"), "set_aside")
    equal(holder.command_box.take(), [])
    equal(store.other().command_box.take(), [])


@conformance_case
def a_command_has_a_size_that_is_allowed(store: Store) -> None:
    """At the limit it is taken; one byte above, it is refused for certain."""
    holder, outside = store.hold(), store.other()
    for large in ("x" * (COMMAND_BYTES_MAX + 1), "é" * (COMMAND_BYTES_MAX // 2) + "xx"):
        raises(StorageRefusedError, outside.command_box.hand_in, "1", large)
    equal(holder.command_box.take(), [])
    outside.command_box.hand_in("1", "x" * COMMAND_BYTES_MAX)
    equal([len(each.text or "") for each in holder.command_box.take()], [COMMAND_BYTES_MAX])


@conformance_case
def many_hand_in_at_once_and_each_is_given_once(store: Store) -> None:
    """Threads with handles of their own lose none of their commands to each other."""
    holder = store.hold()
    boxes = [store.other().command_box for _ in range(4)]

    def hand_in(number: int) -> None:
        for each in range(10):
            boxes[number].hand_in(f"{number}.{each}", f"{number}.{each}")

    threads = [threading.Thread(target=hand_in, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found: list[str] = []
    while any(thread.is_alive() for thread in threads):
        found += [each.text or "" for each in holder.command_box.take()]
    for thread in threads:
        thread.join()
    found += [each.text or "" for each in holder.command_box.take()]
    equal(sorted(found), sorted(f"{a}.{b}" for a in range(4) for b in range(10)))
    for number in range(4):
        mine = [text for text in found if text.startswith(f"{number}.")]
        equal(mine, [f"{number}.{each}" for each in range(10)])
