"""The codec of values by their types."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NewType, Optional, TypeVar

import attr
import attrs
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from typing_extensions import TypeAliasType

from pidurable.errors import NotJsonError
from pidurable.records._codec import Codec, snake_case
from pidurable.records._ids import TaskId
from pidurable.records._json import dumps, is_plain, loads

ItemT = TypeVar("ItemT")
Cents = NewType("Cents", int)
Names = TypeAliasType("Names", list[str])


SHARED = Codec()


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Odd(enum.Enum):
    """Values that JSON does not have: stored by name."""

    PAIR = (1, 2)
    NONE = None


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@attrs.frozen
class Prepare:
    """Nothing has happened yet."""


@attrs.frozen
class Charge:
    key: str
    cents: int = 0


@attrs.frozen
class HTTPCall:
    url: str
    after: Prepare | Charge | None = None


@attrs.frozen
class Tree:
    name: str
    below: list[Tree] = attrs.Factory(list)
    other: Tree | Charge | None = None


@attrs.frozen(kw_only=True)
class Page(Generic[ItemT]):
    items: list[ItemT]
    first: ItemT | None = None


@attrs.frozen(kw_only=True)
class ChargePage(Page[Charge]):
    total: int


@dataclass(frozen=True)
class Plain:
    when: datetime
    color: Color = Color.RED
    paths: tuple[Path, ...] = ()
    computed: int = field(init=False, default=5)


@attrs.frozen(kw_only=True)
class Everything:
    text: str
    count: int
    ratio: float
    flag: bool
    nothing: None
    when: datetime
    day: date
    span: timedelta
    price: Decimal
    path: Path
    id: uuid.UUID
    data: bytes
    color: Color
    odd: Odd
    rights: Rights
    word: Literal["a", "b", 3]
    task: TaskId[str]
    cents: Cents
    names: Names
    note: Annotated[str, "a note"]
    maybe: Optional[Charge]  # noqa: UP045
    step: Prepare | Charge
    mixed: int | float | str | bool | list[int] | None
    pair: tuple[int, str]
    many: tuple[Charge, ...]
    by_name: dict[str, Charge]
    by_color: Mapping[Color, int]
    tags: frozenset[str]
    seq: Sequence[int]
    any: Any
    inner: HTTPCall | Charge


CHARGES = st.builds(Charge, key=st.text("abü"), cents=st.integers(0, 9))
STEPS = st.builds(Prepare) | CHARGES
EVERYTHING = st.builds(
    Everything,
    text=st.text("abü"),
    count=st.integers(-(2**63), 2**64 - 1),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    nothing=st.none(),
    # The fold says which offset is meant; the offset itself is stored, so it is not needed.
    when=st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-5))])).map(
        lambda when: when.replace(fold=0)
    ),
    day=st.dates(),
    span=st.timedeltas(timedelta(days=-(10**6)), timedelta(days=10**6)),
    price=st.decimals(allow_nan=False, allow_infinity=False),
    path=st.sampled_from([Path("/tmp/x"), Path("a b")]),
    id=st.uuids(),
    data=st.binary(),
    color=st.sampled_from(Color),
    odd=st.sampled_from(Odd),
    rights=st.sampled_from([Rights(0), Rights.READ, Rights.READ | Rights.WRITE]),
    word=st.sampled_from(["a", "b", 3]),
    task=st.integers(1, 9).map(TaskId),
    cents=st.integers(0, 9),
    names=st.lists(st.text("ab")),
    note=st.text("ab"),
    maybe=st.none() | CHARGES,
    step=STEPS,
    mixed=st.none()
    | st.integers(0, 3)
    | st.floats(0, 3)
    | st.booleans()
    | st.text("1a")
    | st.lists(st.integers(0, 3)),
    pair=st.tuples(st.integers(0, 3), st.text("ab")),
    many=st.lists(CHARGES).map(tuple),
    by_name=st.dictionaries(st.text("ab"), CHARGES),
    by_color=st.dictionaries(st.sampled_from(Color), st.integers(0, 3)),
    tags=st.frozensets(st.text("ab")),
    seq=st.lists(st.integers(0, 3)).map(tuple),
    any=st.none() | st.dictionaries(st.text("ab"), st.lists(st.integers(0, 3))),
    inner=CHARGES | st.builds(HTTPCall, url=st.just("u"), after=st.none() | STEPS),
)


Step = TypeAliasType("Step", Prepare | Charge | None)


@attrs.frozen(kw_only=True)
class LoosePage(Page):
    """A base without its type argument: its items are any JSON."""


@attrs.frozen(kw_only=True)
class Boxes:
    """A generic class with a type argument and without."""

    inner: Page[int]
    plain: Page


@attr.s(frozen=True)
class Untyped:
    """A field without an annotation holds any JSON."""

    value = attr.ib()


def exact(value: Any) -> Any:
    """Spell out the types too, as 1 == 1.0 == True; sets have no order."""
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


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec()


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(EVERYTHING)
def test_every_type_comes_back_exactly(value: Everything) -> None:
    """A class with a field of each known type is read back equal, type for type, from its text."""
    text = SHARED.encode_text(value)

    assert exact(value) == exact(SHARED.decode(loads(text), Everything))
    assert text == dumps(SHARED.encode(value))
    assert type(SHARED.decode(loads(text), Everything).task) is TaskId


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (Charge("k"), Prepare | Charge),
        (Prepare(), Prepare | Charge | None),
        (None, Prepare | Charge | None),
        ([Charge("k"), 7, "x", None], list[Charge | int | str | None]),
        (Tree("a", [Tree("b", other=Charge("k"))], Tree("c", other=Tree("d"))), Tree),
        (Page(items=[Charge("a")], first=Charge("b")), Page[Charge]),
        (Page(items=[1, 2]), Page[int]),
        (Page(items=[{"x": 1}]), Page),
        (ChargePage(items=[Charge("a")], total=1), ChargePage),
        (Plain(datetime(2026, 1, 1, tzinfo=UTC), Color.BLUE, (Path("x"),)), Plain),
        ({"a": (1, "x")}, dict[str, tuple[int, str]]),
        ({(1, 2), (0, 5)}, set[tuple[int, int]]),
        ((), tuple[int, ...]),
        ([[b"x"]], list[list[bytes]]),
        (3, Literal[1, 3]),
        (Color.RED, Literal[Color.RED]),
        (2.5, float | None),
        (2.5, float | str),
        ([None, Charge("k"), "x"], list[Step | str]),
        (Boxes(inner=Page(items=[1]), plain=Page(items=["x"])), Boxes),
        (Untyped({"a": [1]}), Untyped),
        (LoosePage(items=[1, "x"]), LoosePage),
        ([None], list[None]),
    ],
)
def test_nested_types_and_unions_come_back(codec: Codec, value: Any, type_: Any) -> None:
    """Unions, generics, recursive classes and containers are read back equal."""
    codec.check_type(type_, what="it")

    assert exact(value) == exact(codec.decode(loads(codec.encode_text(value, type_)), type_))


def test_the_stored_shape_is_what_the_docs_say(codec: Codec) -> None:
    """Tags in unions only, sets in a stable order, moments in ISO 8601, durations in us."""
    assert codec.encode(Charge("k")) == {"key": "k", "cents": 0}
    assert codec.encode(Charge("k"), Prepare | Charge) == {
        "_type": "charge",
        "key": "k",
        "cents": 0,
    }
    assert codec.encode(HTTPCall("u", Prepare())) == {"url": "u", "after": {"_type": "prepare"}}
    assert codec.encode(Charge("k"), Charge | None) == {"key": "k", "cents": 0}
    assert codec.encode({"c", "a", "b"}, set[str]) == ["a", "b", "c"]
    assert codec.encode(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00+00:00"
    assert codec.encode(timedelta(seconds=1.5)) == 1_500_000
    assert codec.encode(b"x") == "eA=="
    assert codec.encode(Odd.PAIR) == "PAIR"


class Word(str):
    __slots__ = ()


class Number(float):
    __slots__ = ()


class Huge(enum.Enum):
    ONE = 1
    HUGE = 2**70


ODD_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**400, TaskId(3), TaskId(2**70)]
    )
    | st.sampled_from([0.5, -0.0, float("nan"), float("inf"), Number(1.5), Number("inf")])
    | st.sampled_from(["x", Word("x"), "\0", "\ud800", Color.RED, Huge.HUGE, Rights.READ])
    | st.sampled_from([Charge("k"), Charge(Word("k"), 2**64), Prepare(), b"x", timedelta.max]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["a", Word("b"), 1, None]), inner, max_size=2)
    ),
    max_leaves=5,
)
ODD_TYPES: list[Any] = [
    *(None, bool, int, float, str, Any, TaskId, Color, Huge, Rights, Charge, Prepare, Untyped),
    *(Literal["x", 3, True], Literal[Huge.HUGE], int | None, int | str | None, float | bool),
    *(Prepare | Charge, tuple[Any, int], tuple[float, str | None], timedelta, bytes, datetime),
    *(list[int], dict[str, Any], set[str], tuple[int, ...], Page[int], Page[Any], Tree),
]


@given(ODD_VALUES)
def test_a_form_that_calls_itself_plain_gives_plain_json(value: Any) -> None:
    """Whatever is put into it: what such a form gives is what the walk over it would let pass."""
    for form in filter(lambda form: form.plain, map(SHARED.form, ODD_TYPES)):
        for each in (value, Untyped(value), Charge(value, value)):
            try:
                encoded = form.encode(each)
            except Exception:  # a refusal; other tests look at its words
                continue
            assert is_plain(encoded), (form.python, each)


def test_only_forms_of_bounded_parts_call_themselves_plain() -> None:
    """A list may hold one text a million times, and an unknown type anything: those are walked."""
    plain = [type_ for type_ in ODD_TYPES if SHARED.form(type_).plain]

    assert plain == [
        *(None, bool, int, float, str, Any, TaskId, Color, Charge, Prepare, Untyped),
        *(Literal["x", 3, True], int | None, int | str | None, float | bool),
        *(Prepare | Charge, tuple[Any, int], tuple[float, str | None]),
    ]
    for type_ in (list[str], dict[str, str], tuple[str, ...], Page[str]):
        assert not SHARED.form(type_).plain
    with pytest.raises(NotJsonError, match="at most 16777216 bytes"):
        SHARED.encode_text(["x" * 2**20] * 2**14, list[str])


def test_without_a_type_values_are_encoded_by_their_class(codec: Codec) -> None:
    """Plain dicts and lists may hold known values at any depth."""
    value = {"a": [Charge("k"), (b"x", Color.RED)], "b": {"c": Decimal("1.50")}}

    assert codec.encode(value) == {
        "a": [{"key": "k", "cents": 0}, ["eA==", "red"]],
        "b": {"c": "1.50"},
    }


def test_what_is_encoded_shares_nothing_with_the_value(codec: Codec) -> None:
    """Changing the original later does not change what was encoded."""
    inner = [1]
    json = codec.encode({"a": inner})
    inner.append(2)

    assert json == {"a": [1]}


# C083: nothing becomes None or something like it; reading fails loudly, at its place.
@pytest.mark.parametrize(
    ("json", "type_", "path", "problem"),
    [
        ("7", int, "$", "expected an int, got '7'"),
        (7, str, "$", "expected a str, got 7"),
        (None, str, "$", "expected a str, got None"),
        ("None", type(None), "$", "expected None, got 'None'"),
        (True, int, "$", "expected an int, got True"),
        (True, float, "$", "expected a float, got True"),
        (1, bool, "$", "expected a bool, got 1"),
        (1.0, int, "$", "expected an int, got 1.0"),
        (True, Literal[1, 2], "$", "expected one of 1, 2, got True"),
        ("read", Color, "$", "expected a Color, did you mean 'red'?, got 'read'"),
        (10**19, Rights, "$", "refused it, ValueError"),
        ({"a": ["x", 1]}, dict[str, list[str]], "$.a[1]", "expected a str, got 1"),
        ({"key": "k", "sents": 1}, Charge, "$", "no field 'sents', did you mean 'cents'?"),
        ({"cents": 1}, Charge, "$", "Charge lacks the field 'key'"),
        ([], Charge, "$", "expected an object for Charge, got []"),
        ("x", Prepare, "$", "expected an object for Prepare, got 'x'"),
        ({"a": {"key": 1}}, dict[str, Charge], "$.a.key", "expected a str, got 1"),
        ({"_type": "charged", "key": ""}, Prepare | Charge, "$", "did you mean 'charge'?"),
        ({"key": ""}, Prepare | Charge, "$", "expected '_type' to be one of 'prepare', 'charge'"),
        ({"_type": "charge", "key": 1}, Prepare | Charge, "$.key", "expected a str"),
        ({"_type": ["charge"]}, Prepare | Charge, "$", "to be one of"),
        ("x", None | bool | int, "$", "expected bool or int, got 'x'"),
        ([1], int | str | None, "$", "expected int or str, got [1]"),
        ({"name": "a", "below": [{"name": "b", "below": 3}]}, Tree, "$.below[0].below", "a list"),
        ([1, "x", 2], tuple[int, str], "$", "expected a list of 2"),
        (["x", "x"], tuple[int, str], "$[0]", "expected an int"),
        (["a", "a"], set[str], "$", "no item twice"),
        ("2026-01-01T00:00:00", datetime, "$", "aware"),
        ("soon", datetime, "$", "ISO 8601"),
        ("NaN", Decimal, "$", "finite"),
        ("1,5", Decimal, "$", "a Decimal"),
        ("e A", bytes, "$", "base64"),
        (1.5, timedelta, "$", "microseconds"),
        ("12", uuid.UUID, "$", "a UUID"),
        ({"green": 1}, dict[Color, int], "$", "expected a Color"),
        (["a"], dict[str, int], "$", "expected an object, got ['a']"),
        ("a", list[int], "$", "expected a list, got 'a'"),
        ("a", float, "$", "expected a float, got 'a'"),
        (1, datetime, "$", "an aware datetime in ISO 8601 as a string, got 1"),
        ({"items": [1, "x"]}, Page[int], "$.items[1]", "expected an int"),
    ],
)
def test_json_that_does_not_fit_is_refused_at_its_place(
    codec: Codec, json: Any, type_: Any, path: str, problem: str
) -> None:
    """Decoding never converts, drops or guesses."""
    with pytest.raises(NotJsonError) as caught:
        codec.decode(json, type_)

    assert path == caught.value.path
    assert problem in str(caught.value)


def test_an_int_for_a_float_is_the_only_widening(codec: Codec) -> None:
    """An int is read and written as a float where a float is wanted; a huge one is refused."""
    assert repr(codec.decode(2, float)) == "2.0"
    assert repr(codec.encode(2, float)) == "2.0"
    with pytest.raises(NotJsonError, match="expected a float"):
        codec.encode(10**400, float)


def test_missing_fields_take_their_defaults(codec: Codec) -> None:
    """A field with a default may be missing, one without may not."""
    assert Charge("k", 0) == codec.decode({"key": "k"}, Charge)


@attrs.frozen
class Sub(Charge):
    more: int = 1


@pytest.mark.parametrize(
    ("value", "type_", "path", "problem"),
    [
        ({"a": [datetime(2026, 1, 1)]}, None, "$.a[0]", "aware"),
        (Plain(datetime(2026, 1, 1)), None, "$.when", "aware"),
        (Charge(7), None, "$.key", "expected a str, got 7"),  # type: ignore[arg-type]
        (Charge("k", True), None, "$.cents", "expected an int, got True"),
        (Charge("k", 2**64), None, "$.cents", "2**64-1"),
        (Charge("\ud800"), None, "$.key", "surrogate"),  # C082
        (Sub("k"), Charge, "$", "expected a Charge"),
        ([Sub("k")], list[Prepare | Charge], "$[0]", "expected a Charge"),
        ([Charge("k"), Fraction(1)], None, "$[1]", "values of Fraction cannot be stored"),
        ({"x": {1, "a"}}, dict[str, set[int]], "$.x[", "expected an int, got 'a'"),
        (Decimal("NaN"), None, "$", "finite"),  # C084
        (float("nan"), float, "$", "finite"),  # C084
        (Charge("k", 10**5000), None, "$.cents", "2**64-1, got 16610 bits"),
        ((1.5, float("-inf")), tuple[float, float], "$[1]", "finite, got -inf"),
        (Huge.HUGE, None, "$", "2**64-1"),
        ({"a": [float("nan")]}, None, "$.a[0]", "finite"),  # C084
        ({"a": float("inf")}, dict[str, float], "$.a", "finite"),
        (timedelta.max, None, "$", "2**64-1"),
        ({1: "x"}, dict[str, str], "$", "expected a str, got 1"),
        ((1, 2, 3), tuple[int, int], "$", "expected a tuple of 2"),
        (HTTPCall("u", Prepare), None, "$.after", "expected Prepare or Charge"),  # type: ignore
        (datetime(2026, 1, 1, tzinfo=UTC), date, "$", "without a time"),
        ("x", Literal["a"], "$", "expected one of 'a', got 'x'"),
        ("x", float, "$", "expected a float, got 'x'"),
        ("x", datetime, "$", "expected an aware datetime"),
        ("x", timedelta, "$", "expected a timedelta"),
        ("x", Rights, "$", "expected a Rights"),
        ("x", list[str], "$", "expected a list"),
        ("x", dict[str, str], "$", "expected a dict"),
        ("x", tuple[str, ...], "$", "expected a tuple"),
    ],
)
def test_values_that_could_not_be_read_back_are_refused_at_their_place(
    codec: Codec, value: Any, type_: Any, path: str, problem: str
) -> None:
    """Encoding is as strict as decoding, and names the path."""
    for encode in (codec.encode, codec.encode_text):
        with pytest.raises(NotJsonError) as caught:
            encode(value, type_)

        assert caught.value.path.startswith(path)
        assert problem in str(caught.value)


def test_paths_begin_where_the_caller_says(codec: Codec) -> None:
    """Both directions put the caller's path in front."""
    with pytest.raises(NotJsonError, match=r"^task 7 input\.key: "):
        codec.decode({"key": 1}, Charge, path="task 7 input")
    with pytest.raises(NotJsonError, match=r"^memo\.key: "):
        codec.encode_text(Charge(1), path="memo")  # type: ignore[arg-type]


def test_a_value_that_contains_itself_is_refused(codec: Codec) -> None:
    """A cycle of objects or of lists ends in a NotJsonError."""  # C085
    tree = Tree("a")
    tree.below.append(tree)
    loop: list[Any] = [b"x"]
    loop.append(loop)

    for value in (tree, loop):
        with pytest.raises(NotJsonError, match="contains itself"):
            codec.encode_text(value)


def test_a_validator_that_refuses_is_reported(codec: Codec) -> None:
    """What a class itself refuses is an error at its place, with the reason."""

    @attrs.frozen
    class Small:
        n: int = attrs.field(validator=attrs.validators.lt(5))

    with pytest.raises(NotJsonError, match=r"^\$\[1\]: Small refused it, ValueError: 'n' must be"):
        codec.decode([{"n": 1}, {"n": 9}], list[Small])


@attrs.frozen
class Holder:
    good: int
    bad: list[Fraction]


@attrs.frozen
class Unresolved:
    what: Nowhere  # type: ignore[name-defined]  # noqa: F821


@attrs.frozen
class Tagged:
    _type: str = attrs.field(alias="type")


@pytest.mark.parametrize(
    ("type_", "path", "problem"),
    [
        (Holder, "in.bad[]", "values of Fraction cannot be stored; make it an attrs class"),
        (dict[str, Holder | None], "in[]", "Fraction"),
        (set[Fraction], "in[]", "Fraction"),
        (Callable[[int], str], "in", "cannot be stored"),
        (complex, "in", "values of complex cannot be stored"),
        (dict[int, str], "in", "the keys of a dict must be strings, not int"),
        (str | datetime, "in", "str and datetime are both stored as a JSON str"),
        (Charge | dict[str, int], "in", "both stored as a JSON object"),
        (int | timedelta, "in", "both stored as a JSON int"),
        (Unresolved, "in", "an annotation of Unresolved cannot be read"),
        (Tagged, "in", "the field name _type is taken"),
        (tuple[int, complex], "in[1]", "complex"),
        (list["Nowhere"], "in[]", "the annotation 'Nowhere' cannot be resolved"),  # noqa: F821
        (Literal[b"x"], "in", "the literal b'x' has no form in JSON"),
    ],
)
def test_types_without_a_form_are_refused_beforehand(
    codec: Codec, type_: Any, path: str, problem: str
) -> None:
    """check_type finds what could not be stored, in any field, and says what to do."""
    for _ in range(2):  # a failed type leaves nothing half built behind
        with pytest.raises(NotJsonError) as caught:
            codec.check_type(type_, what="in")

        assert caught.value.path.startswith(path)
        assert problem in caught.value.problem


def test_an_int_widens_to_the_float_of_a_union(codec: Codec) -> None:
    """Where a union has a float and no int, an int is read as the float."""
    assert repr(codec.decode(3, float | str)) == "3.0"
    assert repr(codec.decode(3, float | int)) == "3"


def test_a_dict_that_is_a_string_names_no_parts(codec: Codec) -> None:
    """Where an object is expected, no other value is taken apart."""
    with pytest.raises(NotJsonError, match=r"^\$\.a: expected an object, got 'text'$"):
        codec.decode({"a": "text"}, dict[str, dict[str, int]])


def test_a_str_field_holds_the_characters_of_a_str_enum(codec: Codec) -> None:
    """A subclass of str in a str field is stored and read as a plain str."""

    class Word(enum.StrEnum):
        YES = "yes"

    assert codec.encode_text(Charge(Word.YES)) == '{"key":"yes","cents":0}'


def test_a_key_error_of_a_class_is_not_taken_for_a_missing_field(codec: Codec) -> None:
    """A KeyError that a validator raises is reported as the refusal of the class."""

    def refuse(_: object, __: object, value: int) -> None:
        raise KeyError("unknown number")

    @attrs.frozen
    class Picky:
        n: int = attrs.field(validator=refuse)

    with pytest.raises(NotJsonError, match="Picky refused it, KeyError: 'unknown number'"):
        codec.decode({"n": 1}, Picky)


def test_an_annotation_with_metadata_that_has_no_hash_works(codec: Codec) -> None:
    """Annotated may carry anything."""
    assert codec.decode([1], Annotated[list[int], ["meta"]]) == [1]


def test_an_extra_type_refuses_other_values() -> None:
    """What is not of the extension's type never reaches its function."""
    codec = Codec({Fraction: (str, Fraction)})

    with pytest.raises(NotJsonError, match=r"^\$\[1\]: expected a Fraction, got 'x'$"):
        codec.encode([Fraction(1), "x"], list[Fraction])


def test_two_classes_of_one_tag_are_refused(codec: Codec) -> None:
    """A union whose members could not be told apart by tag is refused."""
    other = attrs.make_class("Charge", ["x"], frozen=True)

    with pytest.raises(NotJsonError, match="two classes of the union have the tag 'charge'"):
        codec.check_type(Charge | other, what="in")


def test_an_extension_brings_its_own_types() -> None:
    """An extra type is encoded and decoded by its two functions, also nested, and in Optional."""
    codec = Codec(
        {Fraction: (lambda value: [value.numerator, value.denominator], lambda j: Fraction(*j))}
    )
    value = Holder(1, [Fraction(1, 3)])

    assert value == codec.decode(loads(codec.encode_text(value)), Holder)
    assert codec.encode({"f": Fraction(1, 2)}) == {"f": [1, 2]}
    codec.check_type(Fraction | None, what="in")
    with pytest.raises(NotJsonError, match="beside None only"):
        codec.check_type(Fraction | int, what="in")
    with pytest.raises(NotJsonError, match=r"^\$\.bad\[0\]: Fraction refused it, ZeroDivision"):
        codec.decode({"good": 1, "bad": [[1, 0]]}, Holder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Charge", "charge"),
        ("HTTPCall", "http_call"),
        ("Step2", "step2"),
        ("Step2Done", "step2_done"),
        ("AwaitingHTTP", "awaiting_http"),
        ("X", "x"),
    ],
)
def test_tags_are_class_names_in_snake_case(name: str, expected: str) -> None:
    """The tag of a class is its name with underscores between words."""
    assert expected == snake_case(name)


@pytest.mark.parametrize("value", [object(), {"a": [object()]}])
def test_a_bare_object_in_an_any_is_refused(value: Any) -> None:
    """`object` as a type means anything, but a bare object has no form: refused, in finite time."""
    for path in ("$", "$.deep"):
        with pytest.raises(NotJsonError, match="values of object cannot be stored"):
            Codec().encode(value, Any, path=path)


def test_an_endless_value_in_an_any_is_refused_at_once() -> None:
    """What is too large as a whole is not searched for the part that is too large by itself."""
    value: Any = ["x"]
    for _ in range(100):
        value = [value, value]

    with pytest.raises(NotJsonError, match=r"^\$: at most 16777216 bytes are allowed"):
        Codec().encode(value, Any)
