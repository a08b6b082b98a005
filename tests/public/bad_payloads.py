"""Values that no store, provider or terminal likes: what the tests hand in at every door.

Each payload is made anew for every use, since some are large and some could be changed. `fate` says
what a door that takes any JSON must do: refuse it, or store exactly `expected`. A door may always
be stricter and refuse more; it may never be laxer.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any, Literal

import attrs

KIB = 1024
VALUE_BYTES_MAX = 256 * KIB
"""The setting that the tests use, so that "too large" is quick to make."""


class Number(int):
    """A subclass of int."""


class Text(str):
    """A subclass of str that lies about itself."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Shape(enum.Enum):
    ROUND = object()


class Shy:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@attrs.frozen
class Coin:
    cents: int


@dataclasses.dataclass
class Note:
    cents: int


Point = collections.namedtuple("Point", "x y")


@attrs.frozen
class Payload:
    """One value, and what becomes of it at a door that takes any JSON."""

    name: str
    make: Callable[[], Any]
    fate: Literal["refused", "stored"]
    expected: Any = None
    """The JSON that is stored; None: the value itself."""
    place: str = ""
    """How the path of the refusal ends."""
    encoded: Any = None
    """For a refused one: what a door that knows Python's types stores instead."""

    @property
    def stored(self) -> Any:
        return self.make() if self.expected is None else self.expected


def bad(name: str, make: Callable[[], Any], place: str = "") -> Payload:
    return Payload(name, make, "refused", place=place)


def typed(name: str, make: Callable[[], Any], encoded: Any) -> Payload:
    return Payload(name, make, "refused", encoded=encoded)


def good(name: str, make: Callable[[], Any], expected: Any = None) -> Payload:
    return Payload(name, make, "stored", expected)


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def cyclic_list() -> Any:
    value: list[Any] = [1]
    value.append(value)
    return value


def cyclic_dict() -> Any:
    value: dict[str, Any] = {}
    value["self"] = {"again": value}
    return value


def doubled(times: int) -> Any:
    """A small object in memory, with 2**times leaves when it is written down."""
    value: Any = ["x"]
    for _ in range(times):
        value = [value, value]
    return value


BAD_TEXTS = [
    bad("nul", lambda: "\0"),
    bad("nul at the start", lambda: "\0abc"),
    bad("nul in the middle", lambda: "ab\0c"),
    bad("nul at the end", lambda: "abc\0"),
    bad("lone high surrogate", lambda: "a\ud800"),
    bad("lone low surrogate", lambda: "\udc80b"),
    bad("surrogate pair in halves", lambda: "\ud83d\ude00"),
    bad("undecodable byte of the system", lambda: b"caf\xe9".decode("utf-8", "surrogateescape")),
    bad("text over the limit", lambda: "x" * (VALUE_BYTES_MAX + 1)),
    bad("text over the limit when written", lambda: "\n" * (VALUE_BYTES_MAX // 2 + 1)),
    bad("text over the limit in bytes", lambda: "\u20ac" * (VALUE_BYTES_MAX // 3 + 1)),
]

ODD_TEXTS = [
    good("bidi", lambda: "user\u202e gpj.exe\u2066x\u2069"),
    good("zero width", lambda: "a\u200bb\ufeffc\u2060"),
    good("joined emoji", lambda: "\U0001f469\u200d\U0001f4bb"),
    good("combining", lambda: "e" + "\u0301" * 100),
    good("nonchars", lambda: "\ufffe\uffff\U0010ffff"),
    good("line separators", lambda: "a\r\nb\u2028c\x85d\x0b"),
    good("ansi", lambda: "\x1b[2J\x1b[31mred\x9b0m"),
    good("osc 52", lambda: "\x1b]52;c;cm0gLXJmIC8=\x07"),
    good("sql", lambda: "'; drop table entries; --"),
    good("html", lambda: "<script>alert(1)</script>&amp;"),
    good("format", lambda: "{0.__class__} %s %n ${HOME} {{}}"),
    good("json inside", lambda: '{"a": NaN, "a": 1}'),
    good("escape of a nul", lambda: "\\u0000 \\x00"),
    good("proto", lambda: "__proto__"),
    good("path upwards", lambda: "../../etc/passwd"),
    good("nan as text", lambda: "NaN"),
    good("str enum", lambda: Colour.RED, "red"),
    good("str subclass", lambda: Text("itself"), "itself"),
]

EMPTY_TEXTS = [good("empty text", str), good("blank", lambda: " \t\n")]

BAD_NUMBERS = [
    bad("nan", lambda: float("nan")),
    bad("infinity", lambda: float("inf")),
    bad("minus infinity", lambda: float("-inf")),
    bad("2**64", lambda: 2**64),
    bad("below -2**63", lambda: -(2**63) - 1),
    bad("5,000 digits", lambda: 10**5000),
    bad("complex", lambda: 1j),
    bad("fraction", lambda: fractions.Fraction(1, 3)),
]

ODD_NUMBERS = [
    good("minus zero", lambda: -0.0),
    good("2**63", lambda: 2**63),
    good("2**64 - 1", lambda: 2**64 - 1),
    good("-2**63", lambda: -(2**63)),
    good("largest float", lambda: 1.7976931348623157e308),
    good("smallest float", lambda: 5e-324),
    good("true", lambda: True),
    good("int subclass", lambda: Number(7), 7),
    good("int enum", lambda: Level.HIGH, 3),
    good("minus one", lambda: -1),
    good("zero", lambda: 0),
]

BAD_CONTAINERS = [
    bad("nan below", lambda: {"items": [1, {"when": float("nan")}]}, ".items[1].when"),
    bad("nul below", lambda: [["a", "b\0"]], "[0][1]"),
    bad("surrogate below an odd key", lambda: {"a b": "\ud800"}, '["a b"]'),
    bad("nul key", lambda: {"a": {"k\0": 1}}),
    bad("surrogate key", lambda: {"\udfff": 1}),
    bad("int key", lambda: {"a": {1: 2}}, ".a"),
    bad("none key", lambda: {None: 1}),
    bad("tuple key", lambda: {("a", 1): 1}),
    bad("bytes key", lambda: {b"a": 1}),
    bad("long key", lambda: {"k" * (1 << 20): 1}),
    bad("201 levels", lambda: nested(201)),
    bad("2,000 levels", lambda: nested(2_000)),
    bad("100,000 levels", lambda: nested(100_000)),
    bad("list in itself", cyclic_list),
    bad("dict in itself", cyclic_dict),
    bad("million elements", lambda: [0] * 1_000_000),
    bad("2**100 leaves", lambda: doubled(100)),
    bad("generator", lambda: (n for n in range(3))),
    bad("range", lambda: range(3)),
    bad("mapping proxy", lambda: types.MappingProxyType({"a": 1})),
    bad("memoryview", lambda: memoryview(b"abc")),
    bad("object", object),
    bad("shy object", Shy, ""),
    bad("shy object below", lambda: {"a": [Shy()]}, ".a[0]"),
    bad("class", lambda: int),
    bad("function", lambda: len),
    bad("module", lambda: types),
    bad("exception", lambda: ValueError("x")),
    bad("ellipsis", lambda: ...),
    typed("enum of objects", lambda: Shape.ROUND, "ROUND"),
    typed("dataclass", lambda: Note(5), {"cents": 5}),
]

ODD_CONTAINERS = [
    good("none", lambda: None),
    good("empty key", lambda: {"": 1}),
    good("proto key", lambda: {"__proto__": {"polluted": True}, "constructor": 1}),
    good("class key", lambda: {"__class__": "os.system", "py/object": "x", "$ref": "#"}),
    good("empty list", list),
    good("empty dict", dict),
    good("tuple", lambda: (1, (2, 3)), [1, [2, 3]]),
    good("named tuple", lambda: Point(1, 2), [1, 2]),
    good("200 levels", lambda: nested(150)),
    good("ordered dict", lambda: collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    good("default dict", lambda: collections.defaultdict(list, a=[1]), {"a": [1]}),
    good("enum key", lambda: {Colour.RED: 1}, {"red": 1}),
    good("many keys", lambda: {f"k{n}": n for n in range(5_000)}),
    good("sql key", lambda: {"'; drop table tasks; --": "\x1b[0m"}),
]

FOREIGN = [
    typed("bytes", lambda: b"ab\xff", "YWL/"),
    bad("bytearray", lambda: bytearray(b"ab")),
    typed("set", lambda: {1}, [1]),
    typed("frozen set", lambda: frozenset([1]), [1]),
    bad("naive datetime", lambda: datetime.datetime(2026, 1, 2, 3, 4)),
    typed(
        "aware datetime",
        lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "2026-01-02T00:00:00+00:00",
    ),
    typed("date", lambda: datetime.date(2026, 1, 2), "2026-01-02"),
    typed("time delta", lambda: datetime.timedelta(seconds=1), 1_000_000),
    bad("decimal", lambda: decimal.Decimal("NaN")),
    typed("uuid", lambda: uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    typed("path", lambda: pathlib.PurePosixPath("/a"), "/a"),
    typed("attrs record", lambda: Coin(5), {"cents": 5}),
]
"""What JSON does not have. A door that encodes Python's types takes some; others take none."""

TEXTS = [*BAD_TEXTS, *ODD_TEXTS, *EMPTY_TEXTS]
NUMBERS = [*BAD_NUMBERS, *ODD_NUMBERS]
CONTAINERS = [*BAD_CONTAINERS, *ODD_CONTAINERS]
EVERY = [*TEXTS, *NUMBERS, *CONTAINERS, *FOREIGN]

HEAVY = ("2,000 levels", "100,000 levels", "list in itself", "dict in itself", "million elements")
"""Payloads that take a while everywhere; they go through a few doors of each kind."""

LIGHT = [payload for payload in EVERY if payload.name not in HEAVY]

OTHERS = [
    payload
    for payload in LIGHT
    if payload.name
    in (
        *("nan", "2**64", "5,000 digits", "true", "int subclass", "minus one", "zero", "complex"),
        *("none", "nan below", "201 levels", "2**100 leaves", "generator", "shy object", "class"),
        *("empty list", "empty dict", "tuple", "bytes", "bytearray", "set", "aware datetime"),
        *("attrs record", "path", "memoryview"),
    )
]
"""One of each kind that is no text."""
