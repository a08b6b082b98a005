"""JSON for histories: values drawn from a seed, a patch applied anew, and the first difference.

Nothing here is the product's: what applies a patch shares no line with what made it, and two values
are the same only if their texts are, so that 1, 1.0 and True are three values.
"""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

SCALARS = (None, True, False, 0, 1, -7, 2**53 + 1, 2**64 - 1, -(2**63), 0.5, 1.0, -0.0, 1e300)
TEXTS = ("", "a", "plain", "é", "🙂 twice 🙂", "~0/1~", "tab\tline\n", '"quoted"', "\u202e")
KEYS = ("a", "b", "", "a/b", "m~n", "0", "-", "ключ")
LARGE = 1_500
"""Characters of a large text: three of them outgrow a small base."""


def drawn(random: Random, depth: int = 2) -> Any:
    """Any small value, now and then a large one."""
    roll = random.random()
    if depth and roll < 0.25:
        return {random.choice(KEYS): drawn(random, depth - 1) for _ in range(random.randint(0, 3))}
    if depth and roll < 0.5:
        return [drawn(random, depth - 1) for _ in range(random.randint(0, 4))]
    if roll < 0.55:
        return random.choice("xyz") * LARGE
    if roll < 0.75:
        return random.choice(TEXTS) + str(random.randint(0, 9))
    return random.choice(SCALARS)


def changed(value: Any, random: Random) -> Any:
    """A value near the given one, which stays as it is: one place of it is different."""
    made = copy.deepcopy(value)
    if isinstance(made, list) and made and random.random() < 0.8:
        at = random.randrange(len(made))
        how = random.randrange(4)
        if how == 0:
            made[at] = changed(made[at], random)
        elif how == 1:
            made.insert(at, drawn(random, 1))
        elif how == 2:
            del made[at]
        else:
            made.append(made.pop(at))
        return made
    if isinstance(made, dict) and made and random.random() < 0.8:
        key = random.choice(list(made))
        how = random.randrange(3)
        if how == 0:
            made[key] = changed(made[key], random)
        elif how == 1:
            del made[key]
        else:
            made[random.choice(KEYS)] = drawn(random, 1)
        return made
    if isinstance(made, str) and random.random() < 0.5:
        return made + random.choice(TEXTS)
    return drawn(random)


def pointers(value: Any, path: str = "") -> list[str]:
    """A pointer to everything that is in a value, itself included."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += pointers(item, f"{path}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += pointers(item, f"{path}/{index}")
    return found


def text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def same(left: Any, right: Any) -> bool:
    return text_of(left) == text_of(right)


def difference(expected: Any, found: Any, path: str = "$") -> str:
    """The first difference, as `path: expected ..., found ...`; "" where there is none."""
    if same(expected, found):
        return ""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *found]:
            if key not in found:
                return f"{path}.{key}: expected {_short(expected[key])}, found nothing"
            if key not in expected:
                return f"{path}.{key}: expected nothing, found {_short(found[key])}"
            below = difference(expected[key], found[key], f"{path}.{key}")
            if below:
                return below
    if isinstance(expected, list) and isinstance(found, list):
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            below = difference(one, other, f"{path}[{index}]")
            if below:
                return below
        return f"{path}: expected {len(expected)} items, found {len(found)}"
    return f"{path}: expected {_short(expected)}, found {_short(found)}"


def _short(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


# --- JSON Patch, from RFC 6901 and 6902 and the design's `append` ------------------------------


def _segments(pointer: str) -> list[str]:
    assert pointer == "" or pointer.startswith("/"), f"not a pointer: {pointer!r}"
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _at(value: Any, segments: list[str]) -> Any:
    for segment in segments:
        value = value[segment] if isinstance(value, dict) else value[int(segment)]
    return value


def patched(value: Any, ops: Any) -> Any:
    """The value after all operations; the given one stays as it is."""
    return patched_in_place(copy.deepcopy(value), ops)


def patched_in_place(value: Any, ops: Any) -> Any:
    """The value after all operations; the given one is changed, or is not what it was."""
    root = [value]
    for op in ops:
        name, where = op["op"], ["0", *_segments(op["path"])]
        if name in ("copy", "move"):
            origin = ["0", *_segments(op["from"])]
            operand = copy.deepcopy(_at(root, origin))
            if name == "move":
                _edit(root, origin, "remove", None)
            _edit(root, where, "add", operand)
        else:
            _edit(root, where, name, copy.deepcopy(op.get("value")))
    return root[0]


def _edit(root: list[Any], where: list[str], name: str, operand: Any) -> None:
    parent, last = _at(root, where[:-1]), where[-1]
    if len(where) == 1:
        # The whole value; an `add` replaces it.
        name = "replace" if name == "add" else name
    key: Any = last if isinstance(parent, dict) else None
    if key is None:
        key = len(parent) if last == "-" else int(last)
    if name == "add":
        if isinstance(parent, dict):
            parent[key] = operand
        else:
            assert 0 <= key <= len(parent), f"no place {key} in a list of {len(parent)}"
            parent.insert(key, operand)
    elif name == "remove":
        del parent[key]
    elif name == "replace":
        assert isinstance(parent, list) or key in parent, f"nothing to replace at {last!r}"
        parent[key] = operand
    elif name == "append":
        assert isinstance(parent[key], str), "only a string grows"
        parent[key] += operand
    elif name == "test":
        assert same(parent[key], operand), f"the test of {last!r} fails"
    else:
        raise AssertionError(f"no operation {name!r} in RFC 6902")
