"""The messages of a request, made of a context when they are looked at.

A request is prepared in every turn, and a context may have thousands of messages. So preparing one
costs the same however many there are: a message is taken from the context, with JSON of the
request's own, when somebody asks for it, and is kept for who asks again. A provider that sends them
looks at all of them, once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final, overload

import attrs

from pidurable.agent._models import RequestMessage, render_system_message
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    SystemMessage,
    ToolCallBlock,
    ToolResultMessage,
)
from pidurable.session._context import images_of, of_systems, system_places

if TYPE_CHECKING:
    from pidurable.session._context import ModelContext
    from pidurable.session._transcript import ContextMessage

_NOT_SENDABLE = re.compile(r"[^a-zA-Z0-9_-]")
_NAME_CHARACTERS_MAX = 64


@final
class RequestMessages(Sequence[RequestMessage]):
    """What a request says after its system prompt: a sequence that equals a tuple of the same.

    What is done to the JSON of a message stays in this request.
    """

    __slots__ = ("_context", "_left_out", "_length", "_made")
    __hash__ = None  # type: ignore[assignment]  # the JSON of a message has none either

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self._left_out = of_systems(context, left_out)
        """Of each message of the context that is left out, how many stand before it here."""
        self._length = len(context) - len(self._left_out)
        self._made: dict[int, RequestMessage] = {}

    def images(self) -> set[str]:
        """The SHA-256 of every image that is shown; what shows none is not looked at."""
        return images_of(self._context)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> RequestMessage: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RequestMessage, ...]: ...

    def __getitem__(self, index: int | slice) -> RequestMessage | tuple[RequestMessage, ...]:
        if isinstance(index, slice):
            return tuple([self._at(place) for place in range(*index.indices(self._length))])
        place = index + self._length if index < 0 else index
        if not 0 <= place < self._length:
            raise IndexError(f"message {index} of a request of {self._length}")
        return self._at(place)

    def __iter__(self) -> Iterator[RequestMessage]:
        made = self._made
        if made:
            for place in range(self._length):
                yield self._at(place)
            return
        # Nobody has looked yet, and whoever sends looks at all of them: the context in order.
        skipped = {place + before for before, place in enumerate(self._left_out)}
        number = 0
        for place, item in enumerate(self._context):
            if place in skipped:
                continue
            # Unless it was looked at meanwhile.
            yield made.get(number) or self._make(number, item)
            number += 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RequestMessages | tuple):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # Of what is elsewhere, nothing goes along: a tuple of the messages.
        return tuple, (list(self),)

    def _at(self, number: int) -> RequestMessage:
        found = self._made.get(number)
        if found is None:
            place = number + bisect_right(self._left_out, number)
            found = self._make(number, self._context[place])
        return found

    def _make(self, number: int, item: ContextMessage) -> RequestMessage:
        message = item.message
        # A result is known by its call.
        entry = message.call[0] if isinstance(message, ToolResultMessage) else item.entry
        made = RequestMessage(message=_sendable(message), entry=entry)
        self._made[number] = made
        return made


def left_out(context: ModelContext) -> list[int]:
    """Of each message of a context that no request says, how many stand before it in one."""
    places: list[int] = []
    for place, message in zip(system_places(context), context.systems(), strict=True):
        # The first one is the prompt. Of the others, one that only changed the tools says nothing:
        # each request declares them as they are.
        if place == 0 or not render_system_message(message).strip():
            places.append(place)
    return [place - before for before, place in enumerate(places)]


def images_in(messages: Sequence[RequestMessage]) -> set[str]:
    """The SHA-256 of every image that a request shows."""
    if isinstance(messages, RequestMessages):
        return messages.images()
    shown: set[str] = set()
    for item in messages:
        if not isinstance(item.message, SystemMessage):
            shown.update(
                block.blob for block in item.message.blocks if isinstance(block, ImageBlock)
            )
    return shown


def _sendable(message: Message) -> Message:
    """A message as providers take it back: a model may have called what is no name at all."""
    if isinstance(message, ToolResultMessage):
        name = sendable_name(message.name)
        return message if name == message.name else attrs.evolve(message, name=name)
    if isinstance(message, AssistantMessage):
        for block in message.blocks:
            if isinstance(block, ToolCallBlock) and sendable_name(block.name) != block.name:
                break
        else:
            return message
        blocks = tuple(
            attrs.evolve(block, name=sendable_name(block.name))
            if isinstance(block, ToolCallBlock)
            else block
            for block in message.blocks
        )
        return attrs.evolve(message, blocks=blocks)
    return message


def sendable_name(name: str) -> str:
    """The name of a called tool, with what no provider accepts in a name replaced."""
    return _NOT_SENDABLE.sub("_", name)[:_NAME_CHARACTERS_MAX] or "unnamed"
