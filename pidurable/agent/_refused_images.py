"""Images that a provider refuses for good: the request goes out without them, once.

One image that is too large or damaged would have every later request refused, since each carries
it. So a refusal that no retry would change is met by one more request, in which the newest images
are notes. Only if that one is answered were they the reason: then the commit of the answer keeps
the refusal, and an edit that puts the notes in their place for good. The record stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from pidurable.agent._ask import stream_answer
from pidurable.agent._attempts import append_attempt
from pidurable.agent._models import Deferred, ModelRequest, Models
from pidurable.agent._progress import PartialAnswer
from pidurable.errors import ModelError
from pidurable.records._entries import Edit
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.session._context import ModelContext
from pidurable.session._session import Session
from pidurable.tasks._transaction import TreeTransaction


@attrs.frozen(kw_only=True)
class Refusal:
    """What a provider refused before it answered."""

    detail: str
    edits: tuple[Edit, ...]

    def keep(self, tx: TreeTransaction, conversation_id: int, model: str) -> None:
        """Stage the attempt that was refused, and the notes in place of what was in it."""
        append_attempt(
            tx,
            conversation_id,
            (),
            status="failed",
            model=model,
            usage=Usage(requests=1),
            why=self.detail,
        )
        tx.append(conversation_id, kind="pi.note", edits=self.edits)


Asked = tuple[AssistantMessage | Deferred, Refusal | None]
"""What came of asking: an answer, and what had been refused before it."""


async def answer_without_refused(
    session: Session,
    models: Models,
    context: ModelContext,
    request: ModelRequest,
    partial: PartialAnswer,
) -> Asked:
    """Stream an answer; if the provider refuses the request over its images, one without them.

    Args:
        session: Has the settings.
        models: Serve the request.
        context: What the request was made of.
        request: With the bytes of its images.
        partial: Shows the answer as it comes.

    Raises:
        ModelError: There is no answer. Where the request without images was refused too, the error
            of the first one.
        NotFoundError, MissingExtraError: No such model; nothing was sent.
    """
    try:
        return await stream_answer(session, models.stream(request), request.model, partial), None
    except ModelError as error:
        refused = _newest_images(context)
        if error.kind != "other" or partial.characters or not refused:
            raise
        first = error
    messages = tuple(
        attrs.evolve(item, message=_noted(item.message, refused)) for item in request.messages
    )
    images = {name: data for name, data in request.images.items() if name not in refused}
    smaller = attrs.evolve(request, messages=messages, images=images)
    try:
        answer = await stream_answer(session, models.stream(smaller), smaller.model, partial)
    except ModelError as error:
        raise (first if error.kind == "other" else error) from error
    return answer, Refusal(detail=first.detail, edits=_edits(context, refused))


def _newest_images(context: ModelContext) -> set[str]:
    """The images that no answer has followed yet; where there are none, all of them."""
    newest: set[str] = set()
    every: set[str] = set()
    for item in context:
        if isinstance(item.message, AssistantMessage):
            newest = set()
        shown = {block.blob for block in _blocks(item.message) if isinstance(block, ImageBlock)}
        newest |= shown
        every |= shown
    return newest or every


def _blocks(message: Message) -> Sequence[Block]:
    return () if isinstance(message, SystemMessage) else message.blocks


def _noted(message: Message, refused: Collection[str]) -> Message:
    """The message with a note for each image that was refused."""
    if isinstance(message, SystemMessage):
        return message
    noted = tuple(
        TextBlock(text=f"(an image, {block.media_type}, that was refused)")
        if isinstance(block, ImageBlock) and block.blob in refused
        else block
        for block in message.blocks
    )
    return message if noted == message.blocks else attrs.evolve(message, blocks=noted)


def _edits(context: ModelContext, refused: Collection[str]) -> tuple[Edit, ...]:
    """What puts the notes in the place of the images, in every entry that shows one.

    The edits hold what the entries contribute now, so that earlier edits of them stay in force. An
    entry that also holds an answer has made-up messages around it, and is left to a person.
    """
    by_entry: dict[int, list[Message]] = {}
    for item in context:
        by_entry.setdefault(item.entry, []).append(item.message)
    edits: list[Edit] = []
    for entry, messages in by_entry.items():
        if not all(isinstance(each, UserMessage | ToolResultMessage) for each in messages):
            continue
        noted = tuple(_noted(each, refused) for each in messages)
        if any(new is not old for new, old in zip(noted, messages, strict=True)):
            edits.append(Edit(target=entry, messages=noted))
    return tuple(edits)
