"""What `@document` takes, and what messages say of documents that are not there."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
from session_support import new_conversation, open_test_session

from pidurable.errors import InvalidArgumentError, NotFoundError
from pidurable.session._documents import document
from pidurable.session._session import Session
from pidurable.storage import MemoryStorage


@attrs.define
class Plain:
    text: str = ""


@document("test.declared")
@attrs.define
class Declared:
    text: str = ""


@document("test.shelf", scope="session", family=True)
@attrs.define
class Shelf:
    books: int = 0


@document("test.required")
@attrs.define
class Required:
    title: str
    text: str = ""


@document("test.dataclass")
@dataclasses.dataclass
class RequiredData:
    title: str
    pages: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with open_test_session(MemoryStorage()) as session:
        yield session


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "sesion"}, "scope: expected one of session, conversation, task, got 'sesion'"),
        ({"history": "rewind"}, "history: expected one of latest, rewindable, got 'rewind'"),
        ({"fork": "curent"}, "fork: expected one of initial, current, as_of, got 'curent'"),
        ({"version": True}, "version: expected an int of at least 1, got True"),
        ({"version": "2"}, "version: expected an int of at least 1, got '2'"),
        ({"name": ""}, "name: expected a str of 1 to 512 characters"),
        ({"name": Plain}, "name: expected a str of 1 to 512 characters"),
    ],
)
def test_a_word_that_is_none_is_refused_where_a_document_is_declared(
    options: dict[str, Any], message: str
) -> None:
    """A misspelt policy would silently be another one: it is refused at the decorator."""
    with pytest.raises(InvalidArgumentError, match=message):
        document(**{"name": "test.bad", **options})


def test_a_document_is_declared_above_what_makes_its_class() -> None:
    """A class that is no attrs class yet would be another one afterwards; the order is told."""
    with pytest.raises(InvalidArgumentError, match=r"test.bad: .* above @attrs.define"):

        @attrs.define
        @document("test.bad")
        class Bad:
            text: str = ""


@pytest.mark.parametrize("cls", [Required, RequiredData])
async def test_a_document_that_cannot_begin_names_the_fields_without_a_default(
    session: Session, cls: type
) -> None:
    """There are no arguments to begin a document with, so each field needs a default."""
    conversation = await new_conversation(session)
    with pytest.raises(InvalidArgumentError, match=r"give these fields one, got title$"):
        async with session.body(session.transaction()) as tx:
            await tx.document(cls, conversation)


async def test_a_document_that_is_not_there_is_named_with_its_place(session: Session) -> None:
    """The session may have one of that name elsewhere: scope, id and key are told."""
    conversation = await new_conversation(session)
    with pytest.raises(
        NotFoundError, match=f"conversation {conversation} has no document test.declared"
    ):
        async with session.body(session.transaction()) as tx:
            tx.retire(Declared, conversation)
    with pytest.raises(NotFoundError, match=r"no document test\.shelf under key 'top'"):
        async with session.body(session.transaction()) as tx:
            tx.patch(Shelf, 0, [], key="top")


async def test_a_watch_and_a_snapshot_without_an_id_say_whose_is_wanted(session: Session) -> None:
    """Both name the document and what it belongs to, in the same words."""
    message = "document 'test.declared' belongs to a conversation; give its id, got 0"
    with pytest.raises(InvalidArgumentError, match=message):
        session.snapshot(Declared)
    with pytest.raises(InvalidArgumentError, match=message):
        async with session.watch(Declared):
            pass
