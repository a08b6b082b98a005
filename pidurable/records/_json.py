"""Strict JSON: the one encoder and the one decoder of everything that is stored.

What the standard `json` module lets through is refused here, because it does not survive the way
through a file, a database and a provider: NaN and infinities, integers outside -2**63..2**64-1,
lone surrogates, NUL characters, keys that are no strings, duplicate keys, nesting deeper than 200
levels, cycles, and every type that JSON does not have. Holds at all times:

* a text from `dumps` is read back by `loads` as an equal value of the same types;
* a refusal is a `NotJsonError` that names the exact place, whatever the input, and never a
  RecursionError;
* nothing here mutates or keeps what it is given.

The common case must be cheap, so each function has two ways. The quick way uses the C code of the
standard library and one plain walk that only answers yes or no. Only where it says no, a slow
walk looks for the place and the reason; where it finds none (a `StrEnum`, a `TaskId`, an
`OrderedDict`), it has made a plain copy on its way, and the copy is used.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from pidurable.errors import NotJsonError, show
from pidurable.records._limits import MIB, VALUE_DEPTH_MAX
from pidurable.records._messages import JsonValue
from pidurable.records._readonly import JsonArray, JsonObject

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**64 - 1
VALUE_BYTES_MAX = 16 * MIB
_ANY_SIZE = 1 << 62

_STACK_PROBLEM = "the call stack is too deep already for a nested value; pass it from further up"
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_INTEGER_DIGITS_MAX = 20
"""As many as INTEGER_MAX has, or INTEGER_MIN with its sign. Longer ones never fit."""


def dumps(
    value: object,
    *,
    path: str = "$",
    bytes_max: int = VALUE_BYTES_MAX,
    setting: str = "",
    checked: bool = False,
) -> str:
    """Encode a value as compact strict JSON text.

    Keys keep their order and non-ASCII text is kept as it is. Tuples are written as lists;
    subclasses of str, int and float (a `TaskId`, a `StrEnum`) as the plain value.

    Args:
        value: Dicts with string keys, lists, tuples, strings, numbers, booleans and None.
        path: Where the value stands; errors begin with it.
        bytes_max: Most bytes of the text in UTF-8.
        setting: The name of the setting that allows no more, for the message.
        checked: Whether all that `is_plain` asks is known of the parts of the value, since whoever
            made it has seen to it. What remains to be asked is asked of the text, and costs little:
            its strings, its depth and its size.

    Raises:
        NotJsonError: The value has no strict JSON form. Its `path` says where.
    """
    try:
        if not checked and not is_plain(value, bytes_max):
            value = check_json(value, path, size_max=bytes_max, setting=setting)
        text = "".join(_parts(value, 0))
    except RecursionError:
        raise NotJsonError(path, _STACK_PROBLEM) from None
    if text.isascii():
        size = len(text)
    else:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            # It names the place of the surrogate.
            check_json(value, path, size_max=bytes_max, setting=setting)
            raise NotJsonError(path, "the text has a lone surrogate") from error
    if size > bytes_max:
        raise NotJsonError(path, _size_problem(bytes_max, setting), f"{size} bytes")
    # A NUL is always written as this escape. A backslash before "u0000" in the value itself gives
    # the same characters; the walk then finds nothing. Nor does it where brackets are many, and do
    # not stand within each other; those of a level are two characters.
    if "\\u0000" in text or (
        checked
        and size > 2 * VALUE_DEPTH_MAX
        and text.count("[") + text.count("{") > VALUE_DEPTH_MAX
        and not is_plain(value, bytes_max)
    ):
        check_json(value, path, size_max=bytes_max, setting=setting)
    return text


def _make_parts() -> Callable[[object, int], Iterable[str]]:
    """The encoder of the standard library, made once; what it gives is to be joined.

    Its own `encode` makes the C code anew at each call, which takes longer than a small value.
    Where that code is not there, or is made in another way, `encode` is used as it is.
    """
    encoder = json.JSONEncoder(
        ensure_ascii=False,
        allow_nan=False,
        check_circular=False,  # the walk before has bounded the depth, so there is no cycle
        separators=(",", ":"),
    )
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    write_text = json.encoder.encode_basestring
    try:
        parts: Callable[[object, int], Iterable[str]] = make(
            None, encoder.default, write_text, None, ":", ",", False, False, False
        )
    except TypeError:  # also of None, which cannot be called
        return lambda value, _: (encoder.encode(value),)
    return parts


_parts = _make_parts()


def encode_plain(value: object) -> str:
    """Encode what is surely strict JSON: nothing is checked but that numbers are finite."""
    return "".join(_parts(value, 0))


_decode_stored = json.JSONDecoder().raw_decode


def check_json(
    value: object,
    path: str = "$",
    *,
    size_max: int = VALUE_BYTES_MAX,
    setting: str = "",
    convert: Callable[[Any], JsonValue] | None = None,
) -> JsonValue:
    """Check that a value is strict JSON and return a deep, plain copy of it.

    The copy has only dicts, lists, strings, ints, floats, booleans and None, of exactly these
    types, and shares no container with the value.

    Args:
        value: As for `dumps`.
        path: Where the value stands; errors begin with it.
        size_max: Refuse a value whose text would surely be longer, without building it.
        setting: As for `dumps`.
        convert: Called with each value of a type that JSON does not have; what it returns stands
            in its place. None refuses such values.

    Raises:
        NotJsonError: The value has no strict JSON form. Its `path` says where.
    """
    try:
        if _expanded_size(value, 0, {}) > size_max:
            raise _too_large(path, size_max, setting)
        return _Copier(root=path, size_max=size_max, setting=setting, convert=convert).copy(value)
    except RecursionError:
        raise NotJsonError(path, _STACK_PROBLEM) from None


def owned_json(value: object, path: str = "$") -> JsonValue:
    """Check that a value is strict JSON and return a copy of it that shares no container with it.

    As `check_json`, and quicker for what is small: written and read again in C.

    Args:
        value: As for `dumps`.
        path: As for `dumps`.

    Raises:
        NotJsonError: The value has no strict JSON form. Its `path` says where.
    """
    return loads_stored(dumps(value, path=path))


def loads(text: str | bytes, *, path: str = "$") -> JsonValue:
    """Decode JSON text from anywhere, strictly.

    Args:
        text: The text; bytes must be UTF-8.
        path: Where the text stands; errors begin with it.

    Raises:
        NotJsonError: The text is not JSON, or says something that strict JSON cannot.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise NotJsonError(path, f"not UTF-8 at byte {error.start}", show(text)) from error
    try:
        value = _decode(text)
    except RecursionError:
        raise NotJsonError(path, f"nested more than {VALUE_DEPTH_MAX} levels deep") from None
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        problem = f"not JSON, {error.msg[:1].lower()}{error.msg[1:]} at character {error.pos}"
        raise NotJsonError(path, problem, show(near)) from error
    # A NUL or a surrogate comes in by an escape, or a surrogate as itself in a str.
    if not is_plain(value) or "\\u" in text or not _is_unicode(text):
        check_json(value, path, size_max=_ANY_SIZE)
    return value


def loads_stored(text: str) -> JsonValue:
    """Decode text that `dumps` wrote. Nothing is checked again.

    Raises:
        NotJsonError: It is not what `dumps` wrote: the store is damaged.
    """
    try:
        value, end = _decode_stored(text)
        if end == len(text):
            return value
    except (ValueError, TypeError, RecursionError):
        pass  # told below
    try:
        return json.loads(text)  # knows blanks around it, and says what is wrong
    except (ValueError, RecursionError) as error:
        raise NotJsonError("$", f"the stored text is damaged, {error}", show(text)) from error


def loads_canonical(text: str) -> tuple[JsonValue] | None:
    """Decode, into a tuple of one, a text that is surely what `dumps` writes: so it is strict JSON.

    Much quicker than `loads`: decoding and encoding it again in C gives the same text. None says
    nothing: other spellings, and what only looks dubious, are for `loads` to judge.
    """
    if text.count("[") + text.count("{") > VALUE_DEPTH_MAX or "\\u0000" in text:
        return None
    try:
        value: JsonValue = _decode_canonical(text)[0]
        if encode_plain(value) != text:
            return None
        if not text.isascii():
            text.encode()  # a lone surrogate has no bytes
    except (ValueError, RecursionError):
        return None
    return (value,)


def _short_integer(digits: str) -> int:
    """One that surely fits into its range."""
    if len(digits) < _INTEGER_DIGITS_MAX - 1:
        return int(digits)
    raise ValueError(digits)


_decode_canonical = json.JSONDecoder(parse_int=_short_integer).raw_decode


def join_path(path: str, key: str | int) -> str:
    """Name the place below `path`: `$.a`, `$["odd key"]`, `$[3]`."""
    if isinstance(key, str):
        if _PLAIN_KEY.match(key):
            return f"{path}.{key}"
        shown = key if len(key) <= 80 else f"{key[:77]}..."
        return f"{path}[{json.dumps(str(shown))}]"
    return f"{path}[{int(key)}]"


# --- the quick way ----------------------------------------------------------------------------


def is_plain(value: object, size_max: int = _ANY_SIZE, *, tuples: bool = True) -> bool:
    """Tell whether a value surely needs no second look, its strings apart.

    One answer for many questions: exact types only, string keys, integers in range, depth, and
    as each value and character takes a byte at least, no more of them than bytes are allowed.
    Without the last, a list that holds another twice, and so on for 100 levels, would be walked
    until the end of time.

    Args:
        value: Anything.
        size_max: No more bytes are allowed.
        tuples: Whether a tuple may stand for a list, as it does where a value is written.
    """
    kinds = _CONTAINER_KINDS if tuples else _JSON_KINDS
    if type(value) in kinds:
        depth = VALUE_DEPTH_MAX - 1
    elif value is None:
        return True
    else:
        value, depth = (value,), VALUE_DEPTH_MAX
    try:
        if _left_after(value, depth, min(size_max, _FIRST_LOOK_SIZE), kinds) >= 0:
            return True
        if size_max <= _FIRST_LOOK_SIZE or _expanded_size(value, 0, {}) > size_max:
            return False
        return _left_after(value, depth, size_max, kinds) >= 0
    except RecursionError:
        return False  # the second look says why: the call stack of the caller is almost full


_FIRST_LOOK_SIZE = 1 << 18
"""What is larger is measured before it is walked: that costs only what it takes in memory."""


_LEAVES = frozenset([int, float, bool, type(None)])
_CONTAINERS = (dict, list, tuple)
_CONTAINER_KINDS = frozenset(_CONTAINERS)
_JSON_KINDS = frozenset([dict, list])


def _expanded_size(value: Any, depth: int, known: dict[int, int]) -> int:
    """Count the values and characters of what would be written, shared containers every time.

    Each container is looked at once, however often it occurs. What is too deep, or contains
    itself, counts too little here, and is refused by the walk.
    """
    if isinstance(value, str):
        return len(value)
    if depth > VALUE_DEPTH_MAX or not isinstance(value, _CONTAINERS):
        return 0
    found = known.get(id(value))
    if found is not None:
        return found
    known[id(value)] = 0
    size = len(value)
    items: Iterable[Any] = value
    if isinstance(value, dict):
        size += sum(len(key) for key in value if isinstance(key, str))
        items = value.values()
    for item in items:
        if type(item) not in _LEAVES:
            size += _expanded_size(item, depth + 1, known)
    known[id(value)] = size
    return size


def _left_after(value: Any, depth: int, left: int, kinds: frozenset[type]) -> int:
    """Walk a container; return how much may come after it, or less than 0 where that is nothing."""
    left -= len(value)
    if left < 0:
        return -1
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return -1
            left -= len(key)
        value = value.values()
    for item in value:
        kind = type(item)
        if kind is str:
            left -= len(item)
        elif kind is int:
            if not -0x8000000000000000 <= item <= 0xFFFFFFFFFFFFFFFF:
                return -1
        elif kind in kinds:
            left = _left_after(item, depth - 1, left, kinds) if depth > 0 else -1
            if left < 0:
                return -1
        elif kind is float:
            if not -1.7976931348623157e308 <= item <= 1.7976931348623157e308:
                return -1
        elif item is not None and kind is not bool:
            return -1
    return left


@attrs.define(eq=False)
class TooLargeError(NotJsonError):
    """The whole is too large, wherever one looks in it."""


def _too_large(path: str, size_max: int, setting: str) -> NotJsonError:
    return TooLargeError(path, _size_problem(size_max, setting), "a larger value")


def _size_problem(bytes_max: int, setting: str) -> str:
    if not setting and bytes_max == VALUE_BYTES_MAX:
        setting = "value_bytes_max"  # what bounds every value, where nobody has set another one
    named = f" ({setting}; store it in parts or as blobs)" if setting else ""
    return f"at most {bytes_max} bytes are allowed{named}"


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- the slow way -----------------------------------------------------------------------------


@attrs.frozen
class _Unfit:
    """Stands in a decoded value for what has no strict JSON form, so that the walk names it."""

    problem: str
    value: str


@attrs.define(eq=False)
class _Copier:
    """One slow walk. `keys` is the way from the root to the value at hand; it makes the path."""

    root: str
    size_max: int
    setting: str = ""
    convert: Callable[[Any], JsonValue] | None = None
    """Turns a value of a foreign type into JSON, which is then copied in its place."""
    keys: list[str | int] = attrs.Factory(list)
    size: int = 0

    def copy(self, value: object) -> JsonValue:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, int):
            if INTEGER_MIN <= int(value) <= INTEGER_MAX:
                return int(value)
            # Showing one of a million digits is refused by Python itself, and no help.
            shown = show(int(value)) if value.bit_length() < 512 else f"{value.bit_length()} bits"
            raise self._refusal("an integer must be from -2**63 to 2**64-1", shown)
        if isinstance(value, float):
            if math.isfinite(value):
                return float(value)
            raise self._refusal("a number must be finite", show(float(value)))
        if isinstance(value, _CONTAINERS):
            return self._container(value)
        if isinstance(value, JsonObject | JsonArray):
            return self.copy(value.json())  # what a watch has shown
        if isinstance(value, _Unfit):
            raise self._refusal(value.problem, value.value)
        if self.convert is not None:
            convert, self.convert = self.convert, None  # what it returns must be JSON already
            copied = self.copy(convert(value))
            self.convert = convert
            return copied
        raise self._refusal(
            "expected a dict, list, str, int, float, bool or None",
            f"{type(value).__name__} {show(value)}",
        )

    def _container(self, value: Any) -> JsonValue:
        if len(self.keys) >= VALUE_DEPTH_MAX:
            raise self._refusal(
                f"nested more than {VALUE_DEPTH_MAX} levels deep, or it contains itself"
            )
        self._count(len(value))
        keys = self.keys
        if not isinstance(value, dict):
            items: list[JsonValue] = []
            for index, item in enumerate(value):
                keys.append(index)
                items.append(self.copy(item))
                keys.pop()
            return items
        fields: dict[str, JsonValue] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise self._refusal("a key must be a string", show(key))
            keys.append(key)
            plain = self._string(key)
            if plain in fields:
                raise self._refusal("the key occurs twice", show(plain))
            fields[plain] = self.copy(item)
            keys.pop()
        return fields

    def _string(self, value: str) -> str:
        self._count(len(value))
        text = value if type(value) is str else str.__str__(value)
        if "\0" in text:
            raise self._refusal(f"a string must have no NUL, at character {text.index(chr(0))}")
        try:
            if not text.isascii():
                text.encode()
        except UnicodeEncodeError as error:
            raise self._refusal(
                f"a string must have no lone surrogate, at character {error.start}",
                show(text[error.start : error.start + 1]),
            ) from None
        return text

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > self.size_max:
            raise _too_large(self.root, self.size_max, self.setting)

    def _refusal(self, problem: str, value: str = "") -> NotJsonError:
        path = self.root
        for key in self.keys:
            path = join_path(path, key)
        return NotJsonError(path, problem, value)


def _integer(digits: str) -> int | _Unfit:
    # Looking at the length first keeps a million digits from taking quadratic time.
    if len(digits) <= _INTEGER_DIGITS_MAX:
        value = int(digits)
        if INTEGER_MIN <= value <= INTEGER_MAX:
            return value
    return _Unfit("an integer must be from -2**63 to 2**64-1", show(digits, length=40))


def _float(digits: str) -> float | _Unfit:
    value = float(digits)
    if math.isfinite(value):
        return value
    return _Unfit("a number must be finite", show(digits, length=40))


def _constant(name: str) -> _Unfit:
    return _Unfit("a number must be finite", name)


def _fields(pairs: list[tuple[str, Any]]) -> Any:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    keys = [key for key, _ in pairs]
    twice = next(key for key, count in Counter(keys).items() if count > 1)
    return _Unfit("an object must have no duplicate key", show(twice))


_decode = json.JSONDecoder(
    object_pairs_hook=_fields, parse_int=_integer, parse_float=_float, parse_constant=_constant
).decode
