"""The map behind watched values: never changed, shared between versions, in the order of ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pidurable.session._radix import RadixMap

IDS = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 2**63 - 1), st.just(2**20))
CHANGES = st.dictionaries(IDS, st.one_of(st.none(), st.integers(0, 3)), max_size=40)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(CHANGES, max_size=12))
def test_every_version_equals_a_dict_that_was_changed_alike(steps: list[dict[int, Any]]) -> None:
    """Lookups, order, length and equality are those of a dict, also of all the older versions."""
    versions: list[tuple[RadixMap[int], dict[int, int]]] = [(RadixMap(), {})]
    for changes in steps:
        before, plain = versions[-1]
        expected = {**plain, **changes}
        expected = {id: value for id, value in expected.items() if value is not None}
        versions.append((before.changed(changes), expected))

    for made, plain in versions:
        assert list(made.items()) == sorted(plain.items())
        assert len(made) == len(plain)
        assert made == RadixMap(plain)
        assert made == plain
        assert all(made[id] == value and id in made for id, value in plain.items())
        assert all((made.get(id) is None) == (id not in plain) for each in steps for id in each)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(CHANGES, min_size=1, max_size=6))
def test_a_diff_names_what_differs_between_any_two_versions(steps: list[dict[int, Any]]) -> None:
    """Applied to the older version it gives the newer one, and nothing in it is equal."""
    versions: list[RadixMap[int]] = [RadixMap()]
    for changes in steps:
        versions.append(versions[-1].changed(changes))

    for old in versions:
        for new in versions:
            found = new.diff(old)
            assert [id for id, _, _ in found] == sorted({id for id, _, _ in found})
            assert all(before != after for _, before, after in found)
            assert all(old.get(id) == before for id, before, _ in found)
            assert old.changed({id: after for id, _, after in found}) == new
            assert (old == new) == (not found)


def test_what_changes_nothing_gives_the_same_map() -> None:
    """The same values again, and removing what is not there, make no new version."""
    value = object()
    made: RadixMap[object] = RadixMap({5: value, 700: value})

    assert made.changed({}) is made
    assert made.changed({5: value, 6: None, 2**40: None}) is made
    assert made.changed({5: None, 700: None}) == RadixMap()


def test_a_change_copies_the_way_to_it_and_shares_the_rest() -> None:
    """Of 10,000 ids a change of one makes at most one new node a level."""

    def nodes(root: Any, shift: int) -> set[int]:
        found = {id(root)}
        if shift:
            for child in root[1:]:
                found |= nodes(child, shift - 5)
        return found

    made = RadixMap(dict.fromkeys(range(10_000), "a"))
    other = made.changed({4_321: "b"})
    new = nodes(other._root, other._height) - nodes(made._root, made._height)

    assert len(new) == 3
    assert (made[4_321], other[4_321]) == ("a", "b")
    assert other.diff(made) == [(4_321, "a", "b")]


def test_what_is_no_id_is_not_in_it() -> None:
    """Asking for something else finds nothing; storing a negative id is refused."""
    made = RadixMap({1: "a"})

    assert "1" not in made
    assert -1 not in made
    assert made.get(33) is None
    with pytest.raises(KeyError, match="2"):
        made[2]
    with pytest.raises(ValueError, match="an id is at least 0, not -1"):
        made.changed({-1: "b"})
