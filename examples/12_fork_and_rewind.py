"""Second thoughts: a discussion that is rewound, forked in its middle, and made to forget.

Teaches: `conversation.fork(at=entry)`, which shares the history up to there at no cost; what the
three fork policies give a fork; `snapshot_as_of`, the value of a rewindable document at any entry;
and the two ways to change what a model sees, `edits` and `head`, which leave every entry as it was.

Run it with: python examples/12_fork_and_rewind.py
"""

from __future__ import annotations

from typing import Any

import attrs
import trio

from pidurable import Conversation, Edit, Harness, TextBlock, UserMessage, document, open_harness


@document("talk.plan", history="rewindable", fork="as_of")
@attrs.define
class Plan:
    steps: list[str] = attrs.Factory(list)


@document("talk.style", fork="current")
@attrs.define
class Style:
    tone: str = "neutral"


@document("talk.mood")  # fork="initial": a fork begins without one
@attrs.define
class Mood:
    smiles: int = 0


async def say(harness: Harness, talk: Conversation, text: str, **options: Any) -> int:
    """One entry, with what it does to the documents, in one commit."""
    message = UserMessage(blocks=(TextBlock(text=text),), at_us=0)
    async with harness.commit() as tx:
        (await tx.document(Plan, talk.id)).steps.append(text)
        (await tx.document(Mood, talk.id)).smiles += 1
        return tx.append(talk.id, kind="talk.said", messages=[message], **options)


async def seen(talk: Conversation) -> list[str]:
    """What a model would be sent."""
    messages = [each.message for each in await talk.context()]
    blocks = [block for each in messages if isinstance(each, UserMessage) for block in each.blocks]
    return [block.text for block in blocks if isinstance(block, TextBlock)]


async def main() -> None:
    async with open_harness(":memory:") as harness:
        talk = await harness.root()
        hut, tent, _ = [await say(harness, talk, text) for text in ("a hut", "a tent", "a castle")]
        async with harness.commit() as tx:
            (await tx.document(Style, talk.id)).tone = "frugal"
        print("as of the hut:", await harness.snapshot_as_of(Plan, talk.id, hut))

        fork = await talk.fork(at=tent)  # another way on from the tent
        print("the fork has:", *[harness.snapshot(cls, fork.id) for cls in (Plan, Style, Mood)])
        await say(harness, fork, "a campfire")
        print("the fork sees:", await seen(fork))
        print("the other sees:", await seen(talk))

        await say(harness, talk, "no hut after all", edits=[Edit(target=hut)])
        print("edited:", await seen(talk))
        await say(harness, talk, "forget all that", head=0)
        print("from its head:", await seen(talk))
        print("the fork still sees:", await seen(fork))
        print("entries:", len(await talk.history()), "and", len(await fork.history()))


if __name__ == "__main__":
    trio.run(main)
