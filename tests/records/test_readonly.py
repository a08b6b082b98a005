"""Read-only views of JSON: equal to what they show, deaf to every change, plain when copied."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pidurable.records._readonly import JsonArray, JsonObject, copied_json, view_of

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=2), below),
    max_leaves=12,
)


def walked(view: Any) -> Any:
    """Plain JSON, made by using a view as anybody would."""
    if isinstance(view, Mapping):
        assert len(view) == len(list(view))
        return {key: walked(item) for key, item in view.items()}
    if isinstance(view, Sequence) and not isinstance(view, str):
        assert [walked(view[index]) for index in range(len(view))] == list(map(walked, view))
        return [walked(item) for item in view]
    return view


@settings(max_examples=25)
@given(values)
def test_a_view_shows_and_equals_the_json_it_wraps(value: Any) -> None:
    """Whatever is asked of a view, at any depth, is what the plain value would answer."""
    view = view_of(value)

    assert walked(view) == value
    assert view == value
    assert value == view
    assert view == view_of(copied_json(value))
    assert copied_json({"in": view}) == {"in": value}
    assert repr(view) == repr(value)
    assert json.loads(json.dumps(copied_json(view))) == value


@settings(max_examples=25)
@given(values)
def test_a_copy_of_a_view_is_plain_and_ones_own(value: Any) -> None:
    """Deep copies, pickles and json() hold dicts and lists that share nothing with the value."""
    view = view_of({"top": [value]})
    before = json.dumps(view.json())

    for made in (view.json(), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert type(made) is dict
        assert type(made["top"]) is list
        made["top"].append("mine")
        assert made != view
    assert copy.copy(view) is view
    assert json.dumps(view.json()) == before


def test_a_view_refuses_every_change_and_says_what_to_do() -> None:
    """Each way of changing a dict or list raises a TypeError that names the way out."""
    given = {"items": [1, {"a": 2}]}
    view: Any = JsonObject(given)
    items: Any = view["items"]
    assert isinstance(items, JsonArray)
    assert not isinstance(view, MutableMapping)
    assert not isinstance(items, MutableSequence)

    def assign() -> None:
        items[1]["a"] = 3

    def delete() -> None:
        del view["items"]

    def grow() -> None:
        nonlocal items
        items += [1]

    changes = [assign, delete, grow]
    changes += [lambda: items.append(1), lambda: items.sort(), lambda: view.update(a=1)]
    changes += [lambda: view.pop("items"), lambda: items.pop(), lambda: view.setdefault("b", 1)]
    for change in changes:
        with pytest.raises(TypeError, match=r"take a plain copy with \.json\(\)"):
            change()
    for each in (view, items):
        with pytest.raises(TypeError, match="unhashable"):
            hash(each)
    assert given == {"items": [1, {"a": 2}]}


def test_a_slice_and_membership_know_nested_values() -> None:
    """A slice is a view too, and a nested value is found whether it is plain or a view."""
    view = JsonArray([1, [2], {"a": 3}])

    assert view[1:] == [[2], {"a": 3}]
    assert isinstance(view[1:], JsonArray)
    assert [2] in view
    assert view[2] in view
    assert view[::-1].json() == [{"a": 3}, [2], 1]
    assert "a" in view[2]
    assert "b" not in view[2]
    assert view.index([2]) == 1
    assert view != (1, [2])
