"""What the commits of a world made of one task, in the order in which they were published."""

from __future__ import annotations

from typing import Any

import attrs
from worlds import World

from pidurable.storage import Op
from pidurable.tasks._tree import Node

_OF_A_TASK = {
    Op.TASK_STATE,
    Op.CHECKPOINT,
    Op.WAIT,
    Op.OUTCOME,
}


@attrs.define(eq=False)
class Histories:
    """A participant that notes, for each commit, the tasks that it touched and how they stand."""

    world: World
    by_task: dict[int, list[str]] = attrs.Factory(dict)
    commits: list[dict[int, str]] = attrs.Factory(list)
    """Of each commit: the tasks that it touched, with how they stand after it."""

    @classmethod
    def watch(cls, world: World) -> Histories:
        """Note what is committed from now on; the world is open."""
        made = cls(world=world)
        world.rt.session.participants.append(made)
        return made

    def committed(self, tx: Any) -> None:
        touched: dict[int, str] = {}
        for op, row in tx.writes:
            if op is Op.TASK or op is Op.TASK_STATE:
                touched[row.id] = ""
            elif op in _OF_A_TASK:
                touched[row[0]] = ""
        for id in touched:
            node = tx.view.nodes.get(id)
            word = self._word(node) if isinstance(node, Node) else None
            # A checkpoint alone leaves the task as it is.
            touched[id] = word or self.by_task[id][-1]
            self.by_task.setdefault(id, []).append(touched[id])
        self.commits.append(touched)

    @staticmethod
    def _word(node: Node) -> str:
        return node.status.word + ("+mark" if node.marked else "")

    def check_staged(self, tx: Any) -> None: ...

    def joined(self, tx: Any) -> None: ...

    def reverted(self) -> None: ...

    def poisoned(self, error: Any) -> None: ...

    def refusing(self, refusing: bool) -> None: ...
