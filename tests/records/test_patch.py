"""JSON Patch with `append`."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pidurable import patch
from pidurable.errors import NotJsonError
from pidurable.records import _patch
from pidurable.records._patch import get, join_pointer, same

KEYS = st.sampled_from(["a", "b", "", "a/b", "m~n", "~1", "0", "-", "ü"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(0, 2)
    | st.sampled_from([0.0, -0.0, 1.0, 2.0])
    | st.sampled_from(["", "x", "xy", "xyz", "z"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


@given(VALUES, VALUES)
def test_the_difference_makes_the_new_value_exactly(old: Any, new: Any) -> None:
    """apply(old, diff(old, new)) is new, type for type, and neither input is touched."""
    old_before, new_before = copy.deepcopy(old), copy.deepcopy(new)

    ops = patch.diff(old, new)
    result = patch.apply(old, ops)

    assert same(new, result)
    assert same(old_before, old)
    assert same(new_before, new)
    assert (ops == []) == same(old, new)


@given(VALUES, VALUES)
def test_lowered_operations_do_the_same_in_plain_rfc_6902(old: Any, new: Any) -> None:
    """After lowering no append is left, and the result is the same."""
    lowered = patch.lower(patch.diff(old, new), old)

    assert all(op["op"] in ("add", "remove", "replace") for op in lowered)
    assert same(new, patch.apply(old, lowered))


@given(VALUES, st.lists(st.tuples(st.sampled_from(["add", "remove", "move"]), KEYS, KEYS)))
def test_operations_that_do_not_fit_are_refused_and_change_nothing(
    value: Any, raw: list[tuple[str, str, str]]
) -> None:
    """Whatever the operations, there is a result or a NotJsonError, and the input is as before."""
    before = copy.deepcopy(value)
    ops = [
        {"op": op, "path": join_pointer("", key), "from": join_pointer("", other), "value": 1}
        for op, key, other in raw
    ]
    try:
        patch.apply(value, ops)
    except NotJsonError:
        pass
    finally:
        assert same(before, value)


def places(value: Any, pointer: str = "") -> list[str]:
    """The pointers of a value and of everything below it."""
    items = (
        value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    )
    found = [pointer]
    for key, item in items:
        found += places(item, join_pointer(pointer, key))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_operations_in_one_call_do_what_they_do_one_by_one(first_seed: int, slow_run: bool) -> None:
    """Also where what one has copied, moved or put there is changed by another."""
    for seed in range(first_seed, first_seed + (100 if slow_run else 40)):
        draw = random.Random(seed)
        start = {"a": [[1], {"x": [2]}], "b": {"y": {"z": []}}, "c": [{"w": 1}]}
        before = copy.deepcopy(start)
        expected: Any = copy.deepcopy(start)
        ops: list[Any] = []
        put: Any = {"put": [[]]}  # one object, put at many places
        for _ in range(30):
            below = places(expected)
            containers = [p for p in below if type(get(expected, p)) in (dict, list)]
            target = draw.choice(containers)
            name = "-" if type(get(expected, target)) is list else draw.choice("abcde")
            op: Any = {"op": draw.choice(["add", "add", "copy", "copy", "move", "remove"])}
            op["path"] = join_pointer(target, name)
            if op["op"] == "add":
                op["value"] = put if draw.random() < 0.5 else draw.randrange(9)
            elif op["op"] != "remove":
                op["from"] = draw.choice(below)
            else:
                op["path"] = draw.choice(below)
            with contextlib.suppress(NotJsonError):
                # A copy of everything: nothing that another operation has made is met again.
                after = copy.deepcopy(patch.apply(expected, [copy.deepcopy(op)]))
                if len(places(after)) < 500:
                    expected = after
                    ops.append(op)
        ops_before = copy.deepcopy(ops)

        assert same(patch.apply(start, ops), expected)
        assert same(start, before)
        assert same(ops, ops_before)


def test_what_many_operations_change_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To change n items of a list of n costs n, and not n copies of the list."""
    made: list[int] = []
    own = _patch._own

    def counted(container: Any, owned: dict[int, Any]) -> Any:
        copied = own(container, owned)
        made.append(id(copied))
        return copied

    monkeypatch.setattr(_patch, "_own", counted)
    old = {"items": [[n] for n in range(500)], "spare": 1}
    new = {"items": [[n, n] for n in range(1, 600)]}
    ops = patch.diff(old, new)
    assert same(patch.apply(old, ops), new)
    assert len(ops) > 600
    assert len(set(made)) == 2 + 500
    assert same(patch.apply(old, patch.lower(ops, old)), new)


# From the examples of RFC 6902, appendix A.
@pytest.mark.parametrize(
    ("value", "ops", "expected"),
    [
        ('{"foo":"bar"}', '[{"op":"add","path":"/baz","value":"q"}]', '{"foo":"bar","baz":"q"}'),
        ('{"f":["a","b"]}', '[{"op":"add","path":"/f/1","value":"q"}]', '{"f":["a","q","b"]}'),
        ('{"f":["a"]}', '[{"op":"add","path":"/f/-","value":["b"]}]', '{"f":["a",["b"]]}'),
        ('{"baz":1,"foo":2}', '[{"op":"remove","path":"/baz"}]', '{"foo":2}'),
        ('{"f":["a","b","c"]}', '[{"op":"remove","path":"/f/1"}]', '{"f":["a","c"]}'),
        ('{"a":1,"b":2}', '[{"op":"replace","path":"/a","value":3}]', '{"a":3,"b":2}'),
        (
            '{"foo":{"bar":1,"waldo":2},"qux":{"c":3}}',
            '[{"op":"move","from":"/foo/waldo","path":"/qux/thud"}]',
            '{"foo":{"bar":1},"qux":{"c":3,"thud":2}}',
        ),
        ('["a","b","c"]', '[{"op":"move","from":"/0","path":"/2"}]', '["b","c","a"]'),
        ('{"a":[1]}', '[{"op":"copy","from":"/a","path":"/b"}]', '{"a":[1],"b":[1]}'),
        ('{"a":1}', '[{"op":"test","path":"/a","value":1}]', '{"a":1}'),
        ('{"/":9,"~1":10}', '[{"op":"test","path":"/~01","value":10}]', '{"/":9,"~1":10}'),
        ('{"a":1}', '[{"op":"replace","path":"","value":[2]}]', "[2]"),
        ('{"a":"x"}', '[{"op":"append","path":"/a","value":"yz"}]', '{"a":"xyz"}'),
        ('"x"', '[{"op":"append","path":"","value":"y"}]', '"xy"'),
        ('{"a":1}', '[{"op":"move","from":"/a","path":"/a"}]', '{"a":1}'),
    ],
)
def test_each_operation_does_what_the_rfc_says(value: str, ops: str, expected: str) -> None:
    """The operations of RFC 6902, and append."""
    assert json.loads(expected) == patch.apply(json.loads(value), json.loads(ops))


@pytest.mark.parametrize(
    ("op", "path", "problem"),
    [
        ({"op": "add", "path": "/x/y", "value": 1}, "/x/y", "there is no key 'x'"),
        ({"op": "add", "path": "/l/3", "value": 1}, "/l/3", "index from 0 to 2"),
        ({"op": "replace", "path": "/l/2", "value": 1}, "/l/2", "index from 0 to 1"),
        ({"op": "replace", "path": "/l/-", "value": 1}, "/l/-", "index from 0 to 1"),
        ({"op": "remove", "path": "/l/01"}, "/l/01", "index"),
        ({"op": "remove", "path": "/l/-1"}, "/l/-1", "index"),
        ({"op": "remove", "path": "/l/²"}, "/l/²", "index"),
        ({"op": "remove", "path": "/l/" + "9" * 5000}, "/l/" + "9" * 5000, "index"),
        ({"op": "remove", "path": "/none"}, "/none", "there is no key"),
        ({"op": "remove", "path": ""}, "", "cannot be removed"),
        ({"op": "remove", "path": "/s/0"}, "/s/0", "nothing is below a str"),
        ({"op": "test", "path": "/n", "value": True}, "/n", "the test expects True"),
        ({"op": "test", "path": "/n", "value": 1.0}, "/n", "the test expects 1.0"),
        ({"op": "append", "path": "/n", "value": "x"}, "/n", "a string only"),
        ({"op": "append", "path": "/s", "value": 1}, "/s", "only a string"),
        ({"op": "add", "path": "/s"}, "/s", "needs a value"),
        ({"op": "add", "path": "s", "value": 1}, "path", "begins with"),
        ({"op": "add", "path": "/~2", "value": 1}, "/~2", "followed by 0 or 1"),
        ({"op": "burn", "path": "/s"}, "/s", "expected one of add"),
        ({"op": "move", "from": "/d", "path": "/d/e"}, "/d/e", "into itself"),
        ({"op": "move", "path": "/d"}, "path", "begins with"),
        ({"op": "add", "value": 1}, "op", "with op and path"),
        ("add", "op", "with op and path"),
    ],
)
def test_a_wrong_operation_is_refused_with_its_pointer(op: Any, path: str, problem: str) -> None:
    """An operation that is malformed or does not fit names its pointer and what is wrong."""
    with pytest.raises(NotJsonError) as caught:
        patch.apply({"l": [1, 2], "s": "text", "n": 1, "d": {"e": {}}}, [op])

    assert path == caught.value.path
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"t": "ab"}, {"t": "abc"}, [{"op": "append", "path": "/t", "value": "c"}]),
        ([1, 2, 3, 4], [1, 9, 3, 4], [{"op": "replace", "path": "/1", "value": 9}]),
        ([1, 2, 3], [2, 3], [{"op": "remove", "path": "/0"}]),
        ([1, 3], [1, 2, 3], [{"op": "add", "path": "/1", "value": 2}]),
        ({"a/b": 1}, {}, [{"op": "remove", "path": "/a~1b"}]),
        ({"a": 1}, {"a": True}, [{"op": "replace", "path": "/a", "value": True}]),
        (
            [{"n": 1, "t": "x"}],
            [{"n": 2, "t": "x"}],
            [{"op": "replace", "path": "/0/n", "value": 2}],
        ),
    ],
)
def test_the_difference_is_small(old: Any, new: Any, expected: list[Any]) -> None:
    """A grown string is an append, a changed item one operation, a common end none."""
    assert expected == patch.diff(old, new)


@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.lists(
        st.fixed_dictionaries(
            {
                "op": st.sampled_from(["add", "replace", "remove", "append", "test"]),
                "path": KEYS.map(lambda key: f"/{key}"),
            },
            optional={"value": VALUES},
        ),
        max_size=4,
    ),
)
def test_an_operation_at_the_top_does_what_it_does_further_down(value: Any, ops: Any) -> None:
    """Setting a field of the whole has a way of its own, which gives and refuses the same."""
    before = copy.deepcopy(value)
    below = [{**op, "path": f"/in{op['path']}"} for op in ops]
    results: list[Any] = []
    for start, each in ((value, ops), ({"in": value}, below)):
        try:
            results.append(patch.apply(start, each))
        except NotJsonError as error:
            results.append(error.problem)

    top, inner = results
    assert top == inner if isinstance(inner, str) else same(top, inner["in"])
    assert same(value, before)


def test_a_result_shares_what_did_not_change() -> None:
    """Only the containers on the way to the change are copied."""
    old = {"big": [[1], [2]], "text": "a", "in": {"x": 1, "same": [3]}}

    new = patch.apply(old, [{"op": "append", "path": "/text", "value": "b"}])
    deep = patch.apply(old, [{"op": "replace", "path": "/in/x", "value": 2}])

    assert old["big"] is new["big"]
    assert old["in"] is new["in"]
    assert old["in"]["same"] is deep["in"]["same"]
    assert old["in"] == {"x": 1, "same": [3]}


def test_pointers_name_any_key() -> None:
    """Slashes and tildes in keys are escaped and read back."""
    value = {"a/b~c": {"": [5]}}

    assert get(value, join_pointer(join_pointer(join_pointer("", "a/b~c"), ""), 0)) == 5


def test_an_append_is_lowered_to_the_whole_string() -> None:
    """A client without append gets the string as it is after each operation."""
    ops = [
        {"op": "append", "path": "/t", "value": "b"},
        {"op": "append", "path": "/t", "value": "c"},
    ]

    assert patch.lower(ops, {"t": "a"}) == [
        {"op": "replace", "path": "/t", "value": "ab"},
        {"op": "replace", "path": "/t", "value": "abc"},
    ]


def test_the_same_object_has_no_difference() -> None:
    """An object compared with itself is not walked."""
    value = {"a": [float("nan")]}

    assert patch.diff(value, value) == []
