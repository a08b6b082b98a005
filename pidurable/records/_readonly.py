"""Read-only views of committed JSON: what consumers are handed, without a copy and without danger.

A committed value is shared by the session, by every watcher and by the value after it, so whoever
could write into it would change the past of all of them. A view wraps one dict or list, wraps what
is below it when that is asked for, and refuses every change. Making one costs nothing that grows.

* A view equals plain JSON, and another view, of the same content; it has no hash, like a dict.
* Pickling and deep-copying give plain dicts and lists, which are the consumer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final, overload

from pidurable.records._messages import JsonValue


def copied_json(value: Any) -> Any:
    """Copy JSON, views included, into dicts and lists that are the caller's own."""
    kind = type(value)
    if kind is dict:
        return {
            key: copied_json(item) if type(item) in _COPIED else item for key, item in value.items()
        }
    if kind is list or kind is tuple:
        return [copied_json(item) if type(item) in _COPIED else item for item in value]
    if kind is JsonObject or kind is JsonArray:
        return value.json()
    return value


def view_of(value: Any) -> Any:
    """Wrap a dict or list; anything else cannot be changed and is given as it is."""
    kind = type(value)
    if kind is dict:
        return JsonObject(value)
    if kind is list or kind is tuple:
        return JsonArray(value)
    return value


def bare(value: Any) -> Any:
    """What a view wraps, which is not to be changed; anything else as it is."""
    return value._value if type(value) in (JsonObject, JsonArray) else value


@final
class JsonObject(Mapping[str, Any]):
    """A committed JSON object that cannot be changed; what is below it neither.

    `json()` gives a plain copy, for sending or for changing.
    """

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]  # equal to dicts, which have none either

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = value

    def json(self) -> dict[str, JsonValue]:
        """Return a plain copy of your own. Costs its size."""
        copied: dict[str, JsonValue] = copied_json(self._value)
        return copied

    def __getitem__(self, key: str) -> Any:
        return view_of(self._value[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)

    def __contains__(self, key: object) -> bool:
        return key in self._value

    def __eq__(self, other: object) -> bool:
        return bool(self._value == bare(other))

    def __repr__(self) -> str:
        return repr(self._value)

    def __copy__(self) -> JsonObject:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self.json()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return copied_json, (self._value,)


@final
class JsonArray(Sequence[Any]):
    """A committed JSON array that cannot be changed; what is below it neither.

    `json()` gives a plain copy, for sending or for changing.
    """

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none either

    def __init__(self, value: list[Any]) -> None:
        self._value = value

    def json(self) -> list[JsonValue]:
        """Return a plain copy of your own. Costs its size."""
        copied: list[JsonValue] = copied_json(self._value)
        return copied

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> JsonArray: ...

    def __getitem__(self, index: int | slice) -> Any:
        return view_of(self._value[index])

    def __iter__(self) -> Iterator[Any]:
        return map(view_of, self._value)

    def __len__(self) -> int:
        return len(self._value)

    def __contains__(self, item: object) -> bool:
        return bare(item) in self._value

    def __eq__(self, other: object) -> bool:
        return bool(self._value == bare(other))

    def __repr__(self) -> str:
        return repr(self._value)

    def __copy__(self) -> JsonArray:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return self.json()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return copied_json, (self._value,)


_COPIED = frozenset([dict, list, tuple, JsonObject, JsonArray])
"""What is not its own copy."""


if not TYPE_CHECKING:
    # A type checker knows already that a Mapping has none of these. Who tries at run time is told
    # the way out, instead of "has no attribute 'append'".

    class _Refusal:
        def __call__(self, *_: Any, **__: Any) -> NoReturn:
            raise TypeError(
                "committed JSON cannot be changed; take a plain copy with .json(), or change the "
                "document in a commit (tx.document, tx.patch)"
            )

    for _cls, _names in (
        (JsonObject, "__setitem__ __delitem__ __ior__ clear pop popitem setdefault update"),
        (
            JsonArray,
            "__setitem__ __delitem__ __iadd__ __imul__ append clear extend insert pop remove "
            "reverse sort",
        ),
    ):
        for _name in _names.split():
            setattr(_cls, _name, _Refusal())
