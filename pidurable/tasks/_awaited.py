"""What a task can wait for besides other tasks: conversations, and what upper layers settle.

Ids are session-wide, so the record of an id tells what it is: a task counts once it is terminal, a
conversation while no ordinary live task is below it, anything else once whoever keeps it says that
it has settled. Which of the awaited ids are no tasks is stored with the wait, so that the index
never has to look it up.

A conversation may become busy again before its waiter wakes; then it counts as open again. So what
a wait needs is a question to the state of the store, with the same answer after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from pidurable.errors import InvalidArgumentError, NotFoundError, UnknownTaskError, show
from pidurable.records._checks import check_is_list, is_id
from pidurable.tasks._tree import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pidurable.records._tasks import JoinPolicy
    from pidurable.tasks._tree import Node
    from pidurable.tasks._tree_transaction import TreeTransaction


class Awaitables(Protocol):
    """One kind of thing that is no task, settles once, and can be waited for.

    Whoever keeps them is a participant, and calls `Runtime.settled` for each that a published
    commit has settled. It is asked in line order, of what is staged, so that no commit comes
    between the answer and the wait that stands on it.
    """

    @property
    def kind(self) -> str:
        """What one of them is called in messages."""
        ...

    def is_open(self, id: int, tx: TreeTransaction | None) -> bool | None:
        """Whether one is still to settle, as staged and in `tx`; None if the id is none."""
        ...

    def was_settled(self, id: int) -> bool:
        """Whether one has settled by what is stored; asked when a session opens, in a thread."""
        ...

    def needs(self, id: int, tx: TreeTransaction | None) -> Iterable[int]:
        """Live tasks that must end before it can settle."""
        ...

    def needed_by(self, task: Node, tx: TreeTransaction | None) -> Iterable[int]:
        """Those that can settle only after this live task has ended."""
        ...

    def asks(self, id: int) -> tuple[str, str] | None:
        """Of one that is open and that a person decides: what it is, and how; else None."""
        ...


class Kinds:
    """The kinds of things, besides tasks and conversations, that can be waited for."""

    def __init__(self) -> None:
        self._kinds: list[Awaitables] = []

    def add(self, awaitables: Awaitables) -> None:
        """Let tasks wait for one more kind of thing."""
        self._kinds.append(awaitables)

    def look(self, id: int, tx: TreeTransaction | None) -> tuple[str, bool] | None:
        """The kind of one, and whether it is open; None if no kind has this id."""
        for each in self._kinds:
            is_open = each.is_open(id, tx)
            if is_open is not None:
                return each.kind, is_open
        return None

    def was_settled(self, id: int) -> bool:
        """Whether one has settled by what is stored."""
        return any(each.was_settled(id) for each in self._kinds)

    def needs(self, id: int, tx: TreeTransaction | None) -> Iterator[int]:
        """Live tasks that must end before it can settle."""
        for each in self._kinds:
            yield from each.needs(id, tx)

    def asks(self, id: int) -> tuple[str, str] | None:
        """Of one that is open and that a person decides: what it is, and how; else None."""
        found = (each.asks(id) for each in self._kinds)
        return next((each for each in found if each is not None), None)

    def needed_by(self, task: Node, tx: TreeTransaction | None) -> Iterator[int]:
        """What can settle only after a live task has ended."""
        for each in self._kinds:
            yield from each.needed_by(task, tx)


def awaited_ids(on: Iterable[object]) -> tuple[int, ...]:
    """The ids of a wait, each once.

    Raises:
        InvalidArgumentError: It is no list, say the id itself.
        UnknownTaskError: One is no id at all.
    """
    check_is_list(on, "on")
    found: dict[int, None] = {}
    for id in on:
        if not is_id(id):
            raise UnknownTaskError(show(id))
        found[int(id)] = None  # type: ignore[call-overload]
    return tuple(found)


def sort_awaited(
    tx: TreeTransaction, kinds: Kinds, ids: Sequence[int], *, policy: JoinPolicy, owner: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find out what each awaited id is, as staged.

    Args:
        tx: The commit of the wait.
        kinds: What can be waited for besides tasks and conversations.
        ids: What the wait is for.
        policy: `fail_fast` and `first_success` abort the others, so they need tasks that are owned.
        owner: The task that waits.

    Returns:
        The conversations among them, and those of other kinds that are open.

    Raises:
        UnknownTaskError: An id is neither a task nor anything else that can be waited for.
        InvalidArgumentError: The policy does not fit.
    """
    conversations: list[int] = []
    others: list[int] = []
    for id in ids:
        tx.refuse_removed(id)
        task_owner = _owner_of_task(tx, id)
        if task_owner is not None:
            if policy != "all_settled" and task_owner != owner:
                problem = f"{policy} needs ownership of all of `on`, task {id} is owned otherwise"
                raise InvalidArgumentError("on", problem)
            continue
        kind, is_open = _look_further(tx, kinds, id)
        if policy != "all_settled":
            problem = (
                f"{policy} aborts the others of `on`, so all of them must be tasks that this task "
                f"owns; {id} is a {kind}. Use all_settled"
            )
            raise InvalidArgumentError("on", problem)
        if kind == "conversation":
            conversations.append(id)
        elif is_open:
            others.append(id)
    return tuple(conversations), tuple(others)


def _owner_of_task(tx: TreeTransaction, id: int) -> int | None:
    """The task that owns a task, 0 for one owned by its conversation; None if it is no task."""
    node = tx.view.find(id)
    if isinstance(node, Scope):
        return None
    if node is None:
        row = tx.stored_task(id)
        if row is None:
            return None
        return row.owner or 0
    return node.owner or 0


def _look_further(tx: TreeTransaction, kinds: Kinds, id: int) -> tuple[str, bool]:
    try:
        tx.conversation(id)
    except NotFoundError:
        found = kinds.look(id, tx)
        if found is None:
            hint = "It is the id of no conversation and no submission either."
            raise tx.unknown_task(id, hint) from None
        return found
    return "conversation", True


__all__ = ["Awaitables", "Kinds", "awaited_ids", "sort_awaited"]
