"""Choosing what of a tree fits a screen: counted whole, owners before owned, the telling first."""

from __future__ import annotations

import itertools

from hypothesis import given, settings, strategies as st

from pidurable.harness._forest import Chosen, Counts, Forest
from pidurable.records._tasks import Status
from pidurable.storage import ConversationRow, TaskRow

ROOT = 1
Outline = list[tuple[int, int, int | None, int, int, int]]


def task(
    id: int, *, owner: int | None = None, status: int = 4, conversation: int = ROOT
) -> TaskRow:
    return TaskRow(
        id,
        conversation,
        "k",
        1,
        owner,
        None,
        0,
        None,
        None,
        0,
        int(Status.TERMINAL),
        *(None,) * 4,
        0,
        0,
        0,
        0,
        *(None,) * 3,
    )


def live(
    id: int,
    *,
    owner: int | None = None,
    status: Status = Status.WAITING,
    blocked: bool = False,
    marked: bool = False,
    conversation: int = ROOT,
) -> tuple[int, int, int | None, int, int, int]:
    return id, conversation, owner, int(status), int(blocked), int(marked)


def conversation(id: int, owner: int | None = None) -> ConversationRow:
    return ConversationRow(id, f"u{id}", None, None, owner, None, "", 0)


def forest(
    outline: Outline,
    *,
    conversations: tuple[ConversationRow, ...] = (conversation(ROOT),),
    ended: tuple[TaskRow, ...] = (),
    extra: tuple[TaskRow, ...] = (),
) -> Forest:
    made = Forest({row.id: row for row in conversations}.get, {row.id: row for row in ended}.get)
    made.plant(outline, extra)
    return made


def shape(lines: list[Chosen]) -> list[tuple[int, int | None]]:
    return [(line.depth, line.id) for line in lines]


def test_what_fits_is_shown_whole_by_id_below_its_owner() -> None:
    """Owners first, children by id, conversations between, nothing hidden."""
    found = forest(
        [live(2), live(5, owner=2), live(4, owner=2), live(7, conversation=6), live(3)],
        conversations=(conversation(ROOT), conversation(6, owner=4)),
    ).choose(lines_max=20, depth_max=9)

    assert shape(found) == [(0, 1), (1, 2), (2, 4), (3, 6), (4, 7), (2, 5), (1, 3)]
    assert all(line.hidden is None for line in found)


def test_ended_owners_between_are_read_and_shown() -> None:
    """What lives below an ended task hangs from it, and the ended one counts as none."""
    made = forest([live(9, owner=5)], ended=(task(5, owner=3), task(3)))

    assert shape(made.choose(lines_max=9, depth_max=9)) == [(0, 1), (1, 3), (2, 5), (3, 9)]
    assert made.counts() == Counts(waiting=1)


def test_an_owner_that_cannot_be_found_leaves_what_it_owns_at_the_top() -> None:
    """A row that is missing, for an instant or for good, hides nothing."""
    made = forest([live(9, owner=5), live(10)], conversations=())

    assert shape(made.choose(lines_max=9, depth_max=9)) == [(0, 1), (1, 10), (0, 5), (1, 9)]


def test_of_ten_thousand_children_some_are_shown_and_the_others_counted() -> None:
    """The summary says how many are left out, and in which states."""
    running = [live(id, status=Status.RUNNING) for id in range(9_000, 9_003)]
    blocked = [live(9_500, blocked=True)]
    waiting = [live(id) for id in range(2, 9_000)]
    found = forest(waiting + running + blocked).choose(lines_max=10, depth_max=9)

    assert shape(found) == [
        (0, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (1, 5),
        (1, 9_000),
        (1, 9_001),
        (1, 9_002),
        (1, 9_500),
        (1, None),
    ]
    assert found[-1].hidden == Counts(waiting=8_994)


def test_each_owner_shows_its_best_child_before_another_shows_its_fifth() -> None:
    """A fan-out does not fill the screen while other branches have none of theirs shown."""
    owners = [live(id) for id in range(2, 5)]
    wide = [live(id, owner=2, status=Status.RUNNING) for id in range(10, 60)]
    narrow = [live(60, owner=3), live(61, owner=4)]
    found = forest(owners + wide + narrow).choose(lines_max=14, depth_max=9)

    assert {2, 3, 4, 60, 61} <= {line.id for line in found}


def test_what_needs_attention_is_found_far_down() -> None:
    """One blocked task among many branches is shown, with the way to it."""
    owners = [live(id) for id in range(2, 40)]
    below = [live(100 + id, owner=id) for id in range(2, 40)]
    deep = [live(200, owner=139), live(201, owner=200, blocked=True)]
    found = forest(owners + below + deep).choose(lines_max=12, depth_max=9)

    ids = [line.id for line in found]
    assert [id for id in ids if id in (39, 139, 200, 201)] == [39, 139, 200, 201]


def test_a_chain_of_twenty_thousand_is_cut_at_the_depth_and_counted() -> None:
    """Deeper than the screen is wide nothing is shown; no recursion, and the rest is counted."""
    chain = [live(2), *(live(id, owner=id - 1) for id in range(3, 20_002))]
    found = forest(chain).choose(lines_max=50, depth_max=5)

    assert shape(found) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert found[-1].hidden == Counts(waiting=20_000 - 5)


def test_a_root_of_its_own_is_the_only_top() -> None:
    """Begun at a task, nothing beside it is shown or counted."""
    made = forest([live(2), live(3), live(4, owner=3)])

    assert shape(made.choose(lines_max=9, depth_max=9, root=3)) == [(0, 3), (1, 4)]
    assert made.counts(3) == Counts(waiting=2)


TREES = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 6), st.booleans()), min_size=1, max_size=60
)


@settings(deadline=None, max_examples=30)
@given(tree=TREES, lines_max=st.integers(1, 30), depth_max=st.integers(1, 6))
def test_nothing_is_lost_and_nothing_is_too_much(
    tree: list[tuple[int, int, bool]], lines_max: int, depth_max: int
) -> None:
    """Shown and counted tasks are all there are; lines, depth and order keep to their bounds."""
    outline: Outline = []
    ended: dict[int, TaskRow] = {}
    conversations = {ROOT: conversation(ROOT)}
    tasks: list[int] = []
    places = {ROOT: ROOT}
    for number, (choice, state, owned) in enumerate(tree):
        id = 2 + 2 * number
        owner = tasks[choice % len(tasks)] if owned and tasks else None
        place = places[owner] if owner is not None else ROOT
        if owner is not None and choice % 3 == 0:
            # In a conversation that the owner owns.
            conversations[id - 1] = conversation(id - 1, owner)
            place, owner = id - 1, None
        places[id] = place
        tasks.append(id)
        if state == 6:
            ended[id] = task(id, owner=owner, conversation=place)
        else:
            outline.append(
                live(
                    id,
                    owner=owner,
                    conversation=place,
                    status=Status(state % 4),
                    blocked=state == 4,
                    marked=state == 5,
                )
            )
    made = Forest(conversations.get, ended.get)
    made.plant(outline, ())
    found = made.choose(lines_max=lines_max, depth_max=depth_max)

    alive = {row[0] for row in outline}
    shown = [line.id for line in found if line.id is not None]
    hidden = sum(line.hidden.live for line in found if line.hidden is not None)
    assert len(found) <= lines_max
    assert len(shown) == len(set(shown))
    assert all(line.depth <= depth_max for line in found)
    if found:
        # At the top too, what does not fit is counted as soon as one line is shown.
        assert hidden + len(alive & set(shown)) == len(alive) == made.counts().live
    for before, after in itertools.pairwise(found):
        assert after.depth <= before.depth + 1
