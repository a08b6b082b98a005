"""Any values, in any order, at the doors of a session: refused, or back exactly when reopened."""

from __future__ import annotations

import math
from typing import Any

import attrs
from hypothesis import given, settings, strategies as st
from session_support import new_conversation, open_test_session

from pidurable.errors import NotJsonError
from pidurable.records._patch import same
from pidurable.session._documents import document
from pidurable.storage import MemoryStorage


@document("test.anything")
@attrs.define
class Free:
    value: Any = None


LEAVES = (
    st.none()
    | st.booleans()
    | st.sampled_from([0.0, -0.0, 1, 1.0, 2**63, 2**64 - 1, -(2**63), 2**53 + 1])
    | st.sampled_from([math.nan, math.inf, 2**64, -(2**63) - 1])
    | st.text(max_size=4)
    | st.sampled_from(["\0", "a\ud800", "\udfff", "\u2028\x1b"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.sampled_from(["\0", "/~"]), inner, max_size=3)
        | st.dictionaries(st.integers(0, 2), inner, max_size=1)
    ),
    max_leaves=6,
)
STEPS = st.lists(st.tuples(st.sampled_from(["entry", "draft", "patch"]), VALUES), max_size=8)


def plain(value: Any) -> Any:
    """What comes back: the value, tuples as lists."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def is_strict(value: Any) -> bool:
    """The rules once more, in the fewest words."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_strict(key) for key in value) and all(
            map(is_strict, value.values())
        )
    if isinstance(value, list | tuple):
        return all(map(is_strict, value))
    if isinstance(value, str):
        return not any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return math.isfinite(value)


@settings(max_examples=20)
@given(STEPS)
async def test_values_are_refused_or_come_back_exactly_in_any_order(
    steps: list[tuple[str, Any]],
) -> None:
    """A refusal leaves the entries and the document as they were; a reopening changes nothing."""
    storage = MemoryStorage()
    entries: dict[int, Any] = {}
    held: Any = None
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        async with session.body(session.transaction()) as tx:
            await tx.document(Free, conversation)
        for door, value in steps:
            refused = False
            try:
                async with session.body(session.transaction()) as tx:
                    if door == "entry":
                        id = tx.append(conversation, [value], kind="any")
                    elif door == "draft":
                        (await tx.document(Free, conversation)).value = value
                    else:
                        op = {"op": "replace", "path": "/value", "value": value}
                        tx.patch(Free, conversation, [op])
            except NotJsonError:
                refused = True
            assert refused is not is_strict(value)
            if refused:
                continue
            if door == "entry":
                entries[id] = [plain(value)]
            else:
                held = plain(value)
    async with open_test_session(storage) as session:
        free = session.snapshot(Free, conversation)
        history = await session.history(conversation)
    assert free is not None
    # A draft in which keys have only changed their order has not changed.
    assert same(free.value, held)
    assert [entry.id for entry in history] == list(entries)
    assert all(same(entry.data, entries[entry.id]) for entry in history)
