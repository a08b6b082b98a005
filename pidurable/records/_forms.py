"""Forms: how the values of one Python type look as strict JSON, in both directions.

A form knows how to encode and decode, which kinds of JSON its values have (so that a union can tell
its members apart when reading), and the parts of a value (so that an error can be traced to its
place after the quick way has failed). This module has the forms of everything but classes with
fields; those are built in `_codec`. Holds for every form:

* what `encode` accepts, `decode` reads back as an equal value of the same type;
* scalars are never converted: "7" is not 7, None is not "None", True is not 1. The one widening
  is an int for a float;
* both raise `Refused` for what does not fit, without a place; `_codec` adds it.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any, TypeAlias
from uuid import UUID

import attrs

from pidurable.records._json import INTEGER_MAX, INTEGER_MIN, check_json, is_plain
from pidurable.records._messages import JsonValue
from pidurable.records._readonly import JsonObject

Encode: TypeAlias = Callable[[Any], JsonValue]
Decode: TypeAlias = Callable[[Any, Any], Any]
"""The second argument is the type; it is there for cattrs, which calls these, and not read."""
Parts: TypeAlias = Callable[[Any, bool], Iterable[tuple["str | int | None", Any, Any]]]
"""(value, decoding) to (key, part, type of the part); the key None means the same place."""

TAG = "_type"
_OBJECTS = (dict, JsonObject)


class Refused(ValueError):
    """A value does not fit its form. Never leaves the codec: it becomes a `NotJsonError`."""

    def __init__(self, problem: str, value: object = None, *, shown: bool = True) -> None:
        super().__init__(problem)
        self.problem = problem
        self.value = value
        self.shown = shown


class Unsupported(TypeError):
    """A type has no form. `place` is the way to it, outermost first."""

    def __init__(self, problem: str, place: Sequence[str] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = tuple(place)


def no_parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
    """Return the parts of a scalar."""
    return ()


@attrs.frozen(eq=False, kw_only=True)
class Form:
    """One type's way into JSON and back."""

    encode: Encode
    decode: Decode
    kinds: frozenset[str] | None
    """Of null, bool, int, float, str, list, object; None is any of them."""
    python: tuple[type, ...] = ()
    """The classes whose instances `encode` takes; a union chooses its member by them."""
    tag: str | None = None
    """For a class with fields: its name as a member of a union."""
    parts: Parts = no_parts
    plain: bool = False
    """Whether each part of what `encode` gives is plain JSON by its making: of exact types, with
    numbers in range. There are no more parts than the type itself says, so they cannot be one and
    the same a million times. Strings, depth and size are still to be looked at."""


def kind_of(value: JsonValue) -> str:
    """Name the kind of a JSON value."""
    return _KINDS.get(type(value), "unknown")


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "list",
    dict: "object",
}


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a hint at the known name most like `name`, or nothing."""
    matches = get_close_matches(str(name), list(known), n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""


# --- scalars ----------------------------------------------------------------------------------


def _scalar(kind: str, python: type, expected: str) -> Form:
    def encode(value: Any) -> JsonValue:
        if type(value) is python:
            return value
        raise Refused(f"expected {expected}", value)

    def decode(value: Any, _: Any) -> Any:
        if type(value) is python:
            return value
        raise Refused(f"expected {expected}", value)

    return Form(encode=encode, decode=decode, kinds=frozenset([kind]), python=(python,), plain=True)


def _encode_int(value: Any) -> JsonValue:
    if type(value) is int and INTEGER_MIN <= value <= INTEGER_MAX:
        return value
    if isinstance(value, int) and type(value) is not bool:
        return check_json(value)  # the plain int of a subclass; says what range there is
    raise Refused("expected an int", value)


def _encode_str(value: Any) -> JsonValue:
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a StrEnum or another subclass: the characters alone
    raise Refused("expected a str", value)


def _encode_float(value: Any) -> JsonValue:
    if type(value) is float:
        return value if math.isfinite(value) else check_json(value)  # which says what is wrong
    if isinstance(value, float | int) and type(value) is not bool:
        return check_json(_widened(value))
    raise Refused("expected a float", value)


def _decode_float(value: Any, _: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return _widened(value)
    raise Refused("expected a float", value)


def _widened(value: float) -> float:
    try:
        widened = float(value)
    except OverflowError:
        raise Refused("expected a float", value, shown=False) from None
    if widened != value:
        raise Refused("expected a float, and none is exactly this int", value)
    return widened


def scalar_subclass_form(cls: type, base: Form) -> Form:
    """Return the form of a subclass of str, int or float: stored plainly, read as the subclass."""

    def decode(value: Any, _: Any) -> Any:
        return cls(base.decode(value, None))

    def encode(value: Any) -> JsonValue:
        return base.encode(value)

    return Form(
        encode=encode, decode=decode, kinds=base.kinds, python=base.python, plain=base.plain
    )


def _text_form(
    python: type, expected: str, encode_text: Callable[[Any], str], parse: Callable[[str], Any]
) -> Form:
    """Return the form of a class whose values are stored as strings."""

    def encode(value: Any) -> JsonValue:
        if isinstance(value, python):
            return encode_text(value)
        raise Refused(f"expected {expected}", value)

    def decode(value: Any, _: Any) -> Any:
        if type(value) is not str:
            raise Refused(f"expected {expected} as a string", value)
        try:
            return parse(value)
        except Refused:
            raise
        except (ValueError, InvalidOperation, OverflowError) as error:
            raise Refused(f"expected {expected} as a string", value) from error

    return Form(encode=encode, decode=decode, kinds=frozenset(["str"]), python=(python,))


def _aware(value: datetime) -> datetime:
    if value.utcoffset() is None:
        raise Refused("expected an aware datetime; give it a time zone, as in tz=UTC", value)
    return value


def _plain_date(value: Any) -> str:
    if isinstance(value, datetime):
        raise Refused("expected a date without a time", value)
    return str(value.isoformat())


def _finite(value: Decimal) -> Decimal:
    if not value.is_finite():
        raise Refused("a number must be finite", value)
    return value


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Refused("expected bytes in base64", text) from error


def _path_form(python: type[PurePath]) -> Form:
    return _text_form(python, "a path", str, python)


_MICROSECOND = timedelta(microseconds=1)


def _encode_timedelta(value: Any) -> JsonValue:
    if isinstance(value, timedelta):
        return value // _MICROSECOND
    raise Refused("expected a timedelta", value)


def _decode_timedelta(value: Any, _: Any) -> timedelta:
    if type(value) is not int:
        raise Refused("expected a timedelta in whole microseconds", value)
    return timedelta(microseconds=value)


BASIC: dict[Any, Form] = {
    type(None): _scalar("null", type(None), "None"),
    bool: _scalar("bool", bool, "a bool"),
    int: attrs.evolve(_scalar("int", int, "an int"), encode=_encode_int),
    str: attrs.evolve(_scalar("str", str, "a str"), encode=_encode_str),
    float: attrs.evolve(
        _scalar("float", float, "a float"), encode=_encode_float, decode=_decode_float
    ),
    # The offset is kept, the name of a time zone is not: what is read back is the same moment.
    datetime: _text_form(
        datetime,
        "an aware datetime in ISO 8601",
        lambda value: _aware(value).isoformat(),
        lambda text: _aware(datetime.fromisoformat(text)),
    ),
    date: _text_form(date, "a date in ISO 8601", _plain_date, date.fromisoformat),
    timedelta: Form(
        encode=_encode_timedelta,
        decode=_decode_timedelta,
        kinds=frozenset(["int"]),
        python=(timedelta,),
    ),
    Decimal: _text_form(
        Decimal, "a Decimal", lambda value: str(_finite(value)), lambda text: _finite(Decimal(text))
    ),
    UUID: _text_form(UUID, "a UUID", str, UUID),
    bytes: _text_form(
        bytes, "bytes in base64", lambda value: base64.b64encode(value).decode(), _from_base64
    ),
    Path: _path_form(Path),
    PurePath: _path_form(PurePath),
    type(Path()): _path_form(type(Path())),
    type(PurePath()): _path_form(type(PurePath())),
}
BASIC[None] = BASIC[type(None)]


# --- choices ----------------------------------------------------------------------------------


def enum_form(cls: type[enum.Enum]) -> Form:
    """Return the form of an Enum: by value where all values are strings or ints, else by name."""
    members = list(cls.__members__.values())
    by_value = all(
        isinstance(member.value, str | int) and type(member.value) is not bool for member in members
    )
    pairs = [
        (_encode_str(member.value) if isinstance(member.value, str) else int(member.value), member)
        if by_value
        else (member.name, member)
        for member in members
    ]
    if issubclass(cls, enum.Flag):

        def encode_flag(value: Any) -> JsonValue:
            if isinstance(value, cls):
                return value.value
            raise Refused(f"expected a {cls.__name__}", value)

        def decode_flag(value: Any, _: Any) -> Any:
            return cls(BASIC[int].decode(value, None))

        kinds = frozenset(["int"])
        return Form(encode=encode_flag, decode=decode_flag, kinds=kinds, python=(cls,))
    return _choice(pairs, f"a {cls.__name__}", cls)


def literal_form(values: tuple[Any, ...]) -> Form:
    """Return the form of a Literal."""
    pairs = [
        (enum_form(type(value)).encode(value) if isinstance(value, enum.Enum) else value, value)
        for value in values
    ]
    for json, value in pairs:
        if kind_of(json) == "unknown":
            raise Unsupported(f"the literal {value!r} has no form in JSON")
    return _choice(pairs, f"one of {', '.join(repr(value) for value in values)}", None)


def _choice(pairs: list[tuple[JsonValue, Any]], expected: str, cls: type | None) -> Form:
    # The type is a part of the key, as 1 == True == 1.0.
    members = {(type(json), json): member for json, member in pairs}
    jsons = {(type(member), member): json for json, member in pairs}

    def encode(value: Any) -> JsonValue:
        try:
            return jsons[type(value), value]
        except (KeyError, TypeError):
            raise Refused(f"expected {expected}", value) from None

    def decode(value: Any, _: Any) -> Any:
        try:
            return members[type(value), value]
        except (KeyError, TypeError):
            known = [json for json, _ in pairs if isinstance(json, str)]
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise Refused(f"expected {expected}{hint}", value) from None

    python = (cls,) if cls else tuple({type(member) for _, member in pairs})
    jsons_known = [json for json, _ in pairs]
    return Form(
        encode=encode,
        decode=decode,
        kinds=frozenset(map(kind_of, jsons_known)),
        python=python,
        plain=is_plain(jsons_known),
    )


# --- containers -------------------------------------------------------------------------------


def list_form(
    item: Form, item_type: Any, make: Callable[[Iterable[Any]], Any], python: Any
) -> Form:
    """Return the form of a list, or of a tuple of any length: a JSON list."""
    encode_item, decode_item = item.encode, item.decode

    def encode(value: Any) -> JsonValue:
        if isinstance(value, python):
            return [encode_item(each) for each in value]
        raise Refused(f"expected a {make.__name__}", value)

    def decode(value: Any, _: Any) -> Any:
        if type(value) is not list:
            raise Refused("expected a list", value)
        decoded = [decode_item(each, item_type) for each in value]
        return decoded if make is list else make(decoded)

    def parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
        if isinstance(value, list if decoding else python):
            return [(index, each, item_type) for index, each in enumerate(value)]
        return ()

    kinds = frozenset(["list"])
    return Form(encode=encode, decode=decode, kinds=kinds, python=python, parts=parts)


def set_form(
    item: Form, item_type: Any, make: Callable[[Iterable[Any]], Any], order: Callable[[Any], str]
) -> Form:
    """Return the form of a set: a JSON list in the order of `order`, so that it is stable."""
    listed = list_form(item, item_type, make, (set, frozenset))

    def encode(value: Any) -> JsonValue:
        return sorted(listed.encode(value), key=order)

    def decode(value: Any, _: Any) -> Any:
        decoded = listed.decode(value, None)
        if len(decoded) != len(value):
            raise Refused("a set must have no item twice", value)
        return decoded

    return attrs.evolve(listed, encode=encode, decode=decode)


def tuple_form(items: list[Form], item_types: tuple[Any, ...]) -> Form:
    """Return the form of a tuple with one type for each place."""
    encoders = [item.encode for item in items]
    decoders = [item.decode for item in items]
    length = len(items)

    def encode(value: Any) -> JsonValue:
        if isinstance(value, tuple) and len(value) == length:
            return [encode_item(each) for encode_item, each in zip(encoders, value, strict=True)]
        raise Refused(f"expected a tuple of {length}", value)

    def decode(value: Any, _: Any) -> Any:
        if type(value) is not list or len(value) != length:
            raise Refused(f"expected a list of {length}", value)
        return tuple(
            decode_item(each, None) for decode_item, each in zip(decoders, value, strict=True)
        )

    def parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
        if isinstance(value, list if decoding else tuple) and len(value) == length:
            return [(index, value[index], item_types[index]) for index in range(length)]
        return ()

    kinds, plain = frozenset(["list"]), all(item.plain for item in items)
    return Form(
        encode=encode, decode=decode, kinds=kinds, python=(tuple,), parts=parts, plain=plain
    )


def dict_form(key: Form, key_type: Any, item: Form, item_type: Any) -> Form:
    """Return the form of a dict, whose keys must be strings in JSON."""
    if key.kinds != frozenset(["str"]):
        raise Unsupported(f"the keys of a dict must be strings, not {type_name(key_type)}")
    encode_key, decode_key = key.encode, key.decode
    encode_item, decode_item = item.encode, item.decode

    def encode(value: Any) -> JsonValue:
        if isinstance(value, _OBJECTS):
            return {encode_key(name): encode_item(each) for name, each in value.items()}
        raise Refused("expected a dict", value)

    def decode(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise Refused("expected an object", value)
        return {
            decode_key(name, key_type): decode_item(each, item_type) for name, each in value.items()
        }

    def parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
        if isinstance(value, _OBJECTS):
            for name, each in value.items():
                yield (None, name, key_type)
                if isinstance(name, str):
                    yield (name, each, item_type)

    kinds = frozenset(["object"])
    return Form(encode=encode, decode=decode, kinds=kinds, python=_OBJECTS, parts=parts)


# --- unions -----------------------------------------------------------------------------------


def optional_form(inner: Form, inner_type: Any) -> Form:
    """Return the form of `X | None`."""
    encode_inner, decode_inner = inner.encode, inner.decode

    def encode(value: Any) -> JsonValue:
        return None if value is None else encode_inner(value)

    def decode(value: Any, _: Any) -> Any:
        return None if value is None else decode_inner(value, inner_type)

    def parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
        return () if value is None else [(None, value, inner_type)]

    return Form(
        encode=encode,
        decode=decode,
        kinds=None if inner.kinds is None else inner.kinds | {"null"},
        python=(*inner.python, type(None)),
        parts=parts,
        plain=inner.plain,
    )


def union_form(members: list[tuple[Any, Form]]) -> Form:
    """Return the form of a union of two or more types beside None.

    Classes with fields get a tag, the class name in snake_case; the others are told apart by their
    kind of JSON, so two of one kind are refused.
    """
    by_kind, by_tag = _sort_members(members)
    by_class: dict[type, tuple[Any, Form]] = {}
    for member_type, form in members:
        for cls in form.python:
            by_class.setdefault(cls, (member_type, form))
    if float in by_class:
        by_class.setdefault(int, by_class[float])
    expected = " or ".join(type_name(member_type) for member_type, _ in members)

    def choose(value: Any, decoding: bool) -> tuple[Any, Form, Any]:
        """Return the type and form of the member that a value belongs to, and the bare value."""
        chosen: tuple[Any, Form] | None
        if not decoding:
            chosen = by_class.get(type(value)) or next(
                (found for cls, found in by_class.items() if isinstance(value, cls)), None
            )
        elif by_tag and type(value) is dict:
            bare = dict(value)
            tag = bare.pop(TAG, None)
            if type(tag) is not str or tag not in by_tag:
                problem = f"expected {TAG!r} to be one of {', '.join(map(repr, by_tag))}"
                raise Refused(problem + nearest(tag, by_tag), tag)
            return (*by_tag[tag], bare)
        else:
            chosen = by_kind.get(kind_of(value))
        if chosen is None:
            raise Refused(f"expected {expected}", value)
        return (*chosen, value)

    def encode(value: Any) -> JsonValue:
        _, form, bare = choose(value, False)
        json = form.encode(bare)
        return json if form.tag is None else {TAG: form.tag, **json}

    def decode(value: Any, _: Any) -> Any:
        member_type, form, bare = choose(value, True)
        return form.decode(bare, member_type)

    def parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
        try:
            member_type, _, bare = choose(value, decoding)
        except Refused:
            return ()
        return [(None, bare, member_type)]

    return Form(
        encode=encode,
        decode=decode,
        kinds=frozenset(by_kind) | (frozenset(["object"]) if by_tag else frozenset()),
        python=tuple(by_class),
        parts=parts,
        plain=all(form.plain for _, form in members),
    )


def _sort_members(
    members: list[tuple[Any, Form]],
) -> tuple[dict[str, tuple[Any, Form]], dict[str, tuple[Any, Form]]]:
    by_kind: dict[str, tuple[Any, Form]] = {}
    by_tag: dict[str, tuple[Any, Form]] = {}
    taken: dict[str, Any] = {}
    for member_type, form in members:
        if form.kinds is None:
            raise Unsupported(
                f"{type_name(member_type)} can stand in a union beside None only, since its JSON "
                "cannot be told from that of another type; put it into a class of its own"
            )
        if form.tag is not None:
            if form.tag in by_tag:
                raise Unsupported(f"two classes of the union have the tag {form.tag!r}; rename one")
            by_tag[form.tag] = (member_type, form)
        for kind in form.kinds:
            rival = taken.setdefault(kind, form)
            if rival is not form and (form.tag is None or rival.tag is None):
                name = type_name(next(each for each, found in members if found is rival))
                raise Unsupported(
                    f"{name} and {type_name(member_type)} are both stored as a JSON {kind} and "
                    "could not be told apart; put one into a class of its own"
                )
            if form.tag is None:
                by_kind[kind] = (member_type, form)
    if "float" in by_kind:
        by_kind.setdefault("int", by_kind["float"])
    return by_kind, by_tag


def type_name(type_: Any) -> str:
    """Name a type as people write it."""
    if type_ is None or type_ is type(None):
        return "None"
    if isinstance(type_, type) and not getattr(type_, "__args__", ()):
        return type_.__name__
    return str(type_).replace("typing.", "")


_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake_case(name: str) -> str:
    """Return a class name as a tag: `Charge` is charge, `HTTPCall` http_call, `Step2` step2."""
    return _WORD_START.sub("_", name).lower()
