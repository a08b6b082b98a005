"""The tree of tasks and conversations as it is stored: gathered row by row, then put in order.

Many rows are read one after another, beside whoever commits meanwhile; how much is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from pidurable.records._entries import Conversation
from pidurable.records._tasks import TaskRecord
from pidurable.session._rows import conversation_of
from pidurable.storage import ConversationRow, SqliteStorage, TaskRow
from pidurable.tasks._task_record import task_record


@attrs.frozen(kw_only=True)
class TreeRow:
    """One line of a tree: a task or a conversation, below the last row of one depth less."""

    depth: int
    task: TaskRecord | None = None
    conversation: Conversation | None = None

    @property
    def id(self) -> int:
        """The id of the task or conversation."""
        if self.task is not None:
            return self.task.id
        assert self.conversation is not None
        return self.conversation.id


@attrs.define(eq=False)
class _Gathered:
    """Rows of a tree, before they are put in order."""

    tasks: dict[int, TaskRow] = attrs.Factory(dict)
    conversations: dict[int, ConversationRow] = attrs.Factory(dict)


def live_rows(storage: SqliteStorage) -> list[TaskRow]:
    """Read the rows of all live tasks, by id."""
    rows: list[TaskRow] = []
    while True:
        page = storage.live_tasks(after=rows[-1].id if rows else 0)
        rows += page
        if len(page) < 10_000:
            return rows


def read_tree(storage: SqliteStorage, root: int | None, *, limit: int) -> list[TreeRow] | None:
    """Read the tree below a task or a conversation, or everything; None if there is no root."""
    if root is None:
        rows = {row.id: row for row in live_rows(storage)}
        rows.update((row.id, row) for row in storage.tasks(limit=limit, reverse=True))
        gathered = _Gathered(tasks=rows)
        _add_conversations(storage, gathered, limit)
        return _flatten(storage, gathered, None)
    conversation = storage.conversation(root)
    task = storage.task(root) if conversation is None else None
    if conversation is None and task is None:
        return None
    gathered = _Gathered()
    if task is not None:
        _gather_below(storage, gathered, task, limit=limit)
    else:
        assert conversation is not None
        gathered.conversations[conversation.id] = conversation
        _gather(storage, gathered, conversation.id, limit=limit)
    return _flatten(storage, gathered, root)


def _add_conversations(storage: SqliteStorage, gathered: _Gathered, limit: int) -> None:
    """Read the conversations of the gathered tasks, and those that no task has touched yet."""
    for row in storage.conversations_by_owner(None, limit=limit):
        gathered.conversations[row.id] = row
    for id in sorted({row.conversation for row in gathered.tasks.values()}):
        if id not in gathered.conversations:
            found = storage.conversation(id)
            if found is not None:
                gathered.conversations[id] = found
    for owner in gathered.tasks:
        _owned_conversations(storage, gathered, owner)


def _gather(storage: SqliteStorage, gathered: _Gathered, conversation: int, *, limit: int) -> None:
    """Read the tasks of a conversation and, below them, of every conversation they own."""
    waiting = [conversation]
    while waiting and len(gathered.tasks) < limit:
        found = storage.tasks(
            conversation=waiting.pop(), limit=limit - len(gathered.tasks), reverse=True
        )
        for row in found:
            gathered.tasks[row.id] = row
            waiting += _owned_conversations(storage, gathered, row.id)


def _gather_below(
    storage: SqliteStorage, gathered: _Gathered, root: TaskRow, *, limit: int
) -> None:
    """Read what a task owns, however deep: an owner is always older than what it owns."""
    gathered.tasks[root.id] = root
    conversations = _owned_conversations(storage, gathered, root.id)
    after = root.id
    while len(gathered.tasks) < limit:
        page = storage.tasks(conversation=root.conversation, after=after, limit=1_000)
        for row in page:
            if row.owner in gathered.tasks and len(gathered.tasks) < limit:
                gathered.tasks[row.id] = row
                conversations += _owned_conversations(storage, gathered, row.id)
        if len(page) < 1_000:
            break
        after = page[-1].id
    for conversation in conversations:
        _gather(storage, gathered, conversation, limit=limit)


def _owned_conversations(storage: SqliteStorage, gathered: _Gathered, owner: int) -> list[int]:
    rows = storage.conversations_by_owner(owner)
    gathered.conversations.update((row.id, row) for row in rows)
    return [row.id for row in rows]


def _flatten(storage: SqliteStorage, gathered: _Gathered, root: int | None) -> list[TreeRow]:
    """Put rows in order, depth first, by id below each owner; iterative, however deep."""
    below: dict[int, list[int]] = {}
    tops: list[int] = []
    for id, task in gathered.tasks.items():
        owner = task.conversation if task.owner is None else task.owner
        _file(id, owner, gathered, below, tops)
    for id, conversation in gathered.conversations.items():
        _file(id, conversation.owner, gathered, below, tops)
    rows: list[TreeRow] = []
    stack = [(id, 0) for id in sorted(tops if root is None else [root], reverse=True)]
    while stack:
        id, depth = stack.pop()
        rows.append(_tree_row(storage, gathered, id, depth))
        stack += [(child, depth + 1) for child in sorted(below.get(id, ()), reverse=True)]
    return rows


def _file(
    id: int,
    owner: int | None,
    gathered: _Gathered,
    below: dict[int, list[int]],
    tops: list[int],
) -> None:
    known: Sequence[dict[int, Any]] = (gathered.tasks, gathered.conversations)
    if owner is not None and any(owner in rows for rows in known):
        below.setdefault(owner, []).append(id)
    else:
        tops.append(id)


def _tree_row(storage: SqliteStorage, gathered: _Gathered, id: int, depth: int) -> TreeRow:
    task = gathered.tasks.get(id)
    if task is not None:
        return TreeRow(depth=depth, task=task_record(storage, task))
    return TreeRow(depth=depth, conversation=conversation_of(gathered.conversations[id]))
