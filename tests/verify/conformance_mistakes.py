"""Mistakes that a backend might make, planted into copies of the memory backend.

Each is a text of its source and what stands there instead. A copy is compiled under names of its
own, so that the real backend is never touched.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

from pidurable.storage import Storage

MODULES = ("_memory_checks", "_memory_commands", "_memory_tables", "_memory")
PLANTED = "planted_{}"

MISTAKES: dict[str, tuple[str, str, str]] = {
    # name: (module, text, instead)
    # --- batches
    "a failed batch stays": ("_memory", "                writer.undo.run()\n", ""),
    "epoch not compared": ("_memory", "if current != epoch:", "if current > epoch + 5:"),
    "an epoch from the future passes": ("_memory", "if current != epoch:", "if current > epoch:"),
    "seq not stored": ("_memory", "seq=batch.seq, next_id", "next_id"),
    "next id not stored": ("_memory", "next_id=batch.next_id, clean", "clean"),
    "the clean mark stays": ("_memory", "clean=batch.clean)", "clean=True)"),
    "heartbeat without epoch": (
        "_memory",
        "            self._check_epoch(epoch)\n            if data.holder is not None:\n"
        "                data.holder = attrs.evolve(data.holder, heartbeat_us=at_us)",
        "            if data.holder is not None:\n"
        "                data.holder = attrs.evolve(data.holder, heartbeat_us=at_us)",
    ),
    "release without epoch": (
        "_memory",
        "            self._check_epoch(epoch)\n            if data.holder is not None:\n"
        "                data.holder = attrs.evolve(data.holder, released=True)",
        "            if data.holder is not None:\n"
        "                data.holder = attrs.evolve(data.holder, released=True)",
    ),
    "acquiring leaves the mark": (
        "_memory",
        "data.head = head._replace(clean=False)",
        "data.head = head",
    ),
    "acquiring keeps the epoch": (
        "_memory",
        "epoch=data.head.epoch + 1)",
        "epoch=data.head.epoch)",
    ),
    "a release is not written": ("_memory", "released=True", "released=False"),
    "a closed handle serves": ("_memory", "if self._closed:", "if False:"),
    "bytes not copied": ("_memory_tables", "bytes(row[1])", "row[1]"),
    "a later blob wins": ("_memory_tables", "if row[0] not in self.data.blobs:", "if True:"),
    "large numbers pass": (
        "_memory_checks",
        "if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:",
        "if False:",
    ),
    "types not checked": ("_memory_checks", "if not isinstance(value, kinds):", "if False:"),
    # --- unique and referring
    "an id twice": ("_memory_tables", "check(key not in table,", "check(True,"),
    "a signal key twice": (
        "_memory_tables",
        'self.undo.insert(self.data.signals_by_key, key, row.id, "signal key")',
        "self.undo.put(self.data.signals_by_key, key, row.id)",
    ),
    "a request id twice": (
        "_memory_tables",
        'self.undo.insert(self.data.submissions_by_request, key, row.id, "request id")',
        "self.undo.put(self.data.submissions_by_request, key, row.id)",
    ),
    "a task key over conversations": (
        "_memory_tables",
        'return ("conversation", row.conversation, key)',
        'return ("conversation", 1, key)',
    ),
    "a parent need not be": (
        "_memory_tables",
        "for who, conversation in self.parents:",
        "for who, conversation in ():",
    ),
    "a parent may go": (
        "_memory_tables",
        "for conversation in self.gone:",
        "for conversation in ():",
    ),
    "a fork may stay behind": (
        "_memory_tables",
        "for left in (self.data.conversations_by_parent, self.data.submissions_by_conversation):",
        "for left in (self.data.submissions_by_conversation,):",
    ),
    "deleting nothing is fine": (
        "_memory_tables",
        "        if key not in table:\n            raise InternalError",
        "        if False:\n            raise InternalError",
    ),
    # --- what ops do
    "a state of nothing": (
        "_memory_tables",
        'raise InternalError(f"task {state.id}, whose state is to be stored, does not exist")',
        "return",
    ),
    "an ended task stays live": (
        "_memory_tables",
        "if was and not now:\n            self.undo.remove(self.data.task_ids",
        "if False:\n            self.undo.remove(self.data.task_ids",
    ),
    "a settled submission stays open": (
        "_memory_tables",
        "if was and not now:\n            self.undo.remove(self.data.submissions_open",
        "if False:\n            self.undo.remove(self.data.submissions_open",
    ),
    "a read signal is unread": (
        "_memory_tables",
        "self.undo.remove(self.data.signals_by_task, row.task, row.id)\n            self.undo.add",
        "self.undo.add",
    ),
    "a read signal keeps its payload": ("_memory_tables", 'row._replace(payload="null")', "row"),
    "a read signal frees its key": (
        "_memory_tables",
        "            self.undo.put(self.data.signals_read, row.id, True)\n",
        "            self.undo.put(self.data.signals_read, row.id, True)\n"
        "            self.undo.delete(self.data.signals_by_key, (row.task, row.key))\n",
    ),
    "read signals outlive their task": (
        "_memory_tables",
        'for place in (row[0], ("read", row[0])):',
        "for place in (row[0],):",
    ),
    "a retired document lives": (
        "_memory_tables",
        "        self.undo.delete(self.data.living_documents, address)\n",
        "",
    ),
    "terms of the living only": (
        "_memory_tables",
        "history=values[1], fork=values[2]",
        "history=values[1]",
    ),
    "one revision too many goes": (
        "_memory_tables",
        ".scan(before=before)",
        ".scan(before=before + 1)",
    ),
    "memos of one replaced": (
        "_memory_tables",
        'self.undo.insert(self.data.memos[task], name, value, f"memo of task {task}")',
        "self.undo.put(self.data.memos[task], name, value)",
    ),
    "an outcome is replaced": (
        "_memory_tables",
        'self.undo.insert(self.data.outcomes, row[0], row[1], "outcome of task")',
        "self.undo.put(self.data.outcomes, row[0], row[1])",
    ),
    # --- reads
    "a cursor is inclusive": (
        "_memory_tables",
        "bisect_right(self._ids, after)",
        "bisect_left(self._ids, after)",
    ),
    "before is inclusive": (
        "_memory_tables",
        "end = bisect_right(self._ids, after), bisect_left(self._ids, before)",
        "end = bisect_right(self._ids, after), bisect_right(self._ids, before)",
    ),
    "reverse is forgotten": (
        "_memory_tables",
        "if reverse else range(first, end)",
        "if False else range(first, end)",
    ),
    "ids in the order of writing": (
        "_memory_tables",
        "insort(self._ids, id)",
        "self._ids.append(id)",
    ),
    "a limit is one too many": ("_memory", "for _ in range(limit):", "for _ in range(limit + 1):"),
    "status ignored": ("_memory", "(status is None or row.status == status)", "True"),
    "kind ignored": ("_memory", "(kind is None or row.kind == kind)", "True"),
    "waits without a cursor": ("_memory", "if item[0] > after)", ")"),
    "waits without a limit": ("_memory", "return rows[:limit]", "return rows"),
    "memos in the order of writing": (
        "_memory",
        "return sorted(self._use().memos.get(task, {}).items())",
        "return list(self._use().memos.get(task, {}).items())",
    ),
    "owners of what is not asked": (
        "_memory",
        "if task in data.tasks and any(owned.of(task).scan(0))",
        "if any(owned.of(task).scan(0))",
    ),
    "phases twice": (
        "_memory",
        "for task in sorted(set(tasks)) if task in stored]",
        "for task in sorted(tasks) if task in stored]",
    ),
    "the past begins late": ("_memory", ".last(seq + 1)", ".last(seq)"),
    "the past does not end": (
        "_memory",
        "return row if has_lived(row, seq) else None",
        "return row",
    ),
    "the latest are rewindable": ("_memory", ' and row.history == "rewindable"]', "]"),
    "revisions to the end": ("_memory", "LAST_ID if upto_seq is None else upto_seq + 1", "LAST_ID"),
    "revisions without a base": (
        "_memory",
        "        return []\n\n    def blob",
        "        return found[::-1]\n\n    def blob",
    ),
    "the newest base alone": ("_memory", "if row.base == 1:", "if True:"),
    "the head before is inclusive": (
        "_memory",
        "LAST_ID if before is None else before)\n            return data.entries[id]",
        "LAST_ID if before is None else before + 1)\n            return data.entries[id]",
    ),
    # --- retention
    "a scan repeats its key": (
        "_memory",
        "first = bisect_right(\n",
        "first = bisect_right.__globals__['bisect_left'](\n",
    ),
    "texts ordered by characters": (
        "_memory",
        "return part.encode() if isinstance(part, str) else part",
        "return part.encode('utf-16-be') if isinstance(part, str) else part",
    ),
    "read marks lost": ("_memory", "(*row, int(id in data.signals_read))", "(*row, 0)"),
    "a command twice": (
        "_memory_tables",
        'self.undo.insert(self.data.commands, row.id, row, "command")',
        "self.undo.put(self.data.commands, row.id, row)",
    ),
    "a stub twice": (
        "_memory_tables",
        'self.undo.insert(self.data.stubs, (row.kind, row.place, row.key), row, "stub")',
        "self.undo.put(self.data.stubs, (row.kind, row.place, row.key), row)",
    ),
    "a deleted task keeps its key": (
        "_memory_tables",
        "            self.undo.delete(self.data.tasks_by_key, _task_key(row))\n",
        "",
    ),
    "a deleted task is listed": (
        "_memory_tables",
        '        self.undo.remove(self.data.task_ids, ("conversation", row.conversation), row.id)\n'
        "        if row.status",
        "        if row.status",
    ),
    "a deleted head is found": (
        "_memory_tables",
        "            self.undo.remove(self.data.heads, row.conversation, row.id)\n\n"
        "    def submission_delete",
        "            pass\n\n    def submission_delete",
    ),
    "a deleted submission keeps its request id": (
        "_memory_tables",
        "            self.undo.delete(self.data.submissions_by_request,"
        " (row.conversation, row.request_id))\n",
        "            pass\n",
    ),
    "a deleted document has a past": (
        "_memory_tables",
        "            self.undo.delete(self.data.documents_past, (*past, row.created_seq))\n"
        "            self.undo.remove(self.data.commits_by_address, past, row.created_seq)\n",
        "",
    ),
    "roots that end now": ("_memory", "row.ended_us >= before_us", "row.ended_us > before_us"),
    "roots below owners": (
        "_memory",
        "return home is not None and home.owner is None",
        "return home is not None",
    ),
    "roots up to, exclusive": ("_memory", ".scan(after, upto + 1))", ".scan(after, upto))"),
    "documents ever, the living": (
        "_memory",
        "indexes = (data.documents_by_scope, data.retired_documents)",
        "indexes = (data.documents_by_scope,)",
    ),
    "removals unsorted": (
        "_memory",
        "for _, row in sorted(self._use().removals.items())",
        "for row in self._use().removals.values()",
    ),
    # --- commands
    "a command is given twice": ("_memory_commands", "self._given.add(name)\n", "pass\n"),
    "taken commands are withdrawn": ("_memory_commands", ' and each.place == "waiting"\n', "\n"),
    "a withdrawal is not told": ("_memory_commands", "return bool(found)", "return True"),
    "forgotten, still there": (
        "_memory_commands",
        "commands.pop(name, None)",
        "commands.get(name)",
    ),
    "set aside, given again": (
        "_memory_commands",
        'if each.place == "set_aside" or name in self._given:',
        "if name in self._given:",
    ),
    "commands of any size": ("_memory_commands", "if size > COMMAND_BYTES_MAX:", "if False:"),
    "a size in characters": ("_memory_commands", "size = len(text.encode())", "size = len(text)"),
    "never any news": (
        "_memory_commands",
        "return self._waiting.arrived != self._seen",
        "return False",
    ),
    "taken before it waits": (
        "_memory_commands",
        '("taken", "waiting", "set_aside")',
        '("waiting", "taken", "set_aside")',
    ),
}


@contextmanager
def planted(name: str) -> Iterator[Any]:
    """The class of the memory backend with one mistake in it."""
    module, text, instead = MISTAKES[name]
    made: dict[str, types.ModuleType] = {}
    try:
        for each in MODULES:
            source = _source(each)
            if each == module:
                assert source.count(text) == 1, (
                    f"{name}: the text stands {source.count(text)} times"
                )
                source = source.replace(text, instead)
            for other in MODULES:
                source = source.replace(f"pidurable.storage.{other} ", f"{PLANTED.format(other)} ")
            made[each] = types.ModuleType(PLANTED.format(each))
            sys.modules[PLANTED.format(each)] = made[each]
            exec(compile(source, f"{each} with: {name}", "exec"), made[each].__dict__)
        yield made["_memory"].MemoryStorage
    finally:
        for each in MODULES:
            sys.modules.pop(PLANTED.format(each), None)


@functools.cache
def _source(module: str) -> str:
    return resources.files("pidurable.storage").joinpath(f"{module}.py").read_text("utf-8")


class PlantedFactory:
    """Stores of a planted class."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def open(self) -> Storage:
        storage: Storage = self._cls()
        return storage

    def reopen(self, storage: Any) -> Storage:
        other: Storage = storage.reopen()
        return other
