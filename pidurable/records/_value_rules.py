"""The value rules: what may be stored, how it is written, what comes back, and what is refused.

One table. The tests drive every door with its examples (a commit, a reopening, both backends), the
manual prints its statements, and `pidurable explain NAME` says one of them. It describes what
`_json`, `_codec` and `_forms` do and is imported by none of them. Holds for the table:

* an example of a rule without a type is a value that every door takes, also one for any JSON;
* an example with a type goes through the doors that know a type: entries, documents, inputs,
  checkpoints and results;
* what is refused is refused whole, before anything is stored, with the place.
"""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar

import attrs

from pidurable.records._json import INTEGER_MAX, INTEGER_MIN, VALUE_BYTES_MAX
from pidurable.records._limits import VALUE_DEPTH_MAX
from pidurable.records._messages import JsonValue
from pidurable.records._readonly import view_of

ItemT = TypeVar("ItemT")

SAME: Final[Any] = object()
"""What comes back is the value itself, or what is stored is."""


@attrs.frozen(kw_only=True)
class Accepted:
    """A value that is stored, what is written, and what is read back."""

    value: Any
    """A function is called for the value, which is then large, or must be made anew."""
    stored: Any = SAME
    read: Any = SAME
    type: Any = None
    """As annotated; None at a door that knows none."""

    def make(self) -> Any:
        """Return the value."""
        return self.value() if callable(self.value) else self.value

    def json(self) -> Any:
        """Return the JSON that is stored."""
        return self.make() if self.stored is SAME else self.stored

    def comes_back(self) -> Any:
        """Return what is read: by the type, or the JSON where there is none."""
        if self.read is not SAME:
            return self.read
        return self.json() if self.type is None else self.make()


@attrs.frozen(kw_only=True)
class Refused:
    """A value that is refused, with a part of what is said of it."""

    value: Any
    says: str
    below: str = ""
    """Where in the value, as the path goes on from the place of the value itself."""
    type: Any = None

    def make(self) -> Any:
        """Return the value."""
        return self.value() if callable(self.value) else self.value


@attrs.frozen(kw_only=True)
class ValueRule:
    """One rule, in a sentence, with examples."""

    name: str
    statement: str
    accepted: tuple[Accepted, ...] = ()
    refused: tuple[Refused, ...] = ()
    unread: tuple[Refused, ...] = ()
    """Stored JSON that does not fit the type which reads it; a str without a type is JSON text."""
    untyped: tuple[tuple[Any, str], ...] = ()
    """Types that no value of can be stored, with a part of what is said of each."""


# --- what the examples are made of --------------------------------------------------------------


class Word(enum.StrEnum):
    """An Enum whose members are strings too."""

    YES = "yes"


class Colour(enum.Enum):
    """An Enum with values that JSON has."""

    RED = "red"
    BLUE = "blue"


class Shape(enum.Enum):
    """An Enum with values that JSON does not have: stored by name."""

    ROUND = (1, 2)
    FLAT = None


class Rights(enum.Flag):
    """Members that combine: stored as a number."""

    READ = 1
    WRITE = 2


class Cents(int):
    """A subclass of int."""


Point = namedtuple("Point", "x y")


@attrs.frozen
class Cash:
    """A frozen attrs class, one field with a default."""

    cents: int
    note: str = ""


@attrs.frozen
class Card:
    """Another member of the union `Cash | Card`."""

    number: str
    when: datetime | None = None


@dataclasses.dataclass(frozen=True)
class Route:
    """A dataclass."""

    files: tuple[Path, ...] = ()
    paid: Cash | Card | None = None


@attrs.frozen
class Tree:
    """A class that contains itself."""

    name: str
    below: list[Tree] = attrs.Factory(list)


@attrs.frozen
class Page(Generic[ItemT]):
    """A generic class."""

    items: list[ItemT]
    first: ItemT | None = None


EXTENSION_CODECS: Mapping[type, tuple[Callable[[Any], JsonValue], Callable[[Any], Any]]] = {
    Fraction: (lambda value: [value.numerator, value.denominator], lambda json: Fraction(*json))
}
"""What an extension brings, as its `codecs`."""


def nested(levels: int) -> Any:
    """Return a list in a list in a list, so many levels deep."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def _in_itself() -> Any:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


def _doubled() -> Any:
    """A small object in memory, with 2**100 leaves when it is written down."""
    value: list[Any] = ["x"]
    for _ in range(100):
        value = [value, value]
    return value


NOON = datetime(2026, 1, 2, 12, 30, tzinfo=UTC)
_LARGE = "an integer must be from -2**63 to 2**64-1"
_DEEP = f"nested more than {VALUE_DEPTH_MAX} levels deep"

# --- strict JSON: every door ---------------------------------------------------------------------

_JSON = (
    ValueRule(
        name="json_types",
        statement="A value is None, a bool, an int, a float, a str, a list or a dict of these. "
        "Tuples are written as lists, subclasses (a `StrEnum`, an `OrderedDict`) and what a watch "
        "has shown plainly.",
        accepted=(
            Accepted(value=None),
            Accepted(value=[True, False]),
            Accepted(value={"list": [1, {"a": []}], "": {}}),
            Accepted(value=(1, ("a", None)), stored=[1, ["a", None]]),
            Accepted(value=Point(1, 2), stored=[1, 2]),
            Accepted(value=OrderedDict(b=1, a=2), stored={"b": 1, "a": 2}),
            Accepted(value=[Word.YES, Cents(7)], stored=["yes", 7]),
            Accepted(value=view_of({"shown": [1]}), stored={"shown": [1]}),
        ),
        refused=(
            Refused(value=lambda: {"a": [object()]}, below=".a[0]", says="object"),
            Refused(value=lambda: [1, 2j], below="[1]", says="complex"),
            Refused(value=lambda: {"a": range(3)}, below=".a", says="range"),
            Refused(value=lambda: [bytearray(b"ab")], below="[0]", says="bytearray"),
        ),
    ),
    ValueRule(
        name="finite_numbers",
        statement="A number is finite: NaN and the infinities are refused.",
        accepted=(
            Accepted(value=1.7976931348623157e308),
            Accepted(value=5e-324),
            Accepted(value=0.1),
        ),
        refused=(
            Refused(value=float("nan"), says="a number must be finite, got nan"),
            Refused(value=lambda: {"a": [float("inf")]}, below=".a[0]", says="must be finite"),
            Refused(value=lambda: [-float("inf")], below="[0]", says="must be finite"),
        ),
        unread=(
            Refused(value="[NaN]", below="[0]", says="must be finite"),
            Refused(value='{"a":1e999}', below=".a", says="must be finite"),
            Refused(value="-Infinity", says="must be finite"),
        ),
    ),
    ValueRule(
        name="integer_range",
        statement="An integer is from -2**63 to 2**64-1, and kept exactly.",
        accepted=(
            Accepted(value=INTEGER_MIN),
            Accepted(value=INTEGER_MAX),
            Accepted(value=[2**53 + 1, 2**63 - 1, 2**63, -1, 0]),
        ),
        refused=(
            Refused(value=INTEGER_MIN - 1, says=_LARGE),
            Refused(value=lambda: {"n": INTEGER_MAX + 1}, below=".n", says=_LARGE),
            Refused(value=lambda: [10**5000], below="[0]", says=_LARGE),
        ),
        unread=(
            Refused(value="18446744073709551616", says=_LARGE),
            Refused(value="[-9223372036854775809]", below="[0]", says=_LARGE),
            Refused(value="9" * 5000, says=_LARGE),
        ),
    ),
    ValueRule(
        name="numbers_apart",
        statement="The numbers 1 and 1.0 and True stay apart, and so do 0.0 and -0.0.",
        accepted=(
            Accepted(value=[1, 1.0, True, 0, 0.0, -0.0, False]),
            Accepted(value=-0.0),
            Accepted(value=1.0),
            Accepted(value=True),
        ),
    ),
    ValueRule(
        name="unicode",
        statement="Text is Unicode: a lone surrogate and a NUL are refused, in keys too; all else "
        "comes back as it is, not normalised.",
        accepted=(
            Accepted(value="\u00e9 e\u0301 \U0001f469\u200d\U0001f4bb \u202e\ufffe\U0010ffff"),
            Accepted(value={"a\r\n\u2028\x85\x1b[31m": "\\u0000 \\ud800 \x7f\x01"}),
        ),
        refused=(
            Refused(value="a\0b", says="no NUL, at character 1"),
            Refused(
                value=lambda: ["\ud800"], below="[0]", says="no lone surrogate, at character 0"
            ),
            Refused(value=lambda: {"a b": "x\udfff"}, below='["a b"]', says="no lone surrogate"),
            Refused(value=lambda: {"a": {"k\0": 1}}, below='.a["k\\u0000"]', says="no NUL"),
            Refused(value="\ud83d\ude00", says="no lone surrogate"),
        ),
        unread=(
            Refused(value='"\\ud800"', says="no lone surrogate"),
            Refused(value='{"a":"\\u0000"}', below=".a", says="no NUL"),
            Refused(value='"\\udc00\\ud800"', says="no lone surrogate"),
        ),
    ),
    ValueRule(
        name="string_keys",
        statement="A key is a string, and occurs once. Keys keep their order.",
        accepted=(
            Accepted(value={"b": 1, "a": 2, "__proto__": 3}),
            Accepted(value={Word.YES: 1}, stored={"yes": 1}),
        ),
        refused=(
            Refused(value=lambda: {"a": {1: 2}}, below=".a", says="a key must be a string, got 1"),
            Refused(value={None: 1}, says="a key must be a string, got None"),
            Refused(value=lambda: [{("a",): 1}], below="[0]", says="a key must be a string"),
        ),
        unread=(
            Refused(value='{"a":1,"a":2}', says="no duplicate key, got 'a'"),
            Refused(value='[{"\\u0061":1,"a":1}]', below="[0]", says="no duplicate key"),
        ),
    ),
    ValueRule(
        name="depth",
        statement=f"A stored value is at most {VALUE_DEPTH_MAX} levels deep as a whole, and never "
        "contains itself.",
        accepted=(Accepted(value=lambda: nested(VALUE_DEPTH_MAX)),),
        refused=(
            Refused(value=lambda: nested(VALUE_DEPTH_MAX + 1), below="[0]" * 50, says=_DEEP),
            Refused(value=lambda: nested(2_000), below="[0]" * 50, says=_DEEP),
            Refused(value=lambda: nested(100_000), says=_DEEP),
            Refused(value=_in_itself, below="[1].again[1].again[1].again", says=_DEEP),
        ),
        unread=(Refused(value="[" * 100_000, says=_DEEP),),
    ),
    ValueRule(
        name="size",
        statement="A value takes at most `value_bytes_max` bytes as UTF-8 text, shared parts "
        "counted each time.",
        accepted=(Accepted(value=lambda: "x" * (VALUE_BYTES_MAX - 2)),),
        refused=(
            Refused(value=lambda: "x" * (VALUE_BYTES_MAX - 1), says="bytes are allowed"),
            Refused(value=lambda: "\u20ac" * (VALUE_BYTES_MAX // 3), says="bytes are allowed"),
            Refused(value=_doubled, says="bytes are allowed"),
        ),
    ),
)

# --- types: the doors that know one --------------------------------------------------------------

_SCALARS = (
    ValueRule(
        name="strict_scalars",
        statement='Scalars are never converted: "7" is not 7, None is not "None", True is not 1.',
        accepted=(
            Accepted(value=7, type=int),
            Accepted(value="7", type=str),
            Accepted(value=True, type=bool),
            Accepted(value=None, type=type(None)),
            Accepted(value=Cents(7), stored=7, type=Cents),
        ),
        refused=(
            Refused(value="7", type=int, says="expected an int, got '7'"),
            Refused(value=True, type=int, says="expected an int, got True"),
            Refused(value=1.0, type=int, says="expected an int, got 1.0"),
            Refused(value=1, type=bool, says="expected a bool, got 1"),
            Refused(value=None, type=str, says="expected a str, got None"),
            Refused(value="None", type=type(None), says="expected None, got 'None'"),
        ),
        unread=(
            Refused(value="7", type=int, says="expected an int, got '7'"),
            Refused(value=7, type=str, says="expected a str, got 7"),
            Refused(value=True, type=int, says="expected an int, got True"),
            Refused(value=True, type=float, says="expected a float, got True"),
            Refused(value=1.0, type=int, says="expected an int, got 1.0"),
            Refused(value=0, type=bool, says="expected a bool, got 0"),
            Refused(value=None, type=int, says="expected an int, got None"),
            Refused(value="None", type=type(None), says="expected None, got 'None'"),
        ),
    ),
    ValueRule(
        name="one_widening",
        statement="An int for a float is the only widening: it is stored, and read, as the float; "
        "one that no float equals is refused.",
        accepted=(
            Accepted(value=2, stored=2.0, read=2.0, type=float),
            Accepted(value=2.5, type=float),
            Accepted(
                value=[1, None], stored=[1.0, None], read=[1.0, None], type=list[float | None]
            ),
        ),
        refused=(
            Refused(value="2", type=float, says="expected a float, got '2'"),
            Refused(value=lambda: 10**400, type=float, says="expected a float"),
            Refused(value=2**53 + 1, type=float, says="none is exactly this int"),
        ),
        unread=(Refused(value=2**53 + 1, type=float, says="none is exactly this int"),),
    ),
    ValueRule(
        name="moments",
        statement="A `datetime` is aware, and stored in ISO 8601 with its offset; a `date` too; a "
        "`timedelta` is stored in whole microseconds.",
        accepted=(
            Accepted(value=NOON, stored="2026-01-02T12:30:00+00:00", type=datetime),
            Accepted(
                value=datetime(2026, 1, 2, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-5))),
                stored="2026-01-02T01:02:03.000004-05:00",
                type=datetime,
            ),
            Accepted(value=date(2026, 1, 2), stored="2026-01-02", type=date),
            Accepted(value=timedelta(days=-1, microseconds=1), stored=-86399999999, type=timedelta),
        ),
        refused=(
            Refused(value=datetime(2026, 1, 2), type=datetime, says="expected an aware datetime"),
            Refused(value=NOON, type=date, says="expected a date without a time"),
            Refused(value="2026-01-02", type=date, says="expected a date in ISO 8601"),
            Refused(value=60, type=timedelta, says="expected a timedelta, got 60"),
            Refused(value=timedelta.max, type=timedelta, says=_LARGE),
        ),
        unread=(
            Refused(value="2026-01-02T12:30:00", type=datetime, says="an aware datetime"),
            Refused(value="soon", type=datetime, says="ISO 8601"),
            Refused(value=0, type=datetime, says="as a string, got 0"),
            Refused(value=1.5, type=timedelta, says="whole microseconds"),
        ),
    ),
    ValueRule(
        name="texts_for_types",
        statement="`Decimal`, `Path`, `UUID` and `bytes` (in base64) are stored as strings.",
        accepted=(
            Accepted(value=Decimal("1.50"), stored="1.50", type=Decimal),
            Accepted(value=Path("a b/c"), stored="a b/c", type=Path),
            Accepted(
                value=uuid.UUID(int=5),
                stored="00000000-0000-0000-0000-000000000005",
                type=uuid.UUID,
            ),
            Accepted(value=b"ab\xff\0", stored="YWL/AA==", type=bytes),
        ),
        refused=(
            Refused(value=Decimal("NaN"), type=Decimal, says="must be finite"),
            Refused(value=1.5, type=Decimal, says="expected a Decimal, got 1.5"),
            Refused(value="a/b", type=Path, says="expected a path"),
            Refused(value=Path("a\0b"), type=Path, says="no NUL"),
            Refused(value=Path("caf\udce9"), type=Path, says="no lone surrogate"),
            Refused(value="ab", type=bytes, says="expected bytes"),
        ),
        unread=(
            Refused(value="Infinity", type=Decimal, says="must be finite"),
            Refused(value="1,5", type=Decimal, says="expected a Decimal"),
            Refused(value="e A", type=bytes, says="base64"),
            Refused(value="12", type=uuid.UUID, says="a UUID"),
        ),
    ),
    ValueRule(
        name="choices",
        statement="An `Enum` is stored by value where all its values are strings or ints, else by "
        "name; a `Flag` as its number; a `Literal` as its value.",
        accepted=(
            Accepted(value=Colour.RED, stored="red", type=Colour),
            Accepted(value=Word.YES, stored="yes", type=Word),
            Accepted(value=Shape.FLAT, stored="FLAT", type=Shape),
            Accepted(value=Rights.READ | Rights.WRITE, stored=3, type=Rights),
            Accepted(value="b", type=Literal["a", "b", 3]),
            Accepted(value=3, type=Literal["a", "b", 3]),
            Accepted(value=1, type=Literal[1, 2]),
        ),
        refused=(
            Refused(value="red", type=Colour, says="expected a Colour, got 'red'"),
            Refused(value="c", type=Literal["a", "b", 3], says="one of 'a', 'b', 3, got 'c'"),
            Refused(value=True, type=Literal[1, 2], says="expected one of 1, 2, got True"),
        ),
        unread=(
            Refused(value="RED", type=Colour, says="expected a Colour"),
            Refused(value=4, type=Rights, says="Rights refused it"),
            Refused(value=1.0, type=Literal[1], says="expected one of 1, got 1.0"),
        ),
    ),
)

_COMPOUNDS = (
    ValueRule(
        name="containers",
        statement="Lists, tuples, sets and dicts come back as what their annotation says, each "
        "item checked; sets are written in a stable order, keys as strings.",
        accepted=(
            Accepted(value=[1, None], type=list[int | None]),
            Accepted(
                value={"a": (Cash(1),)},
                stored={"a": [{"cents": 1, "note": ""}]},
                type=dict[str, tuple[Cash, ...]],
            ),
            Accepted(value=(1, "a"), stored=[1, "a"], type=tuple[int, str]),
            Accepted(value=(), stored=[], type=tuple[int, ...]),
            Accepted(value={"c", "a"}, stored=["a", "c"], type=set[str]),
            Accepted(value=frozenset([b"x"]), stored=["eA=="], type=frozenset[bytes]),
            Accepted(
                value={Colour.RED: [Decimal(1)]},
                stored={"red": ["1"]},
                type=dict[Colour, list[Decimal]],
            ),
            Accepted(value=[1], stored=[1], read=(1,), type=Sequence[int]),
            Accepted(
                value=view_of({"a": [1]}),
                stored={"a": [1]},
                read={"a": [1]},
                type=dict[str, list[int]],
            ),
        ),
        refused=(
            Refused(value=lambda: ["1"], type=list[int | None], below="[0]", says="an int"),
            Refused(value=(1,), type=tuple[int, str], says="expected a tuple of 2"),
            Refused(value=lambda: [1], type=tuple[int, ...], says="expected a tuple"),
            Refused(
                value=lambda: {"a": (Cash(1), 2)},
                type=dict[str, tuple[Cash, ...]],
                below=".a[1]",
                says="expected a Cash, got 2",
            ),
            Refused(value=lambda: {1: ()}, type=dict[str, tuple[Cash, ...]], says="a str, got 1"),
        ),
        unread=(
            Refused(value=["a", "a"], type=set[str], says="no item twice"),
            Refused(value=[1, 2, 3], type=tuple[int, int], says="expected a list of 2"),
            Refused(value={"green": 1}, type=dict[Colour, int], says="expected a Colour"),
        ),
        untyped=((dict[int, str], "the keys of a dict must be strings, not int"),),
    ),
    ValueRule(
        name="classes",
        statement="Frozen attrs classes and dataclasses are objects of their fields: nested, "
        "generic, recursive. An instance of a subclass is refused.",
        accepted=(
            Accepted(value=Cash(5), stored={"cents": 5, "note": ""}, type=Cash),
            Accepted(
                value=Route((Path("x"),), Card("4242", NOON)),
                stored={
                    "files": ["x"],
                    "paid": {
                        "_type": "card",
                        "number": "4242",
                        "when": "2026-01-02T12:30:00+00:00",
                    },
                },
                type=Route,
            ),
            Accepted(
                value=Tree("a", [Tree("b")]),
                stored={"name": "a", "below": [{"name": "b", "below": []}]},
                type=Tree,
            ),
            Accepted(
                value=Page([Cash(1)], Cash(2)),
                stored={
                    "items": [{"cents": 1, "note": ""}],
                    "first": {"cents": 2, "note": ""},
                },
                type=Page[Cash],
            ),
        ),
        refused=(
            Refused(
                value=lambda: Cash(5, note=None),  # type: ignore[arg-type]
                type=Cash,
                below=".note",
                says="expected a str",
            ),
            Refused(
                value=lambda: Tree("a", [Tree("b\0")]),
                type=Tree,
                below=".below[0].name",
                says="NUL",
            ),
            Refused(
                value=lambda: Page([Cash("5")]),  # type: ignore[arg-type]
                type=Page[Cash],
                below=".items[0].cents",
                says="expected an int, got '5'",
            ),
            Refused(value=lambda: {"cents": 5}, type=Cash, says="expected a Cash"),
        ),
    ),
    ValueRule(
        name="unions",
        statement="The members of a union are told apart by their JSON, classes by `_type`, their "
        "name in snake_case; a type whose members cannot be told apart is refused.",
        accepted=(
            Accepted(value=None, type=int | None),
            Accepted(value=Card("1"), stored={"number": "1", "when": None}, type=Card | None),
            Accepted(
                value=Cash(5), stored={"_type": "cash", "cents": 5, "note": ""}, type=Cash | Card
            ),
            Accepted(value=[1, "1", None, True], type=list[int | str | bool | None]),
            Accepted(value=3, stored=3.0, read=3.0, type=float | str),
            Accepted(value=3, type=float | int),
            Accepted(value="3", type=int | str),
        ),
        refused=(
            Refused(value=1.5, type=int | str, says="expected int or str, got 1.5"),
            Refused(value=Tree("a"), type=Cash | Card, says="expected Cash or Card"),
        ),
        unread=(
            Refused(value={"cents": 1}, type=Cash | Card, says="expected '_type' to be one of"),
            Refused(value={"_type": "cards"}, type=Cash | Card, says="did you mean 'card'?"),
            Refused(value=[1], type=int | str | None, says="expected int or str, got [1]"),
        ),
        untyped=(
            (int | timedelta, "are both stored as a JSON int"),
            (str | datetime, "are both stored as a JSON str"),
            (Cash | dict[str, int], "are both stored as a JSON object"),
        ),
    ),
    ValueRule(
        name="fields",
        statement="A field that is missing takes its default; one without is named in the refusal, "
        "and so is an unknown one. Fields that are no arguments (`init=False`) are computed anew.",
        unread=(
            Refused(value={"note": "x"}, type=Cash, says="Cash lacks the field 'cents'"),
            Refused(value={"cents": 1, "nota": ""}, type=Cash, says="did you mean 'note'?"),
            Refused(value=[], type=Cash, says="expected an object for Cash"),
            Refused(
                value={"name": "a", "below": [{"name": "b", "bellow": []}]},
                type=Tree,
                below=".below[0]",
                says="no field 'bellow'",
            ),
        ),
    ),
    ValueRule(
        name="extension_codecs",
        statement="An extension brings the codecs of further types; a type without one is refused, "
        "in a task's definition when it is installed.",
        accepted=(
            Accepted(value=Fraction(1, 3), stored=[1, 3], type=Fraction),
            Accepted(value={"a": Fraction(2)}, stored={"a": [2, 1]}, type=dict[str, Fraction]),
        ),
        refused=(Refused(value=0.5, type=Fraction, says="expected a Fraction, got 0.5"),),
        unread=(
            Refused(value=[1, 0], type=Fraction, says="Fraction refused it, ZeroDivisionError"),
        ),
        untyped=(
            (complex, "values of complex cannot be stored"),
            (list[complex], "values of complex cannot be stored"),
            (Point, "values of Point cannot be stored"),
            (Fraction | int, "can stand in a union beside None only"),
        ),
    ),
    ValueRule(
        name="any",
        statement="Where the type is `Any`, known values are written by their class, and the JSON "
        "comes back, in containers of the reader's own.",
        accepted=(
            Accepted(value={"a": [1, None]}, type=Any),
            Accepted(
                value=[b"x", NOON.date()],
                stored=["eA==", "2026-01-02"],
                read=["eA==", "2026-01-02"],
                type=Any,
            ),
            Accepted(
                value={"paid": Cash(5)},
                stored={"paid": {"cents": 5, "note": ""}},
                read={"paid": {"cents": 5, "note": ""}},
                type=dict[str, Any],
            ),
        ),
        refused=(
            Refused(
                value=lambda: {"a": [object()]}, type=Any, below=".a[0]", says="cannot be stored"
            ),
            Refused(value=lambda: [datetime(2026, 1, 2)], type=Any, below="[0]", says="aware"),
        ),
    ),
)

DEFAULTS: tuple[tuple[type, JsonValue, Any], ...] = (
    (Cash, {"cents": 1}, Cash(1)),
    (Route, {}, Route()),
    (Tree, {"name": "a"}, Tree("a")),
)
"""Stored JSON without fields that have a default, and what is read."""

VALUE_RULES: tuple[ValueRule, ...] = (*_JSON, *_SCALARS, *_COMPOUNDS)


# --- the doors -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Door:
    """One way in. `typed` doors know the type; the others take strict JSON and nothing else."""

    name: str
    call: str
    path: str
    """How the path of a refusal begins there."""
    levels: int = 0
    """How many levels of the stored value are around what is handed in."""
    typed: bool = False


VALUE_DOORS: tuple[Door, ...] = (
    Door(name="entry", call="tx.append(id, value)", path="$<kind>", typed=True),
    Door(
        name="message",
        call="tx.append(id, messages=)",
        path="$.messages[0].blocks[0].opaque",
        levels=4,
    ),
    Door(
        name="edit",
        call="tx.append(id, edits=)",
        path="$.edits[0].messages[0].blocks[0].opaque",
        levels=6,
    ),
    Door(name="draft", call="tx.document(cls, id)", path="$<name>.value", levels=1, typed=True),
    Door(name="patch", call="tx.patch(cls, id, ops)", path="$<name>[0].value", levels=1),
    Door(name="input", call="create_task(cls, input)", path="$<kind input>", typed=True),
    Door(name="checkpoint", call="ctx.goto(at)", path="$<kind tag>.value", levels=1, typed=True),
    Door(name="result", call="ctx.complete(result)", path="$<kind result>", typed=True),
    Door(
        name="partial",
        call="ctx.fail(error, result=)",
        path="$<kind result>",
        levels=1,
        typed=True,
    ),
    Door(name="detail", call="ctx.fail(error, detail=)", path="$.detail", levels=2),
    Door(name="memo", call="ctx.memo(name, value)", path="$<memo name>"),
    Door(name="signal", call="harness.signal(id, name, value)", path="$<signal name>"),
    Door(
        name="submission", call="conversation.submit(blocks)", path="$.content[0].opaque", levels=5
    ),
    Door(name="write", call="conversation.write(value)", path="$<kind>", levels=4, typed=True),
)
"""The arguments and the results of tools are values too: what is wrong with those goes to the
model, as text, and what it sends is converted where nothing is lost ("3" for an int)."""


def explain_rule(name: str) -> str | None:
    """Return the statement of a rule, or None for an unknown one."""
    return next((rule.statement for rule in VALUE_RULES if rule.name == name), None)
