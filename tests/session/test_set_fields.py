"""Fields that the product itself sets in a document: written where they differ, not copied."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings as hypothesis_settings, strategies as st
from session_support import new_conversation, open_test_session

from pidurable.errors import NotJsonError
from pidurable.records import _json
from pidurable.records._ids import TaskId
from pidurable.records._limits import VALUE_DEPTH_MAX
from pidurable.session import _grown
from pidurable.session._documents import Address, definition_of, document
from pidurable.session._session import Session
from pidurable.storage import MemoryStorage

SCALARS = st.none() | st.booleans() | st.integers(-1, 2) | st.just(1.0) | st.sampled_from("ab")
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.just("x"), SCALARS)
FIELDS = st.dictionaries(st.sampled_from(["one", "two", "new"]), VALUES, max_size=3)


@document("fields.board")
@attrs.define
class Board:
    one: Any = None
    two: Any = None
    text: str = ""


@document("fields.board", version=2)
@attrs.define
class BoardV2:
    one: Any = None
    two: Any = None
    text: str = ""

    @staticmethod
    def migrate(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        return {**value, "two": f"was {value['two']}"}


def board(conversation: int) -> Address:
    return Address("fields.board", 1, conversation, "")


async def new_board(session: Session) -> int:
    conversation = await new_conversation(session)
    async with session.body(session.transaction()) as tx:
        await tx.document(Board, conversation)
    return conversation


async def set_fields(
    session: Session, conversation: int, fields: dict[str, Any], cls: type = Board
) -> bool:
    return await session.run(
        session.transaction(),
        lambda tx: tx.set_fields(definition_of(cls), board(conversation), fields),
    )


def stored_changes(storage: MemoryStorage, conversation: int) -> list[Any]:
    """The operations of each change since the newest base, oldest first."""
    row = storage.document(*board(conversation))
    assert row is not None
    return [_json.loads(each.value) for each in storage.revisions(row.id) if not each.base]


@given(st.lists(FIELDS, max_size=4))
@hypothesis_settings(max_examples=25)
def test_what_is_set_is_what_is_read_and_only_that_is_stored(changes: list[dict[str, Any]]) -> None:
    """Each change is stored as the fields that differ, and one that changes nothing not at all."""

    async def play() -> None:
        storage = MemoryStorage()
        expected: dict[str, Any] = {"one": None, "two": None, "text": ""}
        written = []
        async with open_test_session(storage) as session:
            conversation = await new_board(session)
            for fields in changes:
                differ = {
                    name: value
                    for name, value in fields.items()
                    if name not in expected or expected[name] != value
                }
                ops = [
                    {
                        "op": "replace" if name in expected else "add",
                        "path": f"/{name}",
                        "value": value,
                    }
                    for name, value in differ.items()
                ]
                written += [ops] if ops else []
                assert await set_fields(session, conversation, fields)
                expected = {**expected, **fields} if ops else expected
                assert session.doc_value(board(conversation)) == expected
            assert stored_changes(storage, conversation) == written
        async with open_test_session(storage.reopen()) as session:
            assert session.doc_value(board(conversation)) == expected

    trio.run(play)


async def test_fields_of_a_document_that_does_not_stand_are_not_set() -> None:
    """Whoever asks is told that there is none, and makes one."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        seq = session.line.published_seq
        assert not await set_fields(session, conversation, {"one": 1})
        assert session.line.published_seq == seq
        assert session.doc_value(board(conversation)) is None


async def test_fields_add_up_with_whatever_else_a_commit_does_to_the_document() -> None:
    """Drafts, patches and fields of one commit are one revision, each on top of the one before."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_board(session)
        async with session.body(session.transaction()) as tx:
            tx.set_fields(definition_of(Board), board(conversation), {"one": {"a": 1}})
            tx.patch(Board, conversation, [{"op": "add", "path": "/one/b", "value": 2}])
            tx.set_fields(definition_of(Board), board(conversation), {"two": [3], "text": "t"})
            tx.append_text(Board, conversation, "/text", "!")
        expected = {"one": {"a": 1, "b": 2}, "two": [3], "text": "t!"}
        assert session.doc_value(board(conversation)) == expected
        (ops,) = stored_changes(storage, conversation)
        assert [op["path"] for op in ops] == ["/one", "/one/b", "/two", "/text", "/text"]
    async with open_test_session(storage.reopen()) as session:
        assert session.doc_value(board(conversation)) == expected


async def test_a_field_of_an_older_version_is_set_in_todays_shape() -> None:
    """What is stored is migrated first, and written as a whole."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_board(session)
        await set_fields(session, conversation, {"two": 2})
        await set_fields(session, conversation, {"one": 1}, BoardV2)
        expected = {"one": 1, "two": "was 2", "text": ""}
        assert session.doc_value(board(conversation)) == expected
        assert session.snapshot(BoardV2, conversation) == BoardV2(**expected)
        assert stored_changes(storage, conversation) == []


async def test_a_long_text_stays_whole_when_another_field_is_set() -> None:
    """A text that grows by notes is put together where a field beside it changes."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_board(session)
        long = "x" * _grown.LONG_CHARACTERS_MIN
        await set_fields(session, conversation, {"text": long})
        for number in range(3):
            async with session.body(session.transaction()) as tx:
                tx.append_text(Board, conversation, "/text", "a")
            await set_fields(session, conversation, {"one": number})
        expected = {"one": 2, "two": None, "text": f"{long}aaa"}
        assert session.doc_value(board(conversation)) == expected
    async with open_test_session(storage.reopen()) as session:
        assert session.doc_value(board(conversation)) == expected


async def test_values_that_are_not_plain_are_made_so_or_refused_at_their_place() -> None:
    """A subclass becomes its plain value; what no JSON can hold is refused, and nothing changes."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_board(session)
        assert await set_fields(session, conversation, {"one": [TaskId(7)]})
        assert await set_fields(session, conversation, {"two": [(1, 2)], "text": "t"})
        value = session.doc_value(board(conversation))
        assert repr(value) == "{'one': [7], 'two': [[1, 2]], 'text': 't'}"
        for bad, place in (
            ([{1: 2}], r"\$<fields\.board>\[0\]\.value\[0\]: a key must be a string"),
            ({"a": float("nan")}, r"\$<fields\.board>\[0\]\.value\.a: a number must be finite"),
            (["\ud800"], r"\$<fields\.board>\[0\]\.value\[0\]: .* surrogate"),
        ):
            with pytest.raises(NotJsonError, match=place):
                await set_fields(session, conversation, {"one": bad, "two": 5})
        assert session.doc_value(board(conversation)) == value


async def test_a_field_that_is_left_out_stays_as_it_is_stored() -> None:
    """What only equals the value, as 1 does 1.0, is not stored, and so is not held either."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_board(session)
        await set_fields(session, conversation, {"one": 1.0})
        await set_fields(session, conversation, {"one": 1, "two": True})
        held = repr(session.doc_value(board(conversation)))
    async with open_test_session(storage.reopen()) as session:
        assert held == repr(session.doc_value(board(conversation)))


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("checked", [False, True])
async def test_a_value_that_is_known_to_be_plain_is_stored_alike(checked: bool) -> None:
    """Who knows that values are plain spares the walk, and nothing else; strings are looked at."""
    storage = MemoryStorage()
    fields = {"one": [{"a": [1, "ü"]}, {}], "two": [[i] for i in range(300)], "new": 2.5}
    async with open_test_session(storage) as session:
        conversation = await new_board(session)
        definition = definition_of(Board)
        async with session.body(session.transaction()) as tx:
            assert tx.set_fields(definition, board(conversation), fields, checked=checked)
        stored = stored_changes(storage, conversation)
        for bad, problem in (("\0", "NUL"), ("\ud800", "surrogate")):
            with pytest.raises(NotJsonError, match=problem):
                async with session.body(session.transaction()) as tx:
                    tx.set_fields(definition, board(conversation), {"one": [bad]}, checked=checked)
    assert {op["path"][1:]: op["value"] for op in stored[0]} == fields


async def test_a_field_is_at_most_as_deep_as_the_whole_may_be() -> None:
    """Level 200 is stored and read back, also as a change; one more is refused."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_board(session)
        deepest = nested(VALUE_DEPTH_MAX - 1)
        await set_fields(session, conversation, {"one": deepest})
        for deeper in (nested(VALUE_DEPTH_MAX), [deepest]):
            with pytest.raises(NotJsonError, match="nested more than 200 levels"):
                await set_fields(session, conversation, {"two": deeper})
    async with open_test_session(storage.reopen()) as session:
        assert session.doc_value(board(conversation)) == {"one": deepest, "two": None, "text": ""}
