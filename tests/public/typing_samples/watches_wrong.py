"""Mistakes in watches: each marked line must be one in both checkers."""

from __future__ import annotations

import attrs

from pidurable import Conversation, Harness, document


@document("sample.todos")
@attrs.define
class Todos:
    items: tuple[str, ...] = ()


async def follow(harness: Harness, conversation: Conversation) -> None:
    async with harness.watch(Todos, conversation.id) as watch:
        watch.value.read()  # error: there may be no document
        found: Todos = watch.read()  # error: there may be no document
        print(found)
        async for frame in watch:
            frame.value["items"]  # error: there may be no document
            print(frame.read().items)  # error: there may be no document
            frame.seq = "3"  # error: a number
            frame.patch = []  # error: it is made, and not set
    harness.watch("sample.todos", 1)  # error: the class, not its name
    async with conversation.watch() as view:
        view.read()  # error: a view is no document
        view.value.history.append(1)  # error: a page cannot be changed
        view.value.documents["pi.live"] = {}  # error: nor what it shows
        view.value.history = []  # error: nor the view itself
