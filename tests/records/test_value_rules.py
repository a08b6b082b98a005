"""The value rules: the encoder, the decoder and the codec do what the table says."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from pidurable.errors import NotJsonError
from pidurable.records._codec import Codec
from pidurable.records._json import check_json, dumps, loads, loads_stored
from pidurable.records._limits import VALUE_DEPTH_MAX
from pidurable.records._patch import same
from pidurable.records._value_rules import (
    DEFAULTS,
    EXTENSION_CODECS,
    VALUE_RULES,
    Accepted,
    Refused,
    ValueRule,
    explain_rule,
)

CODEC = Codec(EXTENSION_CODECS)
RULES = pytest.mark.parametrize("rule", VALUE_RULES, ids=lambda rule: rule.name)


def exact(value: Any) -> Any:
    """Spell out the types too, as 1 == 1.0 == True and 0.0 == -0.0; sets have no order."""
    kind = type(value)
    if attrs.has(kind):
        return kind, [exact(getattr(value, each.name)) for each in attrs.fields(kind)]
    if isinstance(value, list | tuple):
        return kind, [exact(each) for each in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, value))
    if isinstance(value, dict):
        return kind, [(key, exact(each)) for key, each in value.items()]
    return kind, repr(value)


def test_each_rule_is_one_sentence_with_examples() -> None:
    """Names are unique, statements are for people, and every rule has examples."""
    names = [rule.name for rule in VALUE_RULES]

    assert len(set(names)) == len(names) >= 15
    for rule in VALUE_RULES:
        assert rule.accepted or rule.refused or rule.unread, rule.name
        assert rule.statement[0].isupper() or rule.statement[0] == "`", rule.name
        assert rule.statement.endswith("."), rule.name
        assert explain_rule(rule.name) == rule.statement
    assert explain_rule("no_such_rule") is None


@RULES
def test_what_is_accepted_is_stored_as_told_and_comes_back(rule: ValueRule) -> None:
    """The text, and what both decoders and the type make of it, are exactly those of the table."""
    for example in rule.accepted:
        stored, text = example.json(), CODEC.encode_text(example.make(), example.type)

        assert text == dumps(stored)
        assert same(loads(text), stored)
        assert same(loads_stored(text), stored)
        read = CODEC.decode(loads(text), Any if example.type is None else example.type)
        assert exact(read) == exact(example.comes_back())


def refusal(call: Any, *args: Any) -> NotJsonError:
    with pytest.raises(NotJsonError) as caught:
        call(*args)
    return caught.value


def check_refusal(error: NotJsonError, example: Refused) -> None:
    assert example.says in str(error)
    if example.says.startswith("nested"):
        assert error.path.startswith(f"${example.below}")  # at the first level that is too deep
    else:
        assert error.path == f"${example.below}"


@RULES
def test_what_is_refused_is_refused_at_its_place(rule: ValueRule) -> None:
    """Every way of encoding refuses it, with the words and the path of the table."""
    for example in rule.refused:
        whole = (CODEC.encode_text, dumps) if example.type is None else (CODEC.encode_text,)
        # Without the text its size is only estimated, and whoever writes it counts then.
        parts = () if rule.name == "size" else (CODEC.encode, check_json)[: len(whole)]
        for encode in (*whole, *parts):
            given = () if encode in (dumps, check_json) else (example.type,)
            check_refusal(refusal(encode, example.make(), *given), example)


@RULES
def test_what_does_not_fit_is_refused_when_it_is_read(rule: ValueRule) -> None:
    """Neither hostile text nor JSON of another shape is ever converted, cut or guessed."""
    for example in rule.unread:
        if example.type is None:
            check_refusal(refusal(loads, example.make()), example)
        else:
            check_refusal(refusal(CODEC.decode, example.make(), example.type), example)


@RULES
def test_a_type_without_a_form_is_refused_before_any_value_is(rule: ValueRule) -> None:
    """Where a definition is installed, and where a value of the type is handed in."""
    for type_, says in rule.untyped:
        with pytest.raises(NotJsonError, match=re.escape(says)):
            CODEC.check_type(type_, what="input")
        for encode in (CODEC.encode, CODEC.encode_text, CODEC.decode):
            with pytest.raises(NotJsonError, match=re.escape(says)):
                encode(None, type_)


def test_fields_that_are_missing_take_their_defaults() -> None:
    """What an older class has stored is read, where the new fields have defaults."""
    for cls, stored, read in DEFAULTS:
        assert exact(CODEC.decode(stored, cls)) == exact(read)


TYPED: list[Accepted] = [
    example for rule in VALUE_RULES for example in rule.accepted if example.type is not None
]
HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """What comes back of a value without a type: tuples as lists."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


@given(HOSTILE)
def test_any_value_is_refused_or_comes_back_exactly(value: Any) -> None:
    """There is nothing between the two, and the three ways of looking at a value agree."""
    refused, text = None, ""
    try:
        text = dumps(value)
    except NotJsonError as error:
        refused = error
    if refused is not None:
        assert refused.path.startswith("$")
        assert refusal(check_json, value).path == refused.path
        return
    assert same(loads(text), plain(value))
    assert same(check_json(value), plain(value))
    assert CODEC.encode_text(value) == text


def altered(value: Any, way: list[int], part: Any) -> Any:
    """JSON with another part somewhere below, or in its place."""
    if not way or not isinstance(value, dict | list) or not value:
        return part
    if isinstance(value, list):
        place = way[0] % len(value)
        return [
            altered(each, way[1:], part) if n == place else each for n, each in enumerate(value)
        ]
    name = list(value)[way[0] % len(value)]
    return {**value, name: altered(value[name], way[1:], part)}


@given(
    st.sampled_from(TYPED),
    st.lists(st.integers(0, 3), max_size=3),
    HOSTILE | st.sampled_from(TYPED).map(lambda example: example.json()),
)
def test_any_json_is_read_as_the_type_exactly_or_refused(
    example: Accepted, way: list[int], part: Any
) -> None:
    """What a type reads from foreign JSON, it writes and reads again as the same value."""
    try:
        json = check_json(altered(example.json(), way, part))
        read = CODEC.decode(json, example.type)
    except NotJsonError:
        return
    again = CODEC.encode(read, example.type)
    assert exact(CODEC.decode(again, example.type)) == exact(read)


def test_the_table_names_its_own_limits() -> None:
    """The sentences hold the numbers of the code."""
    limits = {str(VALUE_DEPTH_MAX), "-2**63", "2**64-1", "value_bytes_max"}
    text = " ".join(rule.statement for rule in VALUE_RULES)

    assert {limit for limit in limits if limit not in text} == set()
