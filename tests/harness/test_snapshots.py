"""What a harness reads of documents: what they are now, and what they were."""

from __future__ import annotations

import attrs
import pytest
from agent_world import World

from pidurable.errors import InvalidArgumentError, NotFoundError
from pidurable.session._documents import document


@document("snap.page", history="rewindable")
@attrs.define
class Page:
    text: str = ""


@document("snap.flat")
@attrs.define
class Flat:
    text: str = ""


@document("snap.session", scope="session", family=True)
@attrs.define
class OfSession:
    text: str = ""


async def test_a_host_reads_what_is_and_what_was() -> None:
    """The value of now, the value at an entry, after a retirement too; reading creates nothing."""
    world = World()
    async with world.open() as harness:
        conversation = await harness.root()
        entries: list[int] = []
        for text in ("one", "two"):
            async with harness.commit() as tx:
                (await tx.document(Page, conversation.id)).text = text
                (await tx.document(OfSession, key="k")).text = text
                entries.append(tx.append(conversation.id, {}, kind="note"))
        assert harness.snapshot(Page, conversation.id) == Page("two")
        assert harness.snapshot(OfSession, key="k") == OfSession("two")
        async with harness.commit() as tx:
            tx.retire(Page, conversation.id)
        fork = await conversation.fork()
        seq = harness.session.line.published_seq

        assert harness.snapshot(Page, conversation.id) is None
        assert harness.snapshot(Flat, conversation.id) is None
        for id in (conversation.id, fork.id):
            for entry, text in zip(entries, ("one", "two"), strict=True):
                assert await harness.snapshot_as_of(Page, id, entry) == Page(text)
        assert harness.session.line.published_seq == seq
        assert world.storage.document("snap.flat", 1, conversation.id, "") is None
    async with world.open() as harness:
        assert await harness.snapshot_as_of(Page, fork.id, entries[0]) == Page("one")
        assert harness.snapshot(OfSession, key="k") == OfSession("two")


async def test_a_wrong_question_is_told_what_is_wrong() -> None:
    """A document without a past, an unknown entry or conversation, no id, no key."""
    async with World().open() as harness:
        id = (await harness.root()).id
        with pytest.raises(InvalidArgumentError, match="rewindable"):
            await harness.snapshot_as_of(Flat, id, 1)
        with pytest.raises(NotFoundError, match="entry"):
            await harness.snapshot_as_of(Page, id, id)
        for wrong in (0, True, "1", None):
            with pytest.raises(InvalidArgumentError, match="belongs to a conversation"):
                harness.snapshot(Page, wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="key"):
            harness.snapshot(OfSession)
        with pytest.raises(InvalidArgumentError, match="@document"):
            harness.snapshot(int)
