"""JSON Patch (RFC 6902) over stored values, and one operation more: `append` grows a string.

`{"op": "append", "path": "/text", "value": "more"}` costs what it adds, where a `replace` would
cost the whole string; that is what streaming needs. Holds at all times:

* nothing here mutates what it is given: a result shares with its input what did not change, and
  copies the containers on the way to what did, each once however many operations meet it;
* `apply(old, diff(old, new))` is `new`, type for type: 1, 1.0 and True are three values;
* an operation that does not fit raises `NotJsonError`, whose path is the pointer it names; so does
  one after which the value would be deeper than 200 levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from pidurable.errors import NotJsonError, show
from pidurable.records._limits import VALUE_DEPTH_MAX
from pidurable.records._messages import JsonValue

PatchOp = dict[str, Any]
"""One operation, as the JSON object that RFC 6902 defines."""


def apply(value: JsonValue, ops: Sequence[PatchOp]) -> JsonValue:
    """Return the value after all operations, in order; the input stays as it is.

    The result shares what did not change with `value` and with the operations, so treat all three
    as immutable from here on.

    Args:
        value: Any JSON value.
        ops: RFC 6902 operations, and `append`.

    Raises:
        NotJsonError: An operation is malformed or does not fit the value; `path` is its pointer.
            Nothing was changed.
    """
    owned: _Owned = {}
    for op in ops:
        changed = _with_field(value, op, owned) if type(value) is dict else None
        value = _apply_one(value, op, owned) if changed is None else changed
    return value


def diff(old: JsonValue, new: JsonValue) -> list[PatchOp]:
    """Return the operations that make `new` out of `old`; none where they are the same.

    Dicts are compared by key, lists by what they have in common at both ends, and a string that
    grew becomes an `append`. A changed order of keys alone is no difference.

    Args:
        old: The value before.
        new: The value after.
    """
    ops: list[PatchOp] = []
    _diff(old, new, "", ops)
    return ops


def lower(ops: Sequence[PatchOp], value: JsonValue) -> list[PatchOp]:
    """Translate into plain RFC 6902, for a client that does not know `append`.

    Args:
        ops: Operations that fit `value`.
        value: The value before them; an `append` becomes a `replace` by the whole string.

    Raises:
        NotJsonError: An operation does not fit the value.
    """
    lowered: list[PatchOp] = []
    owned: _Owned = {}
    for op in ops:
        value = _apply_one(value, op, owned)
        if op["op"] == "append":
            whole = get(value, op["path"])
            op = {"op": "replace", "path": op["path"], "value": whole}
        lowered.append(op)
    return lowered


def get(value: JsonValue, pointer: str) -> JsonValue:
    """Return what an RFC 6901 pointer names; "" is the value itself.

    Raises:
        NotJsonError: The value has nothing at the pointer.
    """
    for segment in parse_pointer(pointer):
        value = _child(value, segment, pointer)
    return value


def parse_pointer(pointer: object) -> list[str]:
    """Split an RFC 6901 pointer into its unescaped segments.

    Raises:
        NotJsonError: It is not a pointer: neither empty nor beginning with a slash.
    """
    if not isinstance(pointer, str) or (pointer and pointer[0] != "/"):
        raise NotJsonError("path", 'a JSON pointer is "" or begins with "/"', show(pointer))
    if not pointer:
        return []
    segments = pointer[1:].split("/")
    if "~" not in pointer:
        return segments
    for segment in segments:
        if "~" in segment.replace("~0", "").replace("~1", ""):
            raise NotJsonError(
                pointer, 'in a JSON pointer "~" is followed by 0 or 1', show(segment)
            )
    return [segment.replace("~1", "/").replace("~0", "~") for segment in segments]


def join_pointer(pointer: str, key: str | int) -> str:
    """Name the child of what a pointer names."""
    if isinstance(key, str):
        return f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
    return f"{pointer}/{key}"


def same(left: JsonValue, right: JsonValue) -> bool:
    """Tell whether two JSON values are equal in value and type, all the way down."""
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is dict:
        # dict.keys() of both are compared as sets: order is no difference.
        return left.keys() == right.keys() and all(
            same(item, right[key]) for key, item in left.items()
        )
    if kind is list:
        return len(left) == len(right) and all(map(same, left, right))
    if kind is float and left == right == 0.0:
        return repr(left) == repr(right)  # 0.0 and -0.0 are two texts
    return bool(left == right)


# --- applying ---------------------------------------------------------------------------------

_Owned: TypeAlias = dict[int, Any]
"""The containers that this call has made and nobody else has, by their `id`: the next operation may
change them as they are. Without it, changing n items of a list would copy the list n times."""


def _own(container: Any, owned: _Owned) -> Any:
    """The container itself where it may be changed, else a copy that may."""
    if id(container) in owned:
        return container
    copied = container.copy()
    owned[id(copied)] = copied
    return copied


def _with_field(value: dict[str, Any], op: Any, owned: _Owned) -> dict[str, Any] | None:
    """Do an operation that sets a field of the whole, as most do; None for any other one."""
    pointer = op.get("path") if type(op) is dict else None
    if type(pointer) is not str or pointer.rfind("/") != 0 or "~" in pointer:
        return None
    name, kind = pointer[1:], op.get("op")
    if kind != "add" and (kind != "replace" or name not in value):
        return None
    operand = op.get("value", _MISSING)
    if operand is _MISSING:
        return None
    if operand and type(operand) in _CONTAINERS:
        _check_depth(operand, [name], pointer)
    changed: dict[str, Any] = _own(value, owned)
    changed[name] = operand
    return changed


def _apply_one(value: JsonValue, op: Any, owned: _Owned) -> JsonValue:
    if not isinstance(op, dict) or not isinstance(op.get("path"), str):
        raise NotJsonError("op", "an operation is an object with op and path", show(op))
    name, pointer = op.get("op"), op["path"]
    segments = parse_pointer(pointer)
    if name in _NEEDS_VALUE and "value" not in op:
        raise NotJsonError(pointer, f"the operation {name!r} needs a value", show(op))
    if name == "test":
        found = get(value, pointer)
        if not same(found, op["value"]):
            raise NotJsonError(pointer, f"the test expects {show(op['value'])}", show(found))
        return value
    if name in ("move", "copy"):
        source = op.get("from")
        source_segments = parse_pointer(source)
        assert isinstance(source, str)  # parse_pointer has refused anything else
        moved = get(value, source)
        if name == "move":
            if source == pointer:
                return value
            if segments[: len(source_segments)] == source_segments:
                raise NotJsonError(pointer, "a value cannot move into itself", source)
            value = _change(value, source_segments, "remove", None, source, owned)
        else:
            # It stands at two places from here on, so a change of one must copy it.
            owned.clear()
        _check_depth(moved, segments, pointer)
        return _change(value, segments, "add", moved, pointer, owned)
    if name not in ("add", "remove", "replace", "append"):
        raise NotJsonError(pointer, f"expected one of {', '.join(_OPS)} as op", show(name))
    if name == "append" and not isinstance(op["value"], str):
        raise NotJsonError(pointer, "only a string can be appended", show(op["value"]))
    operand = op.get("value")
    if name != "remove" and type(operand) in _CONTAINERS:
        _check_depth(operand, segments, pointer)
    return _change(value, segments, name, operand, pointer, owned)


_OPS = ("add", "remove", "replace", "move", "copy", "test", "append")
_NEEDS_VALUE = ("add", "replace", "test", "append")
_CONTAINERS = (dict, list)
_MISSING = object()


def _check_depth(value: JsonValue, segments: list[str], pointer: str) -> None:
    """Refuse to put a value so far down that the whole would be too deep to be stored.

    Costs what the value takes, and nothing for a scalar, so a change stays O(change).
    """
    level: list[Any] = [value] if type(value) is dict or type(value) is list else []
    depth = len(segments)
    while level:
        depth += 1
        if depth > VALUE_DEPTH_MAX:
            raise NotJsonError(pointer, f"nested more than {VALUE_DEPTH_MAX} levels deep there")
        level = [
            item
            for each in level
            for item in (each.values() if type(each) is dict else each)
            if type(item) is dict or type(item) is list
        ]


def _change(
    value: JsonValue,
    segments: list[str],
    name: str,
    operand: JsonValue,
    pointer: str,
    owned: _Owned,
) -> JsonValue:
    """Return `value`, copied where it is not owned, with one operation done at `segments`."""
    # Walk down first and build the copies on the way back, so that no depth is too deep.
    parents: list[tuple[Any, str]] = []
    for segment in segments[:-1]:
        parents.append((value, segment))
        value = _child(value, segment, pointer)
    if segments:
        changed = _change_child(value, segments[-1], name, operand, pointer, owned)
    elif name == "remove":
        raise NotJsonError(pointer, "the whole value cannot be removed; replace it by null")
    else:
        changed = _grown(value, operand, pointer) if name == "append" else operand
    for parent, segment in reversed(parents):
        copied = _own(parent, owned)
        copied[segment if type(parent) is dict else int(segment)] = changed
        changed = copied
    return changed


def _change_child(
    parent: JsonValue, segment: str, name: str, operand: JsonValue, pointer: str, owned: _Owned
) -> JsonValue:
    if name == "add":
        if type(parent) is dict:
            copied = _own(parent, owned)
            copied[segment] = operand
            return copied
        if type(parent) is list:
            index = len(parent) if segment == "-" else _index(segment, len(parent), pointer)
            copied = _own(parent, owned)
            copied.insert(index, operand)
            return copied
    child = _child(parent, segment, pointer)
    copied = _own(parent, owned)
    key = segment if type(parent) is dict else int(segment)
    if name == "remove":
        del copied[key]
    else:
        copied[key] = _grown(child, operand, pointer) if name == "append" else operand
    return copied


def _grown(value: JsonValue, more: str, pointer: str) -> str:
    if type(value) is not str:
        raise NotJsonError(pointer, "append grows a string only", show(value))
    return value + more


def _child(value: JsonValue, segment: str, pointer: str) -> JsonValue:
    if type(value) is dict:
        if segment in value:
            return value[segment]
        raise NotJsonError(pointer, f"there is no key {show(segment)}")
    if type(value) is list:
        return value[_index(segment, len(value) - 1, pointer)]
    raise NotJsonError(pointer, f"nothing is below a {type(value).__name__}", show(value))


def _index(segment: str, index_max: int, pointer: str) -> int:
    # RFC 6901: digits only, without a leading zero. The length keeps hostile digits cheap.
    if segment.isascii() and segment.isdigit() and len(segment) < 19:
        index = int(segment)
        if index <= index_max and (segment[0] != "0" or segment == "0"):
            return index
    raise NotJsonError(pointer, f"expected an index from 0 to {index_max}", show(segment))


# --- comparing --------------------------------------------------------------------------------


def _diff(old: JsonValue, new: JsonValue, pointer: str, ops: list[PatchOp]) -> None:
    if old is new:
        return
    kind = type(old)
    if kind is type(new):
        if kind is dict:
            _diff_dicts(old, new, pointer, ops)
            return
        if kind is list:
            _diff_lists(old, new, pointer, ops)
            return
        if kind is str and old and len(new) > len(old) and new.startswith(old):
            ops.append({"op": "append", "path": pointer, "value": new[len(old) :]})
            return
        if same(old, new):
            return
    ops.append({"op": "replace", "path": pointer, "value": new})


def _diff_dicts(old: dict[str, Any], new: dict[str, Any], pointer: str, ops: list[PatchOp]) -> None:
    for key, item in old.items():
        below = join_pointer(pointer, key)
        if key in new:
            _diff(item, new[key], below, ops)
        else:
            ops.append({"op": "remove", "path": below})
    ops.extend(
        {"op": "add", "path": join_pointer(pointer, key), "value": item}
        for key, item in new.items()
        if key not in old
    )


def _diff_lists(old: list[Any], new: list[Any], pointer: str, ops: list[PatchOp]) -> None:
    """Skip the common ends; in the middle change pairs in place, then remove or add the rest."""
    shorter = min(len(old), len(new))
    head = 0
    while head < shorter and same(old[head], new[head]):
        head += 1
    tail = 0
    while tail < shorter - head and same(old[-1 - tail], new[-1 - tail]):
        tail += 1
    old_end, new_end = len(old) - tail, len(new) - tail
    paired = min(old_end, new_end)
    for index in range(head, paired):
        _diff(old[index], new[index], join_pointer(pointer, index), ops)
    # From the back, so that no index moves before its turn.
    ops.extend(
        {"op": "remove", "path": join_pointer(pointer, index)}
        for index in range(old_end - 1, paired - 1, -1)
    )
    ops.extend(
        {"op": "add", "path": join_pointer(pointer, index), "value": new[index]}
        for index in range(paired, new_end)
    )
