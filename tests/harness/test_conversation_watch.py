"""The conversation view: exact patches, a page that costs what is added, forks, and its ends."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import Any

import pytest
import trio
import trio.lowlevel
from agent_world import World, ask, calls
from hypothesis import given, settings as hypothesis_settings, strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from pidurable import AgentChange, ConversationView, Edit, Frame, Watch, open_harness, patch
from pidurable.agent._documents import InboxDocument, LiveDocument, update_doc
from pidurable.agent._script import Step
from pidurable.errors import NestedCommitError, NotFoundError, SessionPoisonedError
from pidurable.harness._conversation import Conversation
from pidurable.harness._open import Harness
from pidurable.harness._views import HistoryPage
from pidurable.records._entries import Entry
from pidurable.records._json import dumps
from pidurable.records._limits import VIEW_PAGE_ENTRIES, WATCH_FRAMES_MAX
from pidurable.records._messages import (
    AssistantMessage,
    TextBlock,
    ToolCallBlock,
    Usage,
    UserMessage,
)
from pidurable.session._grown import Grown
from pidurable.storage import MemoryStorage


async def note(harness: Harness, conversation: Conversation, count: int = 1, **more: Any) -> int:
    """Append some entries in one commit, and return the id of the last."""
    async with harness.commit() as tx:
        for number in range(count):
            last = tx.append(conversation.id, {"n": number}, kind="test.note", **more)
    return last


def taken(watch: Watch[Any]) -> list[Frame[Any]]:
    """The frames that wait to be taken, without waiting."""
    frames = []
    while (frame := watch._take_nowait()) is not None:
        frames.append(frame)
    return frames


def patched(first: Any, frames: list[Frame[Any]]) -> Any:
    """The first value, with the patch of each frame applied, as a remote client would."""
    for frame in frames:
        first = patch.apply(first, json.loads(dumps(frame.patch)))
    return first


async def view_of(conversation: Conversation) -> dict[str, Any]:
    """The view as somebody sees it who begins to watch now."""
    async with conversation.watch() as watch:
        found: dict[str, Any] = watch.json()
        return found


async def test_what_a_consumer_does_to_a_message_reaches_nobody_else() -> None:
    """Arguments and opaque JSON of an entry's messages and edits are a copy for each who looks."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        call = ToolCallBlock(name="t", arguments={"a": [1]}, opaque={"id": ["x"]})
        told = [
            AssistantMessage(
                blocks=(call,),
                status="complete",
                stop_reason="tool_use",
                model="scripted/x",
                usage=Usage(),
                at_us=1,
            )
        ]
        async with root.watch() as watch, root.watch() as other:
            first = await note(harness, root, messages=told)
            await note(harness, root, edits=[Edit(target=first, messages=tuple(told))])
            before = await view_of(root)
            for entry in (await anext(watch), await anext(watch))[-1].value.history:
                for message in (*entry.messages, *(m for e in entry.edits for m in e.messages)):
                    message.blocks[0].arguments["a"].append("mine")
                    message.blocks[0].opaque["id"].append("mine")

            assert await view_of(root) == before
            assert patched(other.json(), taken(other)) == before
            context = repr(list(await root.context()))
            assert "'a': [1]" in context
            assert "mine" not in context
            assert "mine" not in repr(await root.history())


async def test_a_view_says_where_a_conversation_stands() -> None:
    """The record, the newest entries, the place of the head and the documents are in the view."""
    async with open_harness(":memory:") as harness:
        root = await harness.root(agent=AgentChange(model="scripted/x"))
        said = UserMessage(blocks=(TextBlock(text="hello"),), at_us=5)
        first = await note(harness, root, messages=[said])
        second = await note(harness, root, head=first, edits=[Edit(target=first)])

        async with root.watch() as watch:
            view = watch.value
            shown = watch.json()

        assert view.record == root.record
        assert list(view.history) == await root.history()
        assert not view.history.earlier
        assert view.head is not None
        assert (view.head.entry, view.head.start) == (second, first)
        assert view.documents["pi.agent"]["model"] == "scripted/x"
        assert view.documents["pi.live"] is None
        assert set(shown) == {"conversation", "history", "head", "documents"}
        assert shown["conversation"]["key"] == "root"
        assert shown["head"] == {"entry": second, "start": first}
        assert shown["documents"]["pi.usage"] is None
        one, two = shown["history"]["entries"]
        assert one["messages"] == [
            {
                "role": "user",
                "blocks": [{"type": "text", "text": "hello", "opaque": None}],
                "at_us": 5,
            }
        ]
        assert two["edits"] == [{"target": first, "messages": None}]
        # It can be sent as it is.
        assert json.loads(dumps(shown)) == shown


async def test_a_long_answer_is_in_the_view_and_its_growth_in_the_patches(
    autojump_clock: MockClock,
) -> None:
    """Each frame of an answer of 64 Ki characters is plain JSON, and its patch what was added."""
    world = World(Step(text=("0123456789abcdef" * 256,) * 16, delay=0.05))

    async with world.open() as harness:
        root = await harness.root()
        async with root.watch() as watch:
            first = watch.json()
            await ask(harness, "go")
            frames = taken(watch)

    for frame in frames:
        assert json.loads(dumps(frame.json())) == frame.json()
    grown = [op for frame in frames for op in frame.patch if op["op"] == "append"]
    assert len(grown) >= 5
    assert all(len(op["value"]) <= 4 * 4096 for op in grown)
    assert patched(first, frames) == frames[-1].json()


async def test_a_commit_copies_no_long_text_for_those_who_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text that grows is put together by who looks at it, never by the commit that grows it."""
    copies: list[int] = []
    value = Grown.value

    def counted(held: Grown) -> Any:
        copies.append(1)
        return value(held)

    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            blocks = [{"type": "text", "text": "x" * 100_000}]
            update_doc(tx, LiveDocument, root.id, partial={"blocks": blocks})
        async with root.watch() as watch, harness.watch(LiveDocument, root.id) as live:
            first = watch.json()
            monkeypatch.setattr(Grown, "value", counted)
            for _ in range(5):
                async with harness.commit() as tx:
                    tx.append_text(LiveDocument, root.id, "/partial/blocks/0/text", "more")
            frames = taken(watch)
            assert [len(frame.patch) for frame in frames] == [1] * 5
            assert taken(live)[0].patch == [
                {"op": "append", "path": "/partial/blocks/0/text", "value": "more"}
            ]
            assert copies == []
            assert patched(first, frames) == frames[-1].json()
            assert copies


async def test_events_that_are_followed_later_begin_with_where_it_stands_by_then() -> None:
    """Commits that were only watched as views are in the snapshot that events begin with."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with root.watch():
            first = await note(harness, root)
            async with root.events() as batches:
                early = await anext(batches)
            second = await note(harness, root)
            async with root.events() as batches:
                late = await anext(batches)

    assert [[entry.id for entry in told.entries] for (told,) in (early, late)] == [
        [first],
        [first, second],
    ]


async def test_who_falls_far_behind_is_given_what_a_new_watcher_sees() -> None:
    """Heads, documents and pages that passed meanwhile are in the whole frame, as by now."""
    async with open_harness(":memory:") as harness:
        root = await harness.root(agent=AgentChange(model="scripted/x"))
        first = await note(harness, root)
        async with root.watch() as watch:
            for _ in range(WATCH_FRAMES_MAX + 1):
                await note(harness, root)
            head = await note(harness, root, head=first)
            await root.configure(AgentChange(model="scripted/y"))
            for _ in range(3):
                await note(harness, root, VIEW_PAGE_ENTRIES - 1)
            frame = await anext(watch)
            fresh = await view_of(root)
            await note(harness, root)
            following = await anext(watch)
            after = await view_of(root)

    assert frame.whole
    assert frame.json() == fresh
    assert fresh["head"] == {"entry": head, "start": first}
    assert fresh["documents"]["pi.agent"]["model"] == "scripted/y"
    assert not following.whole
    assert patched(fresh, [following]) == after


async def test_a_frame_adds_what_was_appended_and_removes_what_left_the_page() -> None:
    """One more entry is one operation; behind a full page, the oldest entry leaves with it."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with root.watch() as watch:
            first = watch.json()
            await note(harness, root)
            frame = await anext(watch)
            assert [(op["op"], op["path"]) for op in frame.patch] == [("add", "/history/entries/-")]
            await note(harness, root, VIEW_PAGE_ENTRIES - 1)
            await note(harness, root)
            full, over = taken(watch)
            assert [(op["op"], op["path"]) for op in over.patch] == [
                ("remove", "/history/entries/0"),
                ("add", "/history/entries/-"),
                ("replace", "/history/earlier"),
            ]
            assert patched(first, [frame, full, over]) == watch._hub.value.json()

        assert (len(full.value.history), full.value.history.earlier) == (200, False)
        assert (len(over.value.history), over.value.history.earlier) == (200, True)
        page = over.value.history
        (oldest,) = await root.history(before=page[0].id)
        assert oldest.id == frame.value.history[0].id


@pytest.mark.parametrize("count", [199, 200, 201, 450])
async def test_a_commit_of_many_entries_is_patched_too(count: int) -> None:
    """Whether some or all of the page is new, the patch leads there."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        await note(harness, root, 150)
        async with root.watch() as watch:
            first = watch.json()
            await note(harness, root, count)
            (frame,) = taken(watch)

        assert patched(first, [frame]) == frame.json() == await view_of(root)
        assert len(frame.value.history) == VIEW_PAGE_ENTRIES


def _entries(count: int) -> list[Entry]:
    return [Entry(id=number, conversation_id=1, seq=1, kind="n") for number in range(count)]


@pytest.mark.parametrize("length", [10, 100_000])
def test_one_more_entry_costs_the_same_in_any_transcript(length: int) -> None:
    """A page shares its list with the one before it, and moves to a new one once in 800 entries."""
    page = HistoryPage._of(_entries(min(length, VIEW_PAGE_ENTRIES + 1)))
    lists: list[Any] = []
    pages: list[HistoryPage] = []
    for number in range(5_000):
        page = page._grown(_entries(1))
        pages.append(page)
        if not lists or lists[-1] is not page._entries:
            lists.append(page._entries)
        if number == 1_000:
            kept, kept_ids = page, [entry.id for entry in page]

    assert len(lists) <= 1 + 5_000 / 800 + 1
    assert max(map(len, lists)) <= 5 * VIEW_PAGE_ENTRIES
    # What was handed out stays as it was.
    assert [entry.id for entry in kept] == kept_ids
    assert len(page) == VIEW_PAGE_ENTRIES


def test_a_page_is_a_sequence() -> None:
    """Indexes, slices and comparison go by the window, whatever stands behind it."""
    entries = _entries(5)
    page = HistoryPage(entries, 1, 4, earlier=True)

    assert [entry.id for entry in page] == [1, 2, 3]
    assert (page[0].id, page[-1].id) == (1, 3)
    assert [entry.id for entry in page[1:]] == [2, 3]
    assert [entry.id for entry in page[-2:]] == [2, 3]
    assert entries[2] in page
    assert entries[4] not in page
    assert page == HistoryPage(entries[1:4], 0, 3, earlier=True)
    assert page != HistoryPage(entries[1:4], 0, 3, earlier=False)
    assert page != [1]
    for index in (3, -4):
        with pytest.raises(IndexError):
            page[index]
    assert "and earlier ones" in repr(page)


async def test_a_run_is_seen_in_the_view_of_its_conversation(autojump_clock: MockClock) -> None:
    """Over a whole run, with streams and calls, patches lead from the first view to the last."""
    world = World(calls("safe", text="look"), Step(text=tuple("abcdefgh"), delay=0.05))
    async with world.open() as harness:
        root = await harness.root()
        other = await harness.create_conversation()
        async with root.watch() as watch, other.watch() as quiet:
            first = watch.json()
            await ask(harness, "go")
            await harness.wait_for_idle()
            frames = taken(watch)
            assert taken(quiet) == []
        assert patched(first, frames) == frames[-1].json() == await view_of(root)
        grown = [op for frame in frames for op in frame.patch if op["op"] == "append"]
        assert {op["path"] for op in grown} == {"/documents/pi.live/partial/blocks/0/text"}
        assert [frame.seq for frame in frames] == sorted({frame.seq for frame in frames})


async def test_a_fork_shows_the_history_that_it_shares() -> None:
    """Entries of ancestors are part of the page and of the head, and later ones of them are not."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        start = await note(harness, root, 150)
        at = await note(harness, root, head=start)
        await note(harness, root, head=0)
        fork = await root.fork(at)
        async with fork.watch() as watch:
            first = watch.json()
            assert [entry.id for entry in watch.value.history] == [
                entry.id for entry in await fork.history()
            ]
            assert watch.value.history[-1].id == at
            assert first["head"] == {"entry": at, "start": start}
            await note(harness, root)
            assert taken(watch) == []
            await note(harness, fork, 100)
            (frame,) = taken(watch)

        assert patched(first, [frame]) == await view_of(fork)
        assert frame.value.history.earlier
        assert frame.value.history[0].conversation_id == root.id


async def test_operations_on_documents_are_those_of_the_commit() -> None:
    """Each operation comes as it was stored, with its places below the document."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            update_doc(tx, LiveDocument, root.id, turn=3)
        async with root.watch() as watch:
            first = watch.json()
            async with harness.commit() as tx:
                tx.patch(LiveDocument, root.id, [{"op": "copy", "from": "/turn", "path": "/retry"}])
            (frame,) = taken(watch)

        assert frame.patch == [
            {"op": "copy", "from": "/documents/pi.live/turn", "path": "/documents/pi.live/retry"}
        ]
        assert patched(first, [frame]) == frame.json()
        assert frame.value.documents["pi.live"]["retry"] == 3


async def test_documents_that_end_and_begin_anew_are_exact() -> None:
    """A document that is retired is null, and one that takes its place in the commit is whole."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with root.watch() as watch:
            first = watch.json()
            async with harness.commit() as tx:
                update_doc(tx, InboxDocument, root.id, items=[1])
            async with harness.commit() as tx:
                tx.retire(InboxDocument, root.id)
                update_doc(tx, InboxDocument, root.id, items=[2])
            async with harness.commit() as tx:
                tx.retire(InboxDocument, root.id)
            frames = taken(watch)

        assert [frame.json()["documents"]["pi.inbox"] for frame in frames] == [
            {"items": [1]},
            {"items": [2]},
            None,
        ]
        for number in range(4):
            assert patched(first, frames[:number]) == (
                frames[number - 1].json() if number else first
            )


steps = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(1, 90)),
        st.tuples(st.just("head"), st.integers(0, 400)),
        st.tuples(st.just("live"), st.text("ab/~", max_size=3)),
        st.tuples(st.just("fork"), st.integers(0, 400)),
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=12,
)


@hypothesis_settings(max_examples=12)
@given(steps)
def test_the_first_view_and_all_patches_make_the_last(program: list[tuple[str, Any]]) -> None:
    """Whatever happens to a conversation, its view is what somebody sees who looks anew."""
    trio.run(_follow, program)


async def _follow(program: list[tuple[str, Any]]) -> None:
    storage = MemoryStorage()
    rest = list(program)
    id: int | None = None
    while rest or id is None:
        async with open_harness(storage) as harness:
            here = await harness.root() if id is None else harness.conversation(id)
            id = here.id
            async with here.watch() as watch:
                first = watch.json()
                while rest and rest[0][0] not in ("reopen", "fork"):
                    await _step(harness, here, *rest.pop(0))
                frames = taken(watch)
                assert patched(first, frames) == watch._hub.value.json()
            assert patched(first, frames) == await view_of(here)
            if rest:
                name, number = rest.pop(0)
                if name == "fork":
                    entries = await here.history()
                    at = entries[number % len(entries)].id if entries else None
                    id = (await here.fork(at)).id
        storage = storage.reopen()


async def _step(harness: Harness, here: Conversation, name: str, value: Any) -> None:
    if name == "note":
        await note(harness, here, value)
    elif name == "head":
        entries = await here.history()
        await note(harness, here, head=entries[value % len(entries)].id if entries else 0)
    else:
        async with harness.commit() as tx:
            update_doc(tx, LiveDocument, here.id, retry={value: value})


# --- one point of the line, sharing, ends -----------------------------------------------------


async def test_watches_that_begin_among_commits_miss_nothing() -> None:
    """Whenever a view begins to be watched, its entries and those of its frames have no gap."""
    async with open_harness(":memory:") as harness, trio.open_nursery() as nursery:
        root = await harness.root()
        ended: list[list[int]] = []

        async def follow(turns: int) -> None:
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            async with root.watch() as watch:
                first, frames = watch.json(), []
                while len(watch.value.history) < 60:
                    frames.append(await anext(watch))
                assert patched(first, frames) == watch.json()
            ended.append([entry["id"] for entry in watch.json()["history"]["entries"]])

        for turns in range(30):
            nursery.start_soon(follow, turns)
        for _ in range(60):
            nursery.start_soon(note, harness, root)
            await trio.lowlevel.checkpoint()
        while len(ended) < 30:
            await trio.lowlevel.checkpoint()
        assert ended == [[entry.id for entry in await root.history()]] * 30


async def test_frames_are_shared_by_views_and_events_by_streams() -> None:
    """Two who watch get one frame; two who follow events get one batch, made once."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with (
            root.watch() as one,
            root.watch() as two,
            root.events() as events,
            root.events() as more,
        ):
            await anext(events)
            await anext(more)
            await note(harness, root)
            assert await anext(one) is await anext(two)
            assert await anext(events) is await anext(more)
            assert len(harness._watches._watched) == 1
        assert harness._watches._watched == {}


async def test_a_commit_looks_only_at_what_it_touches() -> None:
    """Of many watched conversations, a commit to one gives one of them something to do."""
    async with open_harness(":memory:") as harness, trio.open_nursery() as nursery:
        conversations = [await harness.create_conversation() for _ in range(20)]

        async def follow(conversation: Conversation, task_status: Any) -> None:
            async with conversation.watch() as watch:
                task_status.started(watch)
                await trio.sleep_forever()

        watches = [await nursery.start(follow, each) for each in conversations]
        published: list[int] = []
        for id, watched in harness._watches._watched.items():
            publish = watched.publish

            def counted(seq: int, changes: Any, id: int = id, publish: Any = publish) -> None:
                published.append(id)
                publish(seq, changes)

            watched.publish = counted  # type: ignore[method-assign]
        await note(harness, conversations[7])
        assert published == [conversations[7].id]
        assert [len(taken(watch)) for watch in watches] == [int(n == 7) for n in range(20)]
        nursery.cancel_scope.cancel()


async def test_a_stalled_view_is_one_whole_frame_and_holds_no_old_pages() -> None:
    """After more frames than are kept, the newest view comes whole; the ones before are gone."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with root.watch() as watch:
            first = watch.json()
            for _ in range(WATCH_FRAMES_MAX + 20):
                await note(harness, root)
            gc.collect()
            views = [each for each in gc.get_objects() if type(each) is ConversationView]
            # What it was given first, and the newest.
            assert len([view for view in views if view.record == root.record]) <= 3
            (frame,) = taken(watch)
            assert frame.whole
            assert frame.seq == harness.session.line.published_seq
            assert patched(first, [frame]) == await view_of(root)


async def test_what_is_noted_for_stalled_watchers_is_bounded() -> None:
    """Of what passes while nobody takes frames a page is kept, and no submission."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with root.watch() as watch, root.events() as events:
            await anext(events)
            for _ in range(WATCH_FRAMES_MAX + 1):
                await note(harness, root)
            watched = harness._watches._watched[root.id]
            for _ in range(30):
                await note(harness, root, 50)
                assert watched._late is not None
                assert len(watched._late.entries) <= 3 * VIEW_PAGE_ENTRIES
            settled = await (await root.submit("nobody answers")).wait()
            assert settled.status == "unanswered"
            assert watched._late is not None
            assert watched._late.submissions == []
            (frame,) = taken(watch)
            ((snapshot,),) = [await anext(events)]

        assert frame.json() == await view_of(root)
        assert list(frame.value.history) == list(snapshot.entries) == await root.history()


async def test_events_that_are_followed_keep_a_stalled_view_new() -> None:
    """A view that nobody takes is the newest when it is taken, while others take the events."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        async with root.watch() as watch, root.events() as events:
            await anext(events)
            for _ in range(WATCH_FRAMES_MAX + 20):
                last = await note(harness, root)
                (told,) = await anext(events)
                assert told.entry.id == last
            (frame,) = taken(watch)

        assert frame.whole
        assert frame.value.history[-1].id == last
        assert frame.json() == await view_of(root)


async def test_closing_ends_views_and_events_and_poison_raises() -> None:
    """Who watches is told how the session ended: by an end, or by the error."""
    raised: list[str] = []

    async def follow(harness: Harness, how: str, task_status: Any) -> None:
        root = await harness.root()
        try:
            async with getattr(root, how)() as watch:
                task_status.started()
                async for _ in watch:
                    pass
            raised.append("ended")
        except SessionPoisonedError as error:
            raised.append(str(error))

    for poison in (False, True):
        async with trio.open_nursery() as nursery:
            with contextlib.suppress(SessionPoisonedError):
                async with open_harness(":memory:") as harness:
                    await harness.root()
                    await nursery.start(follow, harness, "watch")
                    await nursery.start(follow, harness, "events")
                    if poison:
                        harness.session.line.set_poison(SessionPoisonedError("s", "a test"))
                    await wait_all_tasks_blocked()
    ended, told = raised[:2], raised[2:]
    assert ended == ["ended"] * 2
    assert len(told) == 2
    assert all("a test" in text for text in told)


async def test_what_cannot_be_watched_is_refused() -> None:
    """An unknown conversation, and a watch within the body of a commit, raise at once."""
    async with open_harness(":memory:") as harness:
        root = await harness.root()
        with pytest.raises(NotFoundError, match="conversation 99"):
            async with Conversation(harness, 99).watch():
                pass
        async with harness.commit():
            with pytest.raises(NestedCommitError):
                async with root.watch():
                    pass
