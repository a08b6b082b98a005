"""Transcripts: histories over forks, context ranges, and a valid exchange whatever happened."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings as hypothesis_settings, strategies as st
from session_support import HeldBlocking, Note, commit_note, new_conversation, open_test_session
from transcript_support import answer, check_sendable, entry, histories, result, shown, system, user
from trio.testing import wait_all_tasks_blocked

from pidurable.errors import InvalidArgumentError, NotFoundError, NotJsonError
from pidurable.records import _entries
from pidurable.records._entries import Edit, Entry
from pidurable.records._json import loads_stored
from pidurable.records._messages import (
    AssistantStatus,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)
from pidurable.session._session import Session
from pidurable.session._transaction import Transaction
from pidurable.session._transcript import (
    INTERRUPTED,
    NO_OUTPUT,
    context_range,
    exchange,
    extend_range,
)
from pidurable.storage import ConversationRow, MemoryStorage, Op

# --- the range --------------------------------------------------------------------------------


def test_the_range_is_everything_before_any_head() -> None:
    """Without a head, all entries count."""
    entries = [entry(1), entry(2), entry(3)]
    assert context_range(entries) == entries


def test_the_range_begins_at_the_newest_head() -> None:
    """The newest head entry comes first, then what is from its target on and has no head."""
    ids = [
        e.id
        for e in context_range(
            [entry(1), entry(2), entry(3, head=2), entry(4), entry(5, head=3), entry(6)]
        )
    ]
    assert ids == [5, 4, 6]


def test_a_head_at_itself_forgets_everything_before() -> None:
    """An entry whose head is itself begins the context."""
    assert [e.id for e in context_range([entry(1), entry(2, head=2), entry(3)])] == [2, 3]


@given(st.data())
@hypothesis_settings(max_examples=50, deadline=None)
def test_the_range_kept_entry_by_entry_is_the_one_derived_from_scratch(data: st.DataObject) -> None:
    """Extending the range by one entry gives what deriving it from the history gives."""
    entries: list[Entry] = []
    current: list[Entry] | None = []
    for id in range(1, data.draw(st.integers(1, 25)) + 1):
        head = data.draw(st.none() | st.integers(1, id))
        entries.append(entry(id, head=head))
        current = context_range(entries) if current is None else extend_range(current, entries[-1])
        if current is not None:
            assert current == context_range(entries)


# --- the exchange -----------------------------------------------------------------------------


def test_a_result_follows_its_call_whatever_was_interleaved() -> None:
    """Results directly follow their call, in call order, also when others spoke meanwhile."""
    messages = exchange(
        [
            entry(1, user("go")),
            entry(2, answer("calling", ["a", "b"])),
            entry(3, user("are you there?")),
            entry(4, result(2, 1, "second")),
            entry(5, answer("and more")),
            entry(6, result(2, 0, "first")),
        ]
    )
    assert shown(messages) == [
        "user go",
        "answer calling",
        "result (2, 0) first",
        "result (2, 1) second",
        "user are you there?",
        "answer and more",
    ]


def test_a_call_without_a_result_gets_one_that_says_so() -> None:
    """A call without a result gets an error result, a result without a call is dropped."""
    messages = exchange(
        [entry(1, user("go")), entry(2, answer("", ["a"])), entry(3, result(9, 0, "whose?"))]
    )
    assert shown(messages) == ["user go", "answer ", f"result (2, 0) {INTERRUPTED}"]
    last = messages[-1].message
    assert isinstance(last, ToolResultMessage)
    assert (last.is_error, last.code, last.name) == (True, "interrupted", "a")


def test_blank_text_is_left_out_or_stands_as_no_output() -> None:
    """Blank text is left out; a blank result, where something must stand, says "(no output)"."""
    messages = exchange(
        [
            entry(1, user("go"), UserMessage(blocks=(TextBlock(text="  "),), at_us=1)),
            entry(
                2,
                attrs.evolve(
                    answer("x", ["a"]),
                    blocks=(
                        TextBlock(text=" \n"),
                        ToolCallBlock(name="a", arguments={}),
                    ),
                ),
            ),
            entry(3, result(2, 0, "\t")),
        ]
    )
    assert shown(messages) == ["user go", "answer ", f"result (2, 0) {NO_OUTPUT}"]


def test_unfinished_answers_contribute_nothing() -> None:
    """Aborted, failed and deferred answers, thinking alone, and empty entries are left out."""
    statuses: tuple[AssistantStatus, ...] = ("aborted", "failed", "deferred")
    thinking = attrs.evolve(answer("x"), blocks=(ThinkingBlock(text="hm"),))
    messages = exchange(
        [
            entry(1, user("go")),
            *(entry(2 + n, answer("half", ["a"], status=s)) for n, s in enumerate(statuses)),
            entry(6, result(2, 0)),
            entry(7),
            entry(8, thinking),
            entry(9, answer("whole")),
        ]
    )
    assert shown(messages) == ["user go", "answer whole"]


def test_a_system_message_after_users_alone_moves_to_the_front() -> None:
    """A system message that only user messages precede moves to the front, a later one stays."""
    messages = exchange(
        [
            entry(1, user("a")),
            entry(2, user("b")),
            entry(3, system("first")),
            entry(4, answer("c")),
            entry(5, system("second")),
        ]
    )
    assert shown(messages) == ["system first", "user a", "user b", "answer c", "system second"]


def test_the_newest_edit_of_a_target_wins() -> None:
    """An edit omits or replaces what an entry contributes; of several the newest counts."""
    entries = [
        entry(1, user("secret")),
        entry(2, user("long")),
        entry(3, edits=(Edit(target=1), Edit(target=2, messages=(user("shorter"),)))),
        entry(4, edits=(Edit(target=2, messages=(user("short"),)),)),
        entry(5, user("last")),
    ]
    assert shown(exchange(entries)) == ["user short", "user last"]
    # An entry with a head stands first in the range, and is the newest all the same.
    summary = entry(6, user("summary"), head=1, edits=(Edit(target=2, messages=(user("gone"),)),))
    assert shown(exchange(context_range([*entries, summary]))) == [
        "user summary",
        "user gone",
        "user last",
    ]


def test_something_stands_where_an_answer_would_follow_an_answer() -> None:
    """Two answers in a row, and an answer at the beginning, get something to answer."""
    messages = exchange([entry(1, answer("a")), entry(2, user(" ")), entry(3, answer("b"))])
    expected = [f"user {NO_OUTPUT}", "answer a", f"user {NO_OUTPUT}", "answer b"]
    assert shown(messages) == expected


@given(histories())
@hypothesis_settings(max_examples=35, deadline=None)
def test_the_exchange_is_one_that_a_strict_provider_takes(entries: list[Entry]) -> None:
    """Whatever is in the transcript, the strictest provider takes the exchange with a question."""
    # C001, C002, C003, C065
    check_sendable(exchange(context_range([*entries, entry(99, user("and now?"))])))


# --- through a session ------------------------------------------------------------------------


def append(conversation: int, **options: Any) -> Any:
    return lambda tx: tx.append(conversation, Note("x"), **options)


async def check_range(session: Session, conversation: int) -> None:
    """What the session keeps is what the whole history gives."""
    whole = await session.history(conversation, limit=10_000)
    kept = await session.context_entries(conversation)
    assert [e.id for e in kept] == [e.id for e in context_range(whole)]


async def test_the_kept_range_is_the_derived_one_through_commits_and_reopening() -> None:
    """The range kept by a session equals that of the history, whatever heads come."""
    storage = MemoryStorage()
    draw = random.Random(3)
    ids: list[int] = []
    conversation = 0
    for _ in range(4):
        async with open_test_session(storage) as session:
            conversation = conversation or await new_conversation(session)
            for _ in range(40):
                head = None
                if ids and draw.random() < 0.15:
                    head = draw.choice(ids)
                elif draw.random() < 0.05:
                    head = 0
                body = append(conversation, head=head)
                ids.append(await session.run(session.transaction(), body))
                if draw.random() < 0.5:
                    await check_range(session, conversation)
            await check_range(session, conversation)
        storage = storage.reopen()


async def test_entries_that_arrive_while_a_range_is_read_are_in_it() -> None:
    """Entries published while two readers read a range are in both, each once."""

    class SlowReads(HeldBlocking):
        async def run(self, fn: Any, *args: Any) -> Any:
            done = fn(*args)
            await self._open.wait()
            return done

    blocking = SlowReads()
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        first = await commit_note(session, conversation, "first")
        session.blocking = blocking
        found: list[list[int]] = []

        async def read() -> None:
            found.append([e.id for e in await session.context_entries(conversation)])

        async with trio.open_nursery() as nursery:
            blocking.hold()
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            second = await session.run(session.transaction(), append(conversation, head=0))
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            # A head that reaches back before what the second reader has read.
            third = await session.run(session.transaction(), append(conversation, head=first))
            blocking.release()
        assert found == [[third, first], [third, first]]
        assert second not in found[0]
        await check_range(session, conversation)


async def test_an_entry_just_published_can_be_read_as_its_class() -> None:
    """An entry reads as its class, just published or read back."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        await session.context_entries(conversation)
        await commit_note(session, conversation, "typed")
        (kept,) = await session.context_entries(conversation)
        (read,) = await session.history(conversation)
        assert kept.read(Note) == read.read(Note) == Note("typed")
        assert kept == read


async def test_heads_and_edits_name_entries_of_the_history() -> None:
    """A head or an edit of an entry that is not in the conversation's history is refused."""
    async with open_test_session(MemoryStorage()) as session:
        here, elsewhere = await new_conversation(session), await new_conversation(session)
        foreign = await commit_note(session, elsewhere, "not here")
        for options in ({"head": foreign}, {"edits": (Edit(target=foreign),)}, {"head": 10**9}):
            with pytest.raises(NotFoundError, match="entry"):
                await session.run(session.transaction(), append(here, **options))

        def in_one_commit(tx: Transaction) -> None:
            earlier = tx.append(here, Note("x"))
            tx.append(here, Note("x"), head=earlier)

        await session.run(session.transaction(), in_one_commit)


async def test_a_fork_of_a_fork_sees_what_both_forks_see() -> None:
    """A history is each ancestor's entries as far as every fork below it reaches."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        parent = await new_conversation(session)
        ids = [await commit_note(session, parent, f"p{n}") for n in range(4)]
    store = storage.reopen()
    async with open_test_session(store) as session:
        child, grandchild = session.line.draw_id(), session.line.draw_id()
        own = session.line.draw_id()

        def fork(tx: Transaction) -> None:
            # Forks are the business of a later layer; the rows are what they will write.
            for id, above, at in ((child, parent, ids[2]), (grandchild, child, ids[1])):
                row = ConversationRow(id, f"u{id}", above, at, None, None, "", 1)
                tx.writes.append((Op.CONVERSATION, row))

        await session.run(session.transaction(), fork)
        later = await commit_note(session, child, "c")
        assert later > own
        await commit_note(session, parent, "p later")
        last = await commit_note(session, grandchild, "g")
        history = [e.id for e in await session.history(grandchild)]
        assert history == [*ids[:2], last]
        assert [e.id for e in await session.context_entries(grandchild)] == history
        assert [e.id for e in await session.history(child)] == [*ids[:3], later]
        page = await session.history(grandchild, limit=2)
        assert [e.id for e in page] == [ids[1], last]
        await session.run(session.transaction(), append(grandchild, head=ids[1]))
        with pytest.raises(NotFoundError):
            await session.run(session.transaction(), append(grandchild, head=ids[2]))


async def test_an_edit_that_could_not_be_read_again_is_refused() -> None:
    """A replacement is checked like a message of its own, and nothing is stored."""
    storage = MemoryStorage()
    async with open_test_session(storage) as session:
        conversation = await new_conversation(session)
        first = await commit_note(session, conversation, "x")
        bad: Any = UserMessage(blocks=(TextBlock(text=5),), at_us=1)  # type: ignore[arg-type]
        no_blocks: Any = UserMessage(blocks=None, at_us=1)  # type: ignore[arg-type]
        for edits, problem in (
            ([Edit(target=first, messages=(bad,))], r"edits\[0\].messages\[0\].blocks\[0\].text"),
            ([Edit(target=first, messages=bad)], r"edits\[0\].messages: expected a list"),
            ([Edit(target=first, messages=(no_blocks,))], r"messages\[0\].blocks: expected a list"),
            ([{"target": first}], r"edits\[0\].*expected an Edit"),
            (Edit(target=first), r"edits: expected a list"),
        ):
            with pytest.raises((NotJsonError, InvalidArgumentError), match=problem):
                await session.run(session.transaction(), append(conversation, edits=edits))

        assert [entry.id for entry in await session.history(conversation)] == [first]


async def test_what_is_appended_may_come_from_an_iterator() -> None:
    """Messages and edits that can be walked once are stored like a list of them."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        first = await commit_note(session, conversation, "x")
        said = UserMessage(blocks=(TextBlock(text="y"),), at_us=1)

        def body(tx: Transaction) -> None:
            messages: Any = (each for each in [said])
            edits: Any = (each for each in [Edit(target=first)])
            tx.append(conversation, kind="k", messages=messages, edits=edits)
            with pytest.raises(InvalidArgumentError, match="messages: expected a list"):
                tx.append(conversation, kind="k", messages=said)  # type: ignore[arg-type]

        await session.run(session.transaction(), body)
        stored = (await session.history(conversation))[-1]
        kept = (await session.context_entries(conversation))[-1]

    assert stored == kept
    assert (stored.messages, stored.edits) == ((said,), (Edit(target=first),))


async def test_an_entry_that_was_just_appended_reads_like_a_stored_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its data is parsed when somebody looks at it, once, and is that of the stored entry."""
    parsed: list[str] = []

    def counting(text: str) -> Any:
        parsed.append(text)
        return loads_stored(text)

    monkeypatch.setattr(_entries, "loads_stored", counting)
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        await session.context_entries(conversation)
        for text in ("first", "second"):
            await commit_note(session, conversation, text)
        first, second = await session.context_entries(conversation)
        assert parsed == []

        assert first.data == first.data == {"text": "first"}
        assert first.read(Note) == Note("first")
        assert parsed == ['{"text":"first"}']
        assert "data={'text': 'second'}" in repr(second)
        assert [first, second] == await session.history(conversation)
        assert attrs.evolve(second, data={"text": "another"}) != second
