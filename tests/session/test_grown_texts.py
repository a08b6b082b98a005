"""Long texts that grow: appending copies nothing of them, and every value reads as it was."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import given, settings as hypothesis_settings, strategies as st
from session_support import new_conversation, open_test_session

from pidurable.errors import NotJsonError
from pidurable.records import _patch
from pidurable.session import _grown
from pidurable.session._documents import Address, DocState, document
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.storage import MemoryStorage

LONG = _grown.LONG_CHARACTERS_MIN


@document("test.scroll", history="rewindable")
@attrs.define
class Scroll:
    text: str = "x" * LONG
    other: str = "y" * LONG
    short: str = ""


def state_of(session: Session, conversation: int) -> DocState:
    found = session.doc(Address("test.scroll", 1, conversation, ""))
    assert found is not None
    return found


async def append(session: Session, conversation: int, path: str, text: str) -> None:
    await session.run(
        session.transaction(), lambda tx: tx.append_text(Scroll, conversation, path, text)
    )


async def new_scroll(session: Session) -> int:
    conversation = await new_conversation(session)
    async with session.body(session.transaction()) as tx:
        await tx.document(Scroll, conversation)
    return conversation


async def test_appending_to_a_long_text_leaves_it_uncopied_until_it_is_read() -> None:
    """A hundred commits only note what they append; who reads then sees all of it."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_scroll(session)
        first = state_of(session, conversation)
        for number in range(100):
            await append(session, conversation, "/text", f"{number},")
        last = state_of(session, conversation)
        kept = last.held
        copied = kept._whole
        text = last.value["text"]
        before = first.value["text"]

    async with open_test_session(storage) as session:
        stored = state_of(session, conversation).value["text"]

    assert type(kept) is _grown.Grown
    assert copied is None
    assert text == "x" * LONG + "".join(f"{number}," for number in range(100))
    assert stored == text
    assert before == "x" * LONG


async def test_what_a_failed_body_appended_is_in_no_value() -> None:
    """A body that raises after it has appended leaves nothing to those who append next."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_scroll(session)
        await append(session, conversation, "/text", "a")

        def fail(tx: Transaction) -> None:
            tx.append_text(Scroll, conversation, "/text", "never")
            raise ZeroDivisionError

        try:
            await session.run(session.transaction(), fail)
        except ZeroDivisionError:
            failed = state_of(session, conversation)
        await append(session, conversation, "/text", "b")
        text = state_of(session, conversation).value["text"]

    assert failed.value["text"] == "x" * LONG + "a"
    assert text == "x" * LONG + "ab"


async def test_an_append_that_does_not_fit_a_large_document_is_refused() -> None:
    """Appending to what is no text, or to nothing, fails as it does where all is copied."""
    refused: list[str] = []
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_scroll(session)
        for path in ("", "/missing", "text"):
            try:
                await append(session, conversation, path, "a")
            except NotJsonError as error:
                refused.append(str(error))

    assert len(refused) == 3


TEXTS = st.sampled_from(["a", "\u20ac", "\U0001f600 and more", ""])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(["/text", "/other", "/short"]), TEXTS),
        st.tuples(st.just("replace"), st.sampled_from(["/text", "/short"]), TEXTS),
        st.just(("read", "", "")),
        st.just(("branch", "/text", "lost")),
    ),
    max_size=12,
)


@hypothesis_settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_a_value_that_has_grown_equals_the_one_that_was_copied(
    steps: list[tuple[str, str, str]],
) -> None:
    """Whatever is appended, replaced, read or given up, each value stays what it was."""
    held: Any = attrs.asdict(Scroll())
    copied: Any = held
    seen: list[tuple[Any, Any]] = []
    for name, path, text in steps:
        if name == "read":
            assert _grown.plain(held) == copied
            continue
        ops = [{"op": "append" if name == "branch" else name, "path": path, "value": text}]
        after = _grown.changed(held, ops)
        if name == "branch":
            continue
        held, copied = after, _patch.apply(copied, ops)
        seen.append((held, copied))

    assert all(_grown.plain(grown) == expected for grown, expected in seen)
