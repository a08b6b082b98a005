"""The strict encoder and decoder."""

from __future__ import annotations

import enum
import json
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pidurable.errors import NotJsonError, show
from pidurable.records._ids import TaskId
from pidurable.records._json import (
    check_json,
    dumps,
    is_plain,
    join_path,
    loads,
    loads_canonical,
    loads_stored,
)
from pidurable.records._limits import VALUE_DEPTH_MAX
from pidurable.records._patch import same

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=30
)


class Color(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


def nested(depth: int) -> list[Any]:
    """Build a list of so many levels without recursion."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def doubled(depth: int) -> list[Any]:
    """Build a small object whose text would have 2**depth values."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


@given(VALUES)
def test_every_strict_value_comes_back_exactly(value: Any) -> None:
    """What is encoded is decoded as the same value, type for type, by both decoders."""
    text = dumps(value)

    assert same(value, loads(text))
    assert same(value, loads_stored(text))
    assert same(value, loads(text.encode()))
    assert same(value, check_json(value))


@given(VALUES)
def test_a_stored_text_may_have_blanks_around_it(value: Any) -> None:
    """A store that a person has edited is read as well, and what follows a value is damage."""
    text = dumps(value)

    assert same(value, loads_stored(f" {text}\n"))
    with pytest.raises(NotJsonError, match="the stored text is damaged, Extra data"):
        loads_stored(f"{text} {text}")


@given(VALUES)
def test_the_text_is_what_the_standard_encoder_writes(value: Any) -> None:
    """The quick way writes compact JSON, in the order of the keys and without escaped letters."""
    assert json.dumps(value, separators=(",", ":"), ensure_ascii=False) == dumps(value)


def test_keys_keep_their_order_and_letters_stay_letters() -> None:
    """Text is compact, ordered as given, and not escaped beyond need."""
    assert dumps({"ü": (1, 2.5, True, None), "a": "😀"}) == '{"ü":[1,2.5,true,null],"a":"😀"}'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Color.RED, '"red"'),
        ({Color.RED: Level.HIGH}, '{"red":3}'),
        ([TaskId(7)], "[7]"),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        ("\\u0000", '"\\\\u0000"'),
    ],
)
def test_subclasses_are_stored_as_their_plain_value(value: object, expected: str) -> None:
    """A StrEnum, IntEnum, TaskId or OrderedDict is written as what it extends."""
    assert expected == dumps(value)


# C081, C082, C084, C085
REFUSED: list[tuple[object, str, str]] = [
    ({"items": [0, 1, 2, {"when": datetime(2026, 1, 1, tzinfo=UTC)}]}, "$.items[3].when", "dat"),
    ([math.nan], "$[0]", "finite"),
    ({"cost": math.inf}, "$.cost", "finite"),
    (-math.inf, "$", "finite"),
    ([2**64], "$[0]", "2**64-1"),
    ([-(2**63) - 1], "$[0]", "2**64-1"),
    ([10**5000], "$[0]", "2**64-1"),
    ({"a": "\ud800"}, "$.a", "surrogate"),
    ({"\udfff": 1}, '$["\\udfff"]', "surrogate"),
    ({"a": ["x\0y"]}, "$.a[0]", "NUL"),
    ({"a\0": 1}, '$["a\\u0000"]', "NUL"),
    ({"odd key": {1: 2}}, '$["odd key"]', "key must be a string"),
    ({None: 1}, "$", "key must be a string"),
    ({True: 1}, "$", "key must be a string"),
    ({"a": {1}}, "$.a", "set"),
    ([b"x"], "$[0]", "bytes"),
    ([object()], "$[0]", "object"),
    ({Color.RED: 1, "x": {"y": lambda: 0}}, "$.x.y", "function"),
]


@pytest.mark.parametrize(("value", "path", "problem"), REFUSED)
@pytest.mark.parametrize("function", [dumps, check_json])
def test_what_is_not_strict_json_is_refused_at_its_place(
    function: Callable[[object], object], value: object, path: str, problem: str
) -> None:
    """Each refusal names the path, by both functions that take values."""
    with pytest.raises(NotJsonError) as caught:
        function(value)

    # A refused key may be named itself or by the object that it is in.
    assert caught.value.path in (path, "$") if "\0" in path else caught.value.path == path
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


# C085
@pytest.mark.parametrize("function", [dumps, check_json])
@pytest.mark.parametrize("depth", [VALUE_DEPTH_MAX + 1, 2_000, 100_000])
def test_depth_over_the_limit_is_refused(function: Callable[[Any], Any], depth: int) -> None:
    """One level too many, or a hundred thousand, is a NotJsonError and no RecursionError."""
    with pytest.raises(NotJsonError, match="nested more than 200 levels"):
        function(nested(depth))
    with pytest.raises(NotJsonError, match="nested more than 200 levels"):
        loads("[" * depth + "]" * depth)
    with pytest.raises(NotJsonError, match="nested more than 200 levels"):
        loads('{"a":' * depth + "1" + "}" * depth)


def test_depth_at_the_limit_is_stored() -> None:
    """Exactly 200 levels go out and come back."""
    value = nested(VALUE_DEPTH_MAX)

    assert value == loads(dumps(value)) == check_json(value)


@pytest.mark.parametrize("value", [cycle(), doubled(30), doubled(190)])
def test_a_small_object_with_an_endless_text_is_refused_soon(value: object) -> None:
    """A cycle, and a list that holds another twice 30 or 190 times over, end in a NotJsonError."""
    with pytest.raises(NotJsonError):
        dumps(value, bytes_max=10_000)


def test_a_call_stack_that_is_almost_full_gives_a_plain_error() -> None:
    """Near the recursion limit of the caller a nested value is refused, never a RecursionError."""

    def down(levels: int, function: Callable[[Any], Any]) -> Any:
        return function(nested(150)) if levels == 0 else down(levels - 1, function)

    frame, used = sys._getframe(), 0
    while frame.f_back is not None:
        frame, used = frame.f_back, used + 1
    for function in (dumps, check_json, lambda value: dumps([value, value], checked=True)):
        with pytest.raises(NotJsonError, match="call stack"):
            down(sys.getrecursionlimit() - used - 60, function)
    assert not down(sys.getrecursionlimit() - used - 60, is_plain)


@given(VALUES)
def test_a_value_that_is_known_to_be_plain_gives_the_same_text(value: Any) -> None:
    """Who has checked the parts of a value gets the text that the walk would lead to."""
    assert dumps(value) == dumps(value, checked=True)
    assert dumps([value] * 300) == dumps([value] * 300, checked=True), "wide, and not deep"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": ["\ud800"]}, r"\$\.a\[0\]: .* surrogate"),
        ({"\udfff": 1}, r'\$\["\\udfff"\]: .* surrogate'),
        ({"a": ["x\0y"]}, r"\$\.a\[0\]: .* NUL"),
        ({"a\0": 1}, r'\$\["a\\u0000"\]: .* NUL'),
        (nested(VALUE_DEPTH_MAX + 1), "nested more than 200 levels deep"),
        ({"a": [{}, nested(VALUE_DEPTH_MAX - 1)]}, r"\$\.a\[1\].*nested more than 200"),
        (["ü" * 250], "at most 500 bytes"),
        (["x" * 500], "at most 500 bytes"),
    ],
)
@pytest.mark.parametrize("checked", [False, True])
def test_strings_depth_and_size_are_looked_at_in_any_case(
    value: Any, problem: str, checked: bool
) -> None:
    """What can be asked of the text is refused of a checked value too, in the same words."""
    with pytest.raises(NotJsonError, match=problem):
        dumps(value, bytes_max=500, checked=checked)


def test_size_counts_bytes_and_not_characters() -> None:
    """The limit is in UTF-8: exactly at it is stored, one byte more is refused."""
    text = "ü" * 10

    assert f'"{text}"' == dumps(text, bytes_max=22)
    with pytest.raises(NotJsonError, match=r"^doc: at most 21 bytes are allowed, got 22 bytes$"):
        dumps(text, bytes_max=21, path="doc")


@pytest.mark.parametrize("value", ["ü" * 10, "x" * 30, ["x" * 10] * 3])
def test_a_value_that_is_too_large_is_told_which_setting_bounds_it(value: Any) -> None:
    """However it is found, the message names what allows no more, and another way to store it."""
    said = "doc: at most 21 bytes are allowed (value_bytes_max; store it in parts or as blobs), got"

    with pytest.raises(NotJsonError, match=re.escape(said)):
        dumps(value, bytes_max=21, path="doc", setting="value_bytes_max")
    with pytest.raises(NotJsonError, match=r"bytes are allowed \(value_bytes_max; "):
        dumps([[value] * 1000] * 10_000)


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ('{"a": [NaN]}', "$.a[0]", "finite"),
        ("[-Infinity]", "$[0]", "finite"),
        ('{"a": 1e999}', "$.a", "finite"),
        ('{"x": {"a": 1, "a": 2}}', "$.x", "duplicate key, got 'a'"),
        ('["\\ud800"]', "$[0]", "surrogate"),
        ('["\ud800"]', "$[0]", "surrogate"),
        ('{"a\\u0000": 1}', '$["a\\u0000"]', "NUL"),
        ("[18446744073709551616]", "$[0]", "2**64-1"),
        ("[-9223372036854775809]", "$[0]", "2**64-1"),
        ("9" * 100_000, "$", "2**64-1"),
        ("[1,]", "$", "not JSON"),
        ("", "$", "not JSON"),
        ("\ufeff1", "$", "not JSON"),
        ("[1] 2", "$", "not JSON, extra data"),
        (b"\xff", "$", "not UTF-8 at byte 0"),
    ],
)
def test_loose_text_is_refused(text: str | bytes, path: str, problem: str) -> None:
    """What the standard decoder lets through is refused with its place."""
    with pytest.raises(NotJsonError) as caught:
        loads(text)

    assert path == caught.value.path
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


@given(st.text(max_size=30) | st.binary(max_size=30))
def test_any_text_is_decoded_or_refused(text: str | bytes) -> None:
    """No input makes another error than NotJsonError, and what is read can be written."""
    try:
        value = loads(text)
    except NotJsonError:
        return
    assert same(value, loads(dumps(value)))


@pytest.mark.parametrize("text", ["[1e308,-0.0]", '["\\ud83d\\ude00\\u0001"]', "[-0]"])
def test_odd_but_strict_text_is_read(text: str) -> None:
    """A surrogate pair, a control character and the ends of the range are fine."""
    assert json.loads(text) == loads(text)


def test_the_copy_shares_no_container_and_has_plain_types() -> None:
    """A checked value is a copy: changing the original later changes nothing."""
    inner = [Level.HIGH]
    copy = check_json({Color.RED: inner, "t": (1,)})
    inner.append(Level.HIGH)

    assert copy == {"red": [3], "t": [1]}
    assert {int} == {type(item) for item in copy["red"]}
    assert {str} == {type(key) for key in copy}


def test_keys_that_become_the_same_key_are_refused() -> None:
    """A key and an equal subclass of str cannot both be stored."""

    class Other(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return self is other

    with pytest.raises(NotJsonError, match="the key occurs twice, got 'a'"):
        dumps({"a": 1, Other("a"): 2})


def test_paths_are_written_as_a_reader_would() -> None:
    """Names are joined by a dot, odd keys quoted, indexes in brackets, long keys cut."""
    assert join_path("$", "a") == "$.a"
    assert join_path("$", "odd key") == '$["odd key"]'
    assert join_path("$", "") == '$[""]'
    assert join_path("$", 'a"b') == '$["a\\"b"]'
    assert join_path("$", 3) == "$[3]"
    assert len(join_path("$", " " * 1000)) < 100


@pytest.mark.parametrize("leaf", ["x", "x" * 1_000_000])
def test_a_small_value_that_is_endless_when_written_is_refused_at_once(leaf: str) -> None:
    """A list that holds another twice, 100 times over, is measured and not walked or shown."""
    value: object = [leaf]
    for _ in range(100):
        value = [value, value]

    for refuse in (dumps, check_json):
        with pytest.raises(NotJsonError, match=r"^\$: at most 16777216 bytes are allowed"):
            refuse(value)
    assert len(show(value)) <= 200


def test_a_large_value_without_sharing_is_still_taken() -> None:
    """What is above the first look, and fits, is written as before."""
    value = [["x" * 100, n] for n in range(20_000)]

    assert loads(dumps(value)) == value
    assert check_json(value) == value


_SPELLINGS = (
    *("0", "-0", "-0.0", "1.0", "1E5", "1e999", "-1e999", "NaN", "Infinity", "1e400", "5e-324"),
    *("9223372036854775808", "18446744073709551615", "18446744073709551616", "9" * 5_000),
    *('"\\u0000"', '"\x00"', '"\\ud800"', '"\ud800"', '"\\u0041"', '"\\/"', '"\x7f"', '"\u2028"'),
    *('{"a":1,"a":2}', '{"a": 1}', " 1", "1 ", "1 2", "[1,]", "", "{", '{"a":1}', "[[],{}]"),
    *("[" * 200 + "]" * 200, "[" * 201 + "]" * 201, "[" * 100_000, '"' + "[" * 300 + '"'),
)


@pytest.mark.parametrize("text", _SPELLINGS, ids=lambda text: ascii(text[:12]))
def test_what_is_taken_for_canonical_is_strict_json_as_we_write_it(text: str) -> None:
    """The quick look never takes what the strict one would refuse or write in another way."""
    quick = loads_canonical(text)

    if quick is not None:
        assert repr(quick[0]) == repr(loads(text))
        assert dumps(quick[0]) == text


@given(VALUES)
def test_what_we_write_is_canonical(value: Any) -> None:
    """Unless it only looks dubious, the quick look is enough."""
    text = dumps(value)
    quick = loads_canonical(text)

    assert quick is None or repr(quick[0]) == repr(loads(text))
    if len(text) < 100 and not any(digit in text for digit in "0123456789") and "\\" not in text:
        assert quick is not None
