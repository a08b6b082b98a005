"""The kept context: equal to the one from scratch, as of any entry, and fixed once it was taken."""

from __future__ import annotations

import os
import random
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings
from session_support import HeldBlocking, new_conversation, open_test_session
from transcript_support import (
    answer,
    check_sendable,
    entry,
    histories,
    picture,
    pictured_result,
    result,
    shown,
    system,
    user,
)

from pidurable.errors import InvalidArgumentError, NotFoundError
from pidurable.records._entries import Edit, Entry
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
)
from pidurable.session import _history
from pidurable.session._context import (
    Exchange,
    KeptRange,
    ModelContext,
    context_of,
    images_of,
    of_systems,
    system_places,
)
from pidurable.session._notes import note_in_place
from pidurable.session._session import Session
from pidurable.session._transcript import (
    INTERRUPTED,
    NO_OUTPUT,
    NOT_KNOWN,
    ContextMessage,
    context_range,
    exchange,
)
from pidurable.storage import MemoryStorage


def reference(history: list[Entry], cutoff: int, conversation: int) -> list[ContextMessage]:
    """The context as of an entry, from scratch."""
    seen = [e for e in history if e.id <= cutoff]
    return exchange(context_range(seen), conversation=conversation)


def check_context(context: ModelContext, expected: list[ContextMessage]) -> None:
    """A context is a sequence of exactly these messages, and knows its system messages."""
    assert list(context) == expected
    assert context[:] == expected
    assert len(context) == len(expected)
    systems = [item.message for item in expected if isinstance(item.message, SystemMessage)]
    assert list(context.systems()) == systems
    assert system_places(context) == [
        place for place, item in enumerate(expected) if isinstance(item.message, SystemMessage)
    ]
    # Kept from one context to the next, and made again where it would differ.
    assert of_systems(context, _systems_and_places) == (systems, system_places(context))
    assert images_of(context) == {
        block.blob
        for item in expected
        if not isinstance(item.message, SystemMessage)
        for block in item.message.blocks
        if isinstance(block, ImageBlock)
    }
    said = [item.message for item in expected if not isinstance(item.message, SystemMessage)]
    assert context.asks_something == (bool(said) and not isinstance(said[-1], AssistantMessage))


def _systems_and_places(context: ModelContext) -> tuple[list[SystemMessage], list[int]]:
    return list(context.systems()), system_places(context)


class Kept:
    """One conversation's context, kept as the session does, and compared after every entry."""

    def __init__(self, history: list[Entry]) -> None:
        self.history = history
        self.conversation = history[-1].conversation_id if history else 1
        self.compared = 0
        self._taken: list[tuple[ModelContext, list[ContextMessage]]] = []

    def play(self) -> None:
        """Publish the conversation's own entries one by one, and compare after each."""
        first = next(
            (n for n, e in enumerate(self.history) if e.conversation_id == self.conversation), 0
        )
        past = self.history[:first]
        kept = KeptRange(context_range(past))
        self._compare(kept, past)
        for count, each in enumerate(self.history[first:], first + 1):
            seen = self.history[:count]
            if not kept.publish(each):
                kept = KeptRange(context_range(seen))
            self._compare(kept, seen)
        for context, expected in self._taken:
            check_context(context, expected)

    def _compare(self, kept: KeptRange, seen: list[Entry]) -> None:
        if kept.exchange is None:
            made = Exchange(kept.entries, self.conversation)
            assert kept.adopt(made, kept.entries, len(kept.entries))
        assert kept.exchange is not None
        for cutoff in {0, *(e.id for e in seen)}:
            context = kept.exchange.as_of(cutoff)
            if context is None:
                # From before the last head or edit: the session derives it again.
                continue
            expected = reference(seen, cutoff, self.conversation)
            check_context(context, expected)
            check_sendable(expected)
            self._taken.append((context, expected))
            self.compared += 1


@given(histories())
@hypothesis_settings(max_examples=25, deadline=None)
def test_a_kept_context_is_the_one_from_scratch_after_every_entry(history: list[Entry]) -> None:
    """Entry by entry and as of any entry that it reaches back to, it is the one from scratch."""
    Kept(history).play()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_transcripts_give_contexts_that_every_provider_takes(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same over 1,500 histories, and a line that says how much was compared.

    `TRANSCRIPTS` in the environment says how many.
    """
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes half a minute; run it with -m slow")
    histories_max = int(os.environ.get("TRANSCRIPTS", "1500"))
    done = {"transcripts": 0, "contexts": 0}

    @given(histories())
    @hypothesis_settings(
        max_examples=histories_max,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def play(history: list[Entry]) -> None:
        kept = Kept(history)
        kept.play()
        done["transcripts"] += 1
        done["contexts"] += kept.compared

    play()
    with capsys.disabled():
        print(
            f"\ncontext: {done['transcripts']} transcripts, {done['contexts']} contexts equal to "
            "those from scratch and taken by the strict provider"
        )
    assert done["transcripts"] >= histories_max * 2 // 3


# --- one rule each ----------------------------------------------------------------------------


def context(*entries: Entry, conversation: int = 1) -> ModelContext:
    """The context of a history, which is also the one from scratch."""
    made = context_of(context_range(entries), conversation=conversation)
    assert list(made) == exchange(context_range(entries), conversation=conversation)
    return made


def codes(made: ModelContext) -> list[str | None]:
    """The codes of its results."""
    return [i.message.code for i in made if isinstance(i.message, ToolResultMessage)]


def test_an_image_counts_from_the_entry_that_shows_it() -> None:
    """Of a result that came before its call too, and never as of an entry before."""
    kept = KeptRange([])
    kept.exchange = Exchange([], 1)
    for each in (
        entry(1, picture("said")),
        entry(2, pictured_result(3, 0, "early")),
        entry(3, answer(calls=["look", "look"])),
        entry(4, pictured_result(3, 1, "late")),
        entry(5, pictured_result(9, 0, "of no call")),
    ):
        assert kept.publish(each)

    found = [kept.exchange.as_of(cutoff) for cutoff in range(6)]
    assert [None if each is None else images_of(each) for each in found] == [
        set(),
        {"said"},
        {"said"},
        {"said", "early"},
        {"said", "early", "late"},
        {"said", "early", "late"},
    ]


def test_a_call_whose_result_is_beyond_the_fork_point_is_not_known_in_the_branch() -> None:
    """In a fork inside a round the open calls say so; the fork's own calls are interrupted."""
    inside = [
        entry(1, user("go")),
        entry(2, answer("", ["a", "b"])),
        entry(3, result(2, 0, "before the fork")),
    ]
    own = [entry(4, user("and now?"), conversation=2), entry(5, answer("", ["c"]), conversation=2)]

    branch = context(*inside, *own, conversation=2)
    parent = context(*inside)

    assert shown(branch) == [
        "user go",
        "answer ",
        "result (2, 0) before the fork",
        f"result (2, 1) {NOT_KNOWN}",
        "user and now?",
        "answer ",
        f"result (5, 0) {INTERRUPTED}",
    ]
    assert shown(parent)[3] == f"result (2, 1) {INTERRUPTED}"
    assert codes(branch) == [None, "interrupted", "interrupted"]


def test_an_entry_with_data_alone_contributes_nothing() -> None:
    """What has no messages is in range and says nothing, at the end too."""
    data = Entry(id=2, conversation_id=1, seq=2, kind="k", data={"a": 1})

    made = context(entry(1, user("go")), data)

    assert shown(made) == ["user go"]
    assert made.cutoff == 2


def test_an_entry_with_several_messages_contributes_all_of_them() -> None:
    """Messages of one entry stand in their order; of two answers the second one only speaks."""
    made = context(
        entry(1, system("s"), user("a"), user("b")),
        entry(2, answer("x", ["t"]), result(2, 0), answer("y", ["u"]), user("c")),
    )

    assert shown(made) == [
        "system s",
        "user a",
        "user b",
        "answer x",
        "result (2, 0) done",
        "answer y",
        "user c",
    ]


def test_a_result_that_comes_before_its_call_is_found() -> None:
    """A head puts an entry first: a result in it still follows its call; the first one counts."""
    made = context(
        entry(1, user("go")),
        entry(2, answer("", ["a"])),
        entry(3, result(2, 0, "older")),
        entry(4, result(2, 0, "first in range"), head=1),
    )

    assert shown(made) == ["user go", "answer ", "result (2, 0) first in range"]


def test_a_reset_leaves_what_came_before_it_alone() -> None:
    """After a head to itself a result whose call is gone is dropped, and nothing else is left."""
    made = context(
        entry(1, user("go")),
        entry(2, answer("", ["a"])),
        entry(3, user("from here"), head=3),
        entry(4, result(2, 0)),
    )

    assert shown(made) == ["user from here"]


def test_an_edit_of_what_is_out_of_range_changes_nothing() -> None:
    """It is no reason to derive anything again either; an edit of something in range is."""
    entries = [entry(1, user("old")), entry(2, user("from here"), head=2)]
    exchange_of = context(*entries)._exchange

    assert exchange_of.add(entry(3, user("more"), edits=(Edit(target=1),)))
    assert not exchange_of.add(entry(4, edits=(Edit(target=3),)))
    assert not exchange_of.add(entry(5, edits=(Edit(target=2),)))


def test_an_edit_of_the_entry_with_the_head_counts() -> None:
    """The entry that starts the context can be replaced and left out like any other."""
    head = entry(2, user("summary"), head=1)

    assert shown(context(entry(1, user("a")), head, entry(3, edits=(Edit(target=2),)))) == [
        "user a"
    ]


def test_an_edit_may_give_an_answer_other_calls() -> None:
    """What stands in for an answer is its calls too: results of those that are gone are dropped."""
    instead = (answer("less", ["b"]),)
    made = context(
        entry(1, user("go")),
        entry(2, answer("", ["a", "b"])),
        entry(3, result(2, 0, "of the first")),
        entry(4, result(2, 1, "of a second")),
        entry(5, edits=(Edit(target=2, messages=instead),)),
    )

    assert shown(made) == ["user go", "answer less", "result (2, 0) of the first"]


def test_a_result_of_images_alone_stands_as_it_is() -> None:
    """Only what is blank becomes "(no output)"."""
    image = ImageBlock(blob="0" * 64, media_type="image/png")
    images = ToolResultMessage(call=(2, 0), name="t", blocks=(image,), is_error=False, at_us=1)
    none = ToolResultMessage(call=(2, 1), name="t", blocks=(), is_error=False, at_us=1)

    made = context(entry(1, user("go")), entry(2, answer("", ["a", "b"])), entry(3, images, none))

    assert [i.message.blocks for i in made if isinstance(i.message, ToolResultMessage)] == [
        (image,),
        (TextBlock(text=NO_OUTPUT),),
    ]


def test_a_context_that_was_taken_never_changes() -> None:
    """A result, a head and an edit that come later are in a later context alone."""
    kept = KeptRange([entry(1, user("go")), entry(2, answer("", ["a"]))])
    assert kept.adopt(Exchange(kept.entries, 1), kept.entries, 2)
    assert kept.exchange is not None
    before = kept.exchange.as_of()
    assert before is not None

    assert kept.publish(entry(3, result(2, 0)))
    after = kept.exchange.as_of()
    assert after is not None
    assert kept.publish(entry(4, edits=(Edit(target=1),)))
    assert kept.exchange is None
    assert kept.publish(entry(5, head=5))

    assert shown(before) == ["user go", "answer ", f"result (2, 0) {INTERRUPTED}"]
    assert shown(after) == ["user go", "answer ", "result (2, 0) done"]
    everything = list(after)
    assert [after[-1], after[0]] == [everything[2], everything[0]]
    with pytest.raises(IndexError):
        after[3]
    assert repr(after) == "<ModelContext of 3 messages as of entry 3>"


def test_a_note_stands_in_place_of_what_is_refused_and_the_exchange_stays_valid() -> None:
    """A user's item, a result and an answer with calls become notes; the prompt stays."""
    call = ToolCallBlock(name="a", arguments={"x": 1}, opaque={"id": "theirs"})
    called = attrs.evolve(answer("odd"), blocks=(ThinkingBlock(text="hm"), call))
    history = [
        entry(1, system("s"), user("bad")),
        entry(2, called),
        entry(3, attrs.evolve(result(2, 0), is_error=True)),
    ]
    notes = [note_in_place(each, "left out") for each in history]

    made = context(*history, entry(4, user("go on"), edits=tuple(notes)))

    assert shown(made) == [
        "system s",
        "user [left out]",
        "answer [left out]",
        "result (2, 0) [left out]",
        "user go on",
    ]
    check_sendable(made)
    noted = made[2].message
    assert isinstance(noted, AssistantMessage)
    assert noted.tool_calls == (attrs.evolve(call, opaque=None),)
    failed = made[3].message
    assert isinstance(failed, ToolResultMessage)
    assert failed.is_error
    for why in ("", "x" * 2_001, None):
        with pytest.raises(InvalidArgumentError, match="why"):
            note_in_place(history[0], why)  # type: ignore[arg-type]
    assert note_in_place(history[0], "x" * 2_000).target == 1


# --- through a session ------------------------------------------------------------------------


def message_for(draw: random.Random, ids: list[int]) -> Message:
    """Any message, with calls of a few names and results of calls that may be anywhere."""
    kind = draw.randrange(8)
    if kind < 3:
        return user(draw.choice(["hello", " ", "more"]))
    if kind < 5:
        status: Any = draw.choice(["complete", "complete", "complete", "aborted", "failed"])
        return answer(draw.choice(["text", ""]), ["a"] * draw.randrange(3), status=status)
    if kind < 7 and ids:
        return result(draw.choice(ids[-4:]), draw.randrange(2), draw.choice(["ok", " "]))
    return system(draw.choice(["s", "t"]))


class Transcripts:
    """A tree of conversations that grows at random, and what it must be, from scratch."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.storage = MemoryStorage()
        self.conversations: list[int] = []
        self.compared = 0

    async def play(self, *, openings: int = 2, commits: int = 12) -> None:
        for _ in range(openings):
            async with open_test_session(self.storage) as session:
                if not self.conversations:
                    self.conversations.append(await new_conversation(session))
                for _ in range(commits):
                    await self.step(session)
            self.storage = self.storage.reopen()

    async def step(self, session: Session) -> None:
        """Commit something somewhere, and look at a conversation."""
        draw = self.draw
        at = draw.choice(self.conversations)
        ids = [e.id for e in await session.history(at, limit=1000)]
        if ids and draw.random() < 0.12:
            await self.fork(session, at, draw.choice(ids))
        else:
            options: dict[str, Any] = {}
            if ids and draw.random() < 0.15:
                options["head"] = draw.choice([0, *ids])
            if ids and draw.random() < 0.15:
                instead = draw.choice([None, (), (message_for(draw, ids),)])
                options["edits"] = (Edit(target=draw.choice(ids), messages=instead),)
            said = [message_for(draw, ids) for _ in range(draw.choice([0, 1, 1, 2]))]
            await session.run(
                session.transaction(),
                lambda tx: tx.append(at, kind="k", messages=said, **options),
            )
        if draw.random() < 0.7:
            await self.compare(session, draw.choice(self.conversations))

    async def fork(self, session: Session, parent: int, entry_id: int) -> None:
        made = await session.run(session.transaction(), lambda tx: tx.fork(parent, entry_id))
        self.conversations.append(made)

    async def compare(self, session: Session, conversation: int) -> None:
        """Now, and as of every entry: equal to what the history gives, and sendable."""
        whole = await session.history(conversation, limit=1000)
        newest = await session.context(conversation)
        check_context(newest, reference(whole, 2**62, conversation))
        for cutoff in [0, *(e.id for e in whole)]:
            expected = reference(whole, cutoff, conversation)
            check_context(await session.context(conversation, cutoff), expected)
            check_sendable(expected)
            self.compared += 1


@pytest.mark.parametrize("entries_max", [0, 500])
async def test_contexts_as_of_every_entry_are_the_ones_from_scratch(
    monkeypatch: pytest.MonkeyPatch, entries_max: int
) -> None:
    """Over commits, heads, edits, forks and reopening; derived in a thread, and in the loop."""
    monkeypatch.setattr(_history, "_LOOP_ENTRIES_MAX", entries_max)
    for seed in range(4):
        await Transcripts(seed).play()


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_thousand_trees_of_conversations_have_contexts_that_every_provider_takes(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 random sessions, and a line that says how much was compared.

    `CONTEXT_SESSIONS` in the environment says how many.
    """
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes minutes; run it with -m slow")
    sessions = int(os.environ.get("CONTEXT_SESSIONS", "1000"))
    compared = 0
    for seed in range(sessions):
        transcripts = Transcripts(seed)
        await transcripts.play(openings=3, commits=20)
        compared += transcripts.compared
    with capsys.disabled():
        print(
            f"\ncontext in a session: {sessions} histories with forks, heads, edits and reopening, "
            f"{compared} contexts equal to those from scratch and taken by the strict provider"
        )
    assert compared > 100 * sessions


async def append(session: Session, conversation: int, *said: Message, **options: Any) -> int:
    """Append one entry."""
    made: int = await session.run(
        session.transaction(),
        lambda tx: tx.append(conversation, kind="k", messages=said, **options),
    )
    return made


async def test_one_more_entry_derives_nothing_again_and_reads_nothing() -> None:
    """The kept exchange grows by what is published; a head and an edit begin a new one."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        first = await append(session, conversation, user("go"))
        before = await session.context(conversation)
        called = await append(session, conversation, answer("", ["a"]))
        await append(session, conversation, result(called, 0))
        session.storage = None  # type: ignore[assignment]
        after = await session.context(conversation)
        as_of = await session.context(conversation, called)
        session.storage = session.writer._storage
        assert after._exchange is before._exchange is as_of._exchange
        await append(session, conversation, edits=(Edit(target=first),))
        edited = await session.context(conversation)
        assert edited._exchange is not before._exchange
        assert shown(edited) == [f"user {NO_OUTPUT}", "answer ", f"result ({called}, 0) done"]
        assert shown(before) == ["user go"]


async def test_what_a_reader_does_to_a_message_reaches_nobody_else() -> None:
    """Arguments, `opaque`, sections and schemas are copies; the record stays as it is."""
    call = ToolCallBlock(name="a", arguments={"x": [1]}, opaque={"o": [1]})
    said = attrs.evolve(answer("well"), blocks=(TextBlock(text="well", opaque=[1]), call))
    tool = ToolDeclaration(name="a", description="", schema={"type": "object"})
    told = SystemMessage(sections={"s": "text"}, tools_added=(tool,), at_us=1)

    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        for message in (user("go"), said, told):
            await append(session, conversation, message)
        context = await session.context(conversation)
        before = [repr(item) for item in context]
        for item in context:
            if isinstance(item.message, SystemMessage):
                item.message.sections["s"] = "other"
                item.message.tools_added[0].schema["type"] = "other"
                continue
            for block in item.message.blocks:
                if isinstance(block, ToolCallBlock):
                    block.arguments["x"].append(2)
                    block.opaque["o"] = None
                elif block.opaque is not None:
                    block.opaque.append(2)

        assert [repr(item) for item in context] == before
        assert [repr(item) for item in await session.context(conversation)] == before


async def test_a_head_that_comes_while_a_context_is_derived_counts() -> None:
    """A context that was overtaken by a head or an edit is derived again."""

    class SlowThread(HeldBlocking):
        async def run(self, fn: Any, *args: Any) -> Any:
            done = fn(*args)
            if fn is Exchange:
                await overtake()
            return done

    async with open_test_session(MemoryStorage(), blocking=SlowThread()) as session:
        conversation = await new_conversation(session)
        first = await append(session, conversation, user("a"))
        more: list[Any] = [{}, {"head": 0}, {"edits": (Edit(target=first),)}]

        async def overtake() -> None:
            if more:
                await append(session, conversation, user("b"), **more.pop())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_history, "_LOOP_ENTRIES_MAX", 0)
            made = await session.context(conversation)
        assert more == []
        assert shown(made) == ["user b", "user b"]
        assert made.cutoff == (await session.history(conversation))[-1].id


async def test_edits_of_an_ancestors_entries_in_a_fork_affect_the_fork_alone() -> None:
    """A fork edits what it has inherited, and may set a head behind its fork point."""
    transcripts = Transcripts(0)
    async with open_test_session(transcripts.storage) as session:
        parent = await new_conversation(session)
        first = await append(session, parent, user("a"))
        second = await append(session, parent, user("b"))
        await transcripts.fork(session, parent, second)
        (fork,) = transcripts.conversations
        await append(session, parent, user("of the parent"), edits=(Edit(target=second),))
        await append(session, fork, edits=(Edit(target=first, messages=(user("changed"),)),))

        assert shown(await session.context(fork)) == ["user changed", "user b"]
        assert shown(await session.context(parent)) == ["user a", "user of the parent"]

        await append(session, fork, user("from the second on"), head=second)

        assert shown(await session.context(fork)) == ["user from the second on", "user b"]
        assert shown(await session.context(fork, second)) == ["user a", "user b"]
        assert shown(await session.context(parent)) == ["user a", "user of the parent"]


async def test_a_cutoff_is_the_id_of_an_entry_and_a_context_that_of_a_conversation() -> None:
    """Anything else is refused; one after the newest entry is as of the newest."""
    async with open_test_session(MemoryStorage()) as session:
        conversation = await new_conversation(session)
        assert list(await session.context(conversation, 0)) == []
        made = await append(session, conversation, user("a"))

        assert (await session.context(conversation, 2**62)).cutoff == made
        for wrong in (-1, True, "1", 2**63, 1.0):
            with pytest.raises(InvalidArgumentError, match="cutoff"):
                await session.context(conversation, wrong)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError):
            await session.context(10**9)
