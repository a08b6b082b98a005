"""The codec: Python values to strict JSON and back, by their types.

One `Codec` belongs to one registry snapshot and holds one prebuilt form for each type it has met
(see `_forms`). Classes with fields, attrs or dataclass, are read and written by functions that
cattrs generates; this is the only module that names cattrs. Holds at all times:

* what `encode` lets through, `decode` reads back as an equal value, or `check_type` has refused
  the type before;
* decoding never guesses: a missing field without default, an unknown key, a scalar of another type
  is a `NotJsonError` that names the place, never a None in its stead;
* nothing that is stored names a class to import: a tag chooses among the members of a union only.

The quick way knows no places. Where it fails, the value is walked part by part with the same
forms, down to the smallest part that fails by itself; that is the place.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar, Union

import attrs
import cattrs
import typing_extensions
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from pidurable.errors import NotJsonError, show
from pidurable.records._forms import (
    BASIC,
    TAG,
    Decode,
    Encode,
    Form,
    Refused,
    Unsupported,
    dict_form,
    enum_form,
    list_form,
    literal_form,
    nearest,
    no_parts,
    optional_form,
    scalar_subclass_form,
    set_form,
    snake_case as snake_case,
    tuple_form,
    type_name,
    union_form,
)
from pidurable.records._json import (
    VALUE_BYTES_MAX,
    TooLargeError,
    check_json,
    dumps,
    is_plain,
    join_path,
)
from pidurable.records._limits import VALUE_DEPTH_MAX
from pidurable.records._messages import JsonValue
from pidurable.records._plain import (
    as_read as as_read,
    completed_text as completed_text,
    decode_blocks as decode_blocks,
    decode_edits as decode_edits,
    decode_error as decode_error,
    decode_messages as decode_messages,
    decode_outcome as decode_outcome,
    decode_usage as decode_usage,
    decode_wait as decode_wait,
    encode_blocks as encode_blocks,
    encode_edits as encode_edits,
    encode_error as encode_error,
    encode_messages as encode_messages,
    encode_outcome as encode_outcome,
    encode_usage as encode_usage,
    encode_wait as encode_wait,
)
from pidurable.records._readonly import JsonArray, JsonObject, copied_json

Extra = Mapping[type, tuple[Callable[[Any], JsonValue], Callable[[JsonValue], Any]]]
"""For a type that the codec does not know: how to encode it, and how to decode it."""


@attrs.define(eq=False, init=False)
class Codec:
    """Encode and decode values by their types.

    Known without help: None, bool, int, float, str and their subclasses, Enum, Literal, attrs
    classes and dataclasses, list, tuple, set, dict with string keys, datetime (aware), date,
    timedelta, Decimal, Path, UUID and bytes, nested in any way, and unions of them whose members
    can be told apart.
    """

    _extra: Extra
    _forms: dict[Any, Form]
    _converter: _Converter
    _any_bytes_max: int
    """Most bytes of a value under Any: as much as was ever allowed for what it is a part of.

    The whole is measured where it is written. This keeps one whose parts are shared, and which
    would take for ever to write, from getting there.
    """
    decoder: Callable[..., Any]
    """`decode`, bound once: every entry that is kept in memory holds it."""

    def __init__(self, extra: Extra | None = None) -> None:
        self._extra = dict(extra or {})
        self._forms = {}
        self._converter = _Converter(self.form)
        self._any_bytes_max = VALUE_BYTES_MAX
        self.decoder = self.decode

    def encode(self, value: Any, type_: Any = None, *, path: str = "$") -> JsonValue:
        """Return the value as strict JSON that shares nothing with it.

        Args:
            value: What to encode.
            type_: Its type as annotated, where that says more than its class: a union gives its
                members a tag. None takes the class of the value.
            path: Where the value stands; errors begin with it.

        Raises:
            NotJsonError: The value does not fit the type, or has no form in JSON.
        """
        encoded, _ = self._encode(value, type_, path)
        return check_json(encoded, path)

    def encode_text(
        self,
        value: Any,
        type_: Any = None,
        *,
        path: str = "$",
        bytes_max: int = VALUE_BYTES_MAX,
        setting: str = "",
    ) -> str:
        """Encode a value and write it as text; `encode` and `dumps` in one, and faster.

        Args:
            value: As for `encode`.
            type_: As for `encode`.
            path: As for `encode`.
            bytes_max: Most bytes of the text in UTF-8.
            setting: The name of the setting that allows no more, for the message.

        Raises:
            NotJsonError: The value does not fit the type, has no form in JSON, or is too large.
        """
        if bytes_max > self._any_bytes_max:
            self._any_bytes_max = bytes_max
        encoded, checked = self._encode(value, type_, path)
        return dumps(encoded, path=path, bytes_max=bytes_max, setting=setting, checked=checked)

    def decode(self, json: JsonValue, type_: Any, *, path: str = "$") -> Any:
        """Read a value of the type from JSON, strictly.

        The result shares no container with `json`: parts whose type is Any are copied, so that
        whoever changes what was decoded does not change what is stored.

        Args:
            json: Strict JSON, as from `loads`.
            type_: Any type that `check_type` accepts.
            path: Where the JSON stands; errors begin with it.

        Raises:
            NotJsonError: The JSON does not fit the type; the path goes down to the bad value.
        """
        form = self._get_form(type_, path)
        try:
            return form.decode(json, type_)
        except Exception as error:
            raise self._locate(error, json, type_, path, decoding=True) from error

    def check_type(self, type_: Any, *, what: str) -> None:
        """Check that values of a type can be encoded and decoded.

        Args:
            type_: A type, as annotated.
            what: What is of this type; the path of the error begins with it.

        Raises:
            NotJsonError: The type, or a part of it that the path names, has no form in JSON.
        """
        self._get_form(type_, what)

    def form(self, type_: Any) -> Form:
        """Return the form of a type, building it at the first call.

        Raises:
            Unsupported: The type has no form.
        """
        try:
            form = self._forms.get(type_)
        except TypeError:  # metadata of an Annotated may have no hash
            return self._build(type_)
        if form is None:
            form = self._forms[type_] = self._build(type_)
        return form

    # --- running -------------------------------------------------------------------------------

    def _encode(self, value: Any, type_: Any, path: str) -> tuple[JsonValue, bool]:
        """Return the value as JSON, and whether it is plain by its making; see `Form.plain`."""
        if type_ is None:
            type_ = type(value)
            # Whatever has a form is no plain container; that spares the question the second time.
            if type_ in _PLAIN_TYPES or (
                type_ not in self._forms and self._is_plain_subclass(type_)
            ):
                type_ = Any
        form = self._get_form(type_, path)
        try:
            return form.encode(value), form.plain
        except Exception as error:
            raise self._locate(error, value, type_, path, decoding=False) from error

    def _is_plain_subclass(self, cls: type) -> bool:
        """Tell whether a class is a container that is written as the plain one: a named tuple."""
        if not issubclass(cls, dict | list | tuple | JsonObject | JsonArray):
            return False
        try:
            self.form(cls)
        except Unsupported:
            return True
        return False  # of an extension's codec, or with fields of its own

    def _get_form(self, type_: Any, path: str) -> Form:
        try:
            return self._forms[type_]
        except (KeyError, TypeError):
            pass  # it is met for the first time, or has no hash
        try:
            return self.form(type_)
        except Unsupported as error:
            raise NotJsonError(path + "".join(error.place), error.problem) from error

    def _locate(
        self, error: Exception, value: Any, type_: Any, path: str, *, decoding: bool
    ) -> NotJsonError:
        """Find the smallest part that fails by itself, and say what is wrong with it there."""
        depth = 0
        while depth <= VALUE_DEPTH_MAX:
            if isinstance(error, NotJsonError) and type_ in (Any, object):
                if isinstance(error, TooLargeError):
                    break  # looking for a part that is too large by itself would take long
                found = self._not_json(value, path)
                if found is not None:
                    return found
            # A value inside an Any may be of a class that has no form; it has no parts either.
            parts = no_parts if isinstance(error, Unsupported) else self.form(type_).parts
            for key, part, part_type in parts(value, decoding):
                try:
                    form = self.form(part_type)
                    form.decode(part, part_type) if decoding else form.encode(part)
                except Exception as part_error:
                    error, value, type_ = part_error, part, part_type
                    if key is not None:
                        path = join_path(path, key)
                        depth += 1
                    break
            else:
                break
        if isinstance(error, Refused):
            return NotJsonError(path, error.problem, show(error.value) if error.shown else "")
        if isinstance(error, Unsupported):
            return NotJsonError(path, error.problem, show(value))
        if isinstance(error, NotJsonError):
            return NotJsonError(path, error.problem, error.value)
        if isinstance(error, RecursionError):
            return NotJsonError(
                path, f"nested more than {VALUE_DEPTH_MAX} levels deep, or it contains itself"
            )
        problem = f"{type_name(type_)} refused it, {type(error).__name__}: {error}"
        return NotJsonError(path, problem, show(value))

    def _not_json(self, value: Any, path: str) -> NotJsonError | None:
        """Return what in a value is not strict JSON once it is written, with its whole path.

        Depth counts from the top, and a text is looked at only when it is written: part by part
        they would be found elsewhere, or nowhere. A part that cannot be written counts as None.
        """

        def convert(part: Any) -> JsonValue:
            try:
                return self.form(type(part)).encode(part)
            except Exception:  # whatever it is, the search by parts finds it
                return None

        try:
            check_json(value, path, convert=convert)
        except NotJsonError as error:
            return error
        return None

    # --- building ------------------------------------------------------------------------------

    def _build(self, type_: Any) -> Form:
        type_ = _bare(type_)
        if type_ in (Any, object):
            return self._any_form()
        if type_ in self._extra:
            return _extra_form(type_, *self._extra[type_])
        if type_ in BASIC:
            return BASIC[type_]
        origin = typing.get_origin(type_) or type_
        args = typing.get_args(type_)
        if origin is Literal:
            return literal_form(args)
        if origin in (Union, types.UnionType):
            return self._union_form(args)
        if isinstance(origin, type):
            if issubclass(origin, enum.Enum):
                return enum_form(origin)
            if attrs.has(origin) or dataclasses.is_dataclass(origin):
                parameters = _parameters(type_)
                if parameters and not args:
                    return self.form(type_[(Any,) * len(parameters)])
                return self._class_form(type_, origin)
            for base in (str, int, float):
                if issubclass(origin, base):
                    return scalar_subclass_form(origin, BASIC[base])
            if origin in _LISTS:
                return self._container_form(origin, args)
        raise Unsupported(_why_not(type_))

    def _part(self, place: str, type_: Any) -> Form:
        try:
            return self.form(type_)
        except Unsupported as error:
            raise Unsupported(error.problem, (place, *error.place)) from error

    def _container_form(self, origin: type, args: tuple[Any, ...]) -> Form:
        make, python = _LISTS[origin]
        if make is dict:
            key_type, item_type = args or (str, Any)
            key = self._part("[key]", key_type)
            return dict_form(key, key_type, self._part("[]", item_type), item_type)
        if make is tuple and origin is tuple and args[1:] != (Ellipsis,) and args:
            items = [self._part(f"[{index}]", each) for index, each in enumerate(args)]
            return tuple_form(items, args)
        item_type = args[0] if args else Any
        item = self._part("[]", item_type)
        if make in (set, frozenset):
            return set_form(item, item_type, make, dumps)
        return list_form(item, item_type, make, python)

    def _union_form(self, args: tuple[Any, ...]) -> Form:
        flat = list(_flatten(args))
        if Any in flat or object in flat:
            return self.form(Any)
        members = [each for each in flat if each is not type(None)]
        if len(members) == 1:
            inner = optional_form(self.form(members[0]), members[0])
        else:
            union = union_form([(each, self.form(each)) for each in members])
            if len(members) == len(flat):
                return union
            inner = optional_form(union, Union[tuple(members)])  # noqa: UP007  (built at run time)
        return inner

    def _any_form(self) -> Form:
        def convert(value: Any) -> JsonValue:
            if type(value) is object:  # as a type it means anything: this very form
                raise Refused(_why_not(object), value)
            try:
                form = self.form(type(value))
            except Unsupported as error:
                raise Refused(error.problem, value) from error
            return form.encode(value)

        def encode(value: Any) -> JsonValue:
            most = self._any_bytes_max
            if is_plain(value, most):
                return value
            return check_json(value, size_max=most, setting="value_bytes_max", convert=convert)

        def decode(value: Any, _: Any) -> Any:
            return copied_json(value)

        def parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
            if isinstance(value, dict):
                return [(key, each, Any) for key, each in value.items() if isinstance(key, str)]
            if isinstance(value, list | tuple):
                return [(index, each, Any) for index, each in enumerate(value)]
            if decoding or type(value) is object or is_plain_type(type(value)):
                return ()
            return [(None, value, type(value))]

        return Form(encode=encode, decode=decode, kinds=None, parts=parts, plain=True)

    def _class_form(self, type_: Any, cls: type) -> Form:
        fields = _fields(type_, cls)
        tag = snake_case(cls.__name__)
        write: list[Encode] = []
        read: list[Decode] = []

        def encode(value: Any) -> JsonValue:
            if value.__class__ is not cls:
                raise Refused(f"expected a {cls.__name__}", value)
            return write[0](value)

        def decode(value: Any, _: Any) -> Any:
            if value.__class__ is not dict:
                raise Refused(f"expected an object for {cls.__name__}", value)
            try:
                return read[0](value, cls)
            except (KeyError, ForbiddenExtraKeysError) as error:
                problem = _keys_problem(value, fields)
                if problem is None:
                    raise
                raise Refused(f"{cls.__name__} {problem}", value, shown=False) from error

        def parts(value: Any, decoding: bool) -> Iterable[tuple[str | int | None, Any, Any]]:
            if decoding and type(value) is dict:
                return [
                    (name, value[name], field_type)
                    for name, (field_type, _) in fields.items()
                    if name in value
                ]
            if not decoding and value.__class__ is cls:
                return [
                    (name, getattr(value, name), field_type)
                    for name, (field_type, _) in fields.items()
                ]
            return ()

        form = Form(
            encode=encode,
            decode=decode,
            kinds=frozenset(["object"]),
            python=(cls,),
            tag=tag,
            parts=parts,
        )
        # A class may contain itself: while its fields are looked at, its form is known already.
        self._forms[type_] = form
        try:
            if TAG in fields:
                raise Unsupported(f"the field name {TAG} is taken by the tag of unions")
            parts_plain = [
                self._part(f".{name}", field_type).plain for name, (field_type, _) in fields.items()
            ]
            write.append(make_dict_unstructure_fn(type_, self._converter))
            read.append(
                make_dict_structure_fn(
                    type_,
                    self._converter,
                    _cattrs_forbid_extra_keys=True,
                    _cattrs_detailed_validation=False,
                )
            )
        except BaseException:
            # Forms built meanwhile may hold this one, which will never work.
            self._forms.clear()
            raise
        # Of one that contains itself it is not known: then a part of it is not plain yet.
        form = self._forms[type_] = attrs.evolve(form, plain=all(parts_plain))
        return form


class _Converter(cattrs.Converter):
    """Makes the functions that cattrs generates ask the codec for the form of each field.

    Hooks registered with cattrs would not do: it looks at base classes before predicates, so a
    subclass of int or str would never reach them.
    """

    def __init__(self, form: Callable[[Any], Form]) -> None:
        super().__init__(detailed_validation=False)
        self._form = form

    def get_unstructure_hook(self, type: Any, cache_result: bool = True) -> Encode:
        return self._form(type).encode

    def get_structure_hook(self, type: Any, cache_result: bool = True) -> Decode:
        return self._form(type).decode

    def unstructure(self, obj: Any, unstructure_as: Any = None) -> Any:
        return self._form(Any if unstructure_as is None else unstructure_as).encode(obj)

    def structure(self, obj: Any, cl: Any) -> Any:
        return self._form(Any if cl is None else cl).decode(obj, cl)


def is_plain_type(cls: type) -> bool:
    """Tell whether values of a class are JSON by themselves."""
    return cls in _PLAIN_TYPES


_PLAIN_TYPES = frozenset([dict, list, tuple, str, int, float, bool, type(None)])

_LISTS: dict[type, tuple[type, tuple[type, ...]]] = {
    list: (list, (list, JsonArray)),
    collections.abc.MutableSequence: (list, (list, JsonArray)),
    tuple: (tuple, (tuple,)),
    collections.abc.Sequence: (tuple, (tuple, list)),
    collections.abc.Collection: (tuple, (tuple, list)),
    collections.abc.Iterable: (tuple, (tuple, list)),
    set: (set, (set,)),
    collections.abc.MutableSet: (set, (set,)),
    frozenset: (frozenset, (frozenset,)),
    collections.abc.Set: (frozenset, (frozenset, set)),
    dict: (dict, (dict,)),
    collections.abc.Mapping: (dict, (dict,)),
    collections.abc.MutableMapping: (dict, (dict,)),
}
"""What a container annotation is read as, and which classes it is written from."""


def _bare(type_: Any) -> Any:
    """Take off what says nothing about the JSON: Annotated, NewType, Final, aliases, TypeVars."""
    while True:
        if type_ is None:
            return type(None)
        if typing.get_origin(type_) is typing.Annotated or typing.get_origin(type_) is Final:
            type_ = typing.get_args(type_)[0]
        elif hasattr(type_, "__supertype__"):
            type_ = type_.__supertype__
        elif isinstance(type_, typing_extensions.TypeAliasType):
            type_ = type_.__value__
        elif isinstance(type_, TypeVar):
            type_ = type_.__bound__ or Any
        else:
            return type_


def _flatten(args: Iterable[Any]) -> Iterable[Any]:
    for arg in args:
        bare = _bare(arg)
        if typing.get_origin(bare) in (Union, types.UnionType):
            yield from _flatten(typing.get_args(bare))
        else:
            yield bare


def _fields(type_: Any, cls: type) -> dict[str, tuple[Any, bool]]:
    """Return the stored fields of a class: name to its type and whether it must be there."""
    variables = _type_variables(typing.get_args(type_), cls)
    fields: dict[str, tuple[Any, bool]] = {}
    try:
        if attrs.has(cls):
            attrs.resolve_types(cls, include_extras=True)
            for field in attrs.fields(cls):
                if field.init:
                    known = Any if field.type is None else field.type
                    required = field.default is attrs.NOTHING
                    fields[field.name] = (_substituted(known, variables), required)
        else:
            hints = typing.get_type_hints(cls, include_extras=True)
            assert dataclasses.is_dataclass(cls)
            for each in dataclasses.fields(cls):
                if each.init:
                    required = (
                        each.default is dataclasses.MISSING
                        and each.default_factory is dataclasses.MISSING
                    )
                    fields[each.name] = (_substituted(hints[each.name], variables), required)
    except (NameError, AttributeError, TypeError) as error:
        raise Unsupported(f"an annotation of {cls.__name__} cannot be read: {error}") from error
    return fields


def _type_variables(args: tuple[Any, ...], cls: Any) -> dict[Any, Any]:
    """Return what the type variables of a class and its bases stand for."""
    variables = dict(zip(_parameters(cls), args, strict=False))
    for base in getattr(cls, "__orig_bases__", ()):
        origin = typing.get_origin(base)
        if _parameters(origin):
            below = tuple(_substituted(arg, variables) for arg in typing.get_args(base))
            variables = {**_type_variables(below, origin), **variables}
    return variables


def _parameters(type_: Any) -> tuple[Any, ...]:
    parameters = getattr(type_, "__parameters__", ())
    return parameters if isinstance(parameters, tuple) else ()


def _substituted(type_: Any, variables: Mapping[Any, Any]) -> Any:
    if isinstance(type_, TypeVar):
        return variables.get(type_, type_)
    parameters = _parameters(type_)
    if not parameters or typing.get_origin(type_) is None:
        return type_
    return type_[tuple(variables.get(each, Any) for each in parameters)]


def _extra_form(
    cls: type, encode_extra: Callable[[Any], JsonValue], decode_extra: Callable[[JsonValue], Any]
) -> Form:
    def encode(value: Any) -> JsonValue:
        if isinstance(value, cls):
            return encode_extra(value)
        raise Refused(f"expected a {cls.__name__}", value)

    def decode(value: Any, _: Any) -> Any:
        return decode_extra(value)

    return Form(encode=encode, decode=decode, kinds=None, python=(cls,))


def _keys_problem(value: dict[str, Any], fields: dict[str, tuple[Any, bool]]) -> str | None:
    missing = [name for name, (_, required) in fields.items() if required and name not in value]
    if missing:
        return f"lacks the field {', '.join(map(repr, missing))}"
    unknown = [name for name in value if name not in fields]
    if unknown:
        return f"has no field {unknown[0]!r}{nearest(unknown[0], fields)}"
    return None


def _why_not(type_: Any) -> str:
    if isinstance(type_, str | typing.ForwardRef):
        return f"the annotation {type_!r} cannot be resolved; define the class at module level"
    return (
        f"values of {type_name(type_)} cannot be stored; make it an attrs class or a dataclass, "
        "or bring a codec for it with the extension"
    )
