"""Judges what a history has left, from outside: documents, their past, transcripts, contexts.

Nothing here looks at how the product keeps any of it: everything is read as a host would read it,
and compared with what the model has.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import attrs
from expected_context import derive, first_difference as context_difference, turns_of
from history_actions import HistoryError
from history_documents import ALL_KINDS, BY_NAME, FAMILY_KEYS, KINDS, VERSIONS, Kind, plain
from history_model import Address, Line, Model, State
from history_stage import Stage
from history_values import difference

from pidurable.agent._models import ModelRequest, RequestMessage
from pidurable.agent._strict import StrictRequestError, check_request
from pidurable.errors import DocumentTooNewError, NotFoundError
from pidurable.records._entries import Entry
from pidurable.records._messages import TextBlock, ToolResultMessage, UserMessage

LOOKS = 6


@attrs.define(eq=False)
class Judge:
    """The judge of one history."""

    goal: str
    model: Model
    stage: Stage
    counts: Counter[str]
    rare: Counter[str]
    random: Random

    async def look(self) -> None:
        """Pages, strangers and the past of a few entries, warm: what is in memory may answer."""
        state = self.model.published
        for place in state.places:
            await self._look_at_a_page(state, place)
            await self._look_at_a_stranger(state, place)
        await self.look_back()

    async def look_back(self) -> None:
        """The past of a few entries, which no later commit changes."""
        state = self.model.published
        lines = [(place, line) for place in state.places for line in state.history(place)]
        for place, line in self.random.sample(lines, min(LOOKS, len(lines))):
            for kind in KINDS:
                if kind.rewindable:
                    version = self.random.randint(1, VERSIONS)
                    key = self.random.choice(FAMILY_KEYS) if kind.family else ""
                    await self._judge_past(place, line, kind, version, key)

    async def _look_at_a_page(self, state: State, place: int) -> None:
        """A part of a history: the newest entries between two of them."""
        history = [line.id for line in state.history(place)]
        if not history:
            return
        after, before = sorted(self.random.choices([0, *history, history[-1] + 1], k=2))
        limit = self.random.randint(1, 6)
        expected = [id for id in history if after < id < before][-limit:]
        found = await self.stage.harness.session.history(
            place, after=after, before=before, limit=limit
        )
        told = difference(expected, [entry.id for entry in found])
        if told:
            where = f"between {after} and {before}, {limit} at most"
            raise HistoryError(f"the history of conversation {place} {where}: {told}")

    async def _look_at_a_stranger(self, state: State, place: int) -> None:
        """The past as of an entry of another history is refused."""
        inside = {line.id for line in state.history(place)}
        others = [id for id in state.lines if id not in inside]
        if not others:
            return
        other = self.random.choice(others)
        cls = KINDS[0].classes[-1]
        try:
            await self.stage.harness.snapshot_as_of(cls, place, other)
        except NotFoundError:
            self.rare["refused to look as of a stranger"] += 1
            return
        raise HistoryError(f"conversation {place} has a past as of entry {other} of another one")

    async def judge_whole(self, when: str, *, cold: bool) -> None:
        """Everything there is, in today's shape."""
        try:
            state = self.model.published
            if self.goal == "rewind":
                self._judge_now(state)
                if cold or self.random.random() < 0.3:
                    await self._judge_all_past(state)
            for place in state.places:
                await self._judge_history(state, place)
            for name, data in state.blobs.items():
                if await self.stage.harness.blob(name) != data:
                    raise HistoryError(f"the blob {name} is not what was put")
            if self.goal == "context":
                await self.judge_contexts(list(state.places), cutoffs=2)
        except HistoryError as error:
            raise HistoryError(f"{when}: {error}") from error

    def _judge_now(self, state: State) -> None:
        session = self.stage.harness.session
        addresses = set(state.docs)
        for kind in ALL_KINDS:
            if kind.scope == "conversation":
                keys = FAMILY_KEYS if kind.family else ("",)
                addresses |= {(kind.name, place, key) for place in state.places for key in keys}
        for name, owner, key in sorted(addresses):
            found = plain(session.snapshot(BY_NAME[name].classes[-1], owner, key=key))
            expected = state.shown((name, owner, key), BY_NAME[name].newest)
            self.counts["values"] += 1
            told = difference(expected, found)
            if told:
                raise HistoryError(f"the document {name} of {owner} {key!r} now: {told}")

    async def _judge_all_past(self, state: State) -> None:
        for place in state.places:
            for line in state.history(place):
                self.counts["entries"] += 1
                for kind in ALL_KINDS:
                    if kind.rewindable:
                        for key in FAMILY_KEYS if kind.family else ("",):
                            await self._judge_past(place, line, kind, kind.newest, key)

    async def _judge_past(self, place: int, line: Line, kind: Kind, version: int, key: str) -> None:
        """What a document was at an entry, as code of a version sees it."""
        then = self.model.past.states[line.seq]
        address = (kind.name, line.conversation, key)
        session = self.stage.harness.session
        cls = kind.classes[version - 1]
        where = f"{kind.name} {key!r} of conversation {place} as of entry {line.id} (v{version})"
        self.counts["values"] += 1
        if then.too_new(address, version):
            try:
                await session.snapshot_as_of(cls, place, line.id, key=key)
            except DocumentTooNewError:
                self.rare["as of, too new"] += 1
                return
            raise HistoryError(f"{where}: a newer version was given to older code")
        found = plain(await session.snapshot_as_of(cls, place, line.id, key=key))
        expected = then.shown(address, version)
        told = difference(expected, found)
        if told:
            raise HistoryError(f"{where}: {told}")
        self._count_past(then, address, version)

    def _count_past(self, then: State, address: Address, version: int) -> None:
        doc, now = then.docs.get(address), self.model.published.docs.get(address)
        if doc is None:
            return
        if now is None:
            self.rare["as of, retired since"] += 1
        elif now.life != doc.life:
            self.rare["as of, an earlier incarnation"] += 1
        if doc.version < version:
            self.rare["as of, through a migration"] += 1

    async def _judge_history(self, state: State, place: int) -> None:
        record, known = self.stage.harness.session.conversation(place), state.places[place]
        parts = (record.parent, record.parent_entry, record.owner, record.principal)
        if parts != (known.parent, known.parent_entry, known.owner, known.principal):
            raise HistoryError(f"conversation {place}: expected {known}, found {record}")
        expected = state.history(place)
        found = await self.stage.harness.session.history(place, limit=100_000)
        told = difference([line.id for line in expected], [entry.id for entry in found])
        if told:
            raise HistoryError(f"the history of conversation {place}: {told}")
        for line, entry in zip(expected, found, strict=True):
            if _parts(entry) != (line.messages, line.data, line.head, line.edits):
                raise HistoryError(f"entry {line.id}: expected {line}, found {entry}")

    async def judge_contexts(self, places: list[int], *, cutoffs: int) -> None:
        state = self.model.published
        for place in places:
            history = state.history(place)
            await self._judge_context(place, history, None)
            for _ in range(cutoffs if history else 0):
                cutoff = self.random.choice(history).id
                if self.random.random() < 0.2:
                    # Between two of its entries, where others may stand.
                    cutoff = max(1, cutoff - 1)
                await self._judge_context(place, history, cutoff)

    async def _judge_context(self, place: int, history: list[Line], cutoff: int | None) -> None:
        where = f"the context of conversation {place}, cutoff {cutoff}"
        self.counts["contexts"] += 1
        messages = await self.context(place, cutoff)
        told = context_difference(derive(history, cutoff), turns_of(messages))
        if told:
            raise HistoryError(f"{where}: {told}")
        try:
            check_request(_request(messages))
        except StrictRequestError as error:
            raise HistoryError(f"{where}: {error}") from error

    async def context(self, place: int, cutoff: int | None) -> list[Any]:
        return list(await self.stage.harness.session.context(place, cutoff=cutoff))


def _parts(entry: Entry) -> tuple[Any, ...]:
    edits = tuple((edit.target, edit.messages) for edit in entry.edits)
    return entry.messages, entry.data, entry.head, edits


def _request(messages: list[Any]) -> ModelRequest:
    """A request with these messages and a question at the end."""
    question = RequestMessage(
        message=UserMessage(blocks=(TextBlock(text="and now?"),), at_us=1), entry=None
    )
    sent = tuple(
        RequestMessage(
            message=item.message,
            entry=item.message.call[0]
            if isinstance(item.message, ToolResultMessage)
            else item.entry,
        )
        for item in messages
    )
    return ModelRequest(model="m", messages=(*sent, question))
