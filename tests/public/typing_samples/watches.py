"""Watches as a host writes them: each knows what it shows, checked without casts."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import attrs

from pidurable import (
    Conversation,
    ConversationView,
    DocumentView,
    Entry,
    Frame,
    Harness,
    TaskContext,
    Watch,
    document,
)


@document("sample.todos")
@attrs.define
class Todos:
    items: tuple[str, ...] = ()


async def follow(harness: Harness, conversation: Conversation) -> list[str]:
    found: list[str] = []
    async with harness.watch(Todos, conversation.id) as watch:
        value: DocumentView[Todos] | None = watch.value
        if value is not None:
            found += value.read().items
        async for frame in watch:
            todos = frame.read()
            if todos is None:
                break
            found += todos.items
            patch: list[dict[str, object]] = [dict(op) for op in frame.patch]
            found += [str(op["path"]) for op in patch]
    return found


def opened(harness: Harness) -> AbstractAsyncContextManager[Watch[DocumentView[Todos] | None]]:
    return harness.watch(Todos, key="x")


async def look(conversation: Conversation) -> Entry | None:
    async with conversation.watch() as watch:
        view: ConversationView = watch.value
        frame: Frame[ConversationView] = await anext(watch)
        if frame.whole or not frame.value.history:
            return view.history[0] if view.history.earlier else None
        newest: Entry = frame.value.history[-1]
        place = frame.value.head
        return None if place is None or place.start > newest.id else newest


async def inside(ctx: TaskContext[str, str, str]) -> int:
    async with ctx.watch(Todos) as watch:
        todos = watch.read()
        return 0 if todos is None else len(todos.items)
