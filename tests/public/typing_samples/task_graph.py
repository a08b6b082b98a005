"""Watching the task graph as the manual writes it: checked without casts."""

from __future__ import annotations

from collections.abc import Mapping

from pidurable import Frame, GraphConversation, GraphTask, Harness, TaskGraph, TaskId, Watch


async def follow(harness: Harness, root: TaskId[str]) -> int:
    """What is live, and then each change of it."""
    async with harness.watch_tasks() as watch:
        everything: Watch[TaskGraph] = watch
        graph: TaskGraph = everything.value
        tasks: Mapping[int, GraphTask] = graph.tasks
        conversations: Mapping[int, GraphConversation] = graph.conversations
        until: list[int] = [task.wait_until_us for task in tasks.values() if task.wait_until_us]
        frame: Frame[TaskGraph]
        async for frame in watch:
            sent: list[dict[str, object]] = list(frame.patch)
            return graph.left_out + len(until) + len(sent) + len(conversations)
    async with harness.watch_tasks(root, limit=10) as below:
        return below.seq + len(below.value.tasks)
