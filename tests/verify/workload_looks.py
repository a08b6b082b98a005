"""What a store holds, told so that runs compare: no ids, no moments, no number of lives.

Everything is named by its place: a conversation or task by the keys that lead to it, an entry by
its number in its history. Left out is what an interruption may change without anybody being
wronged: how often something was tried, tokens that were spent on a request which had to be sent
again, and what became of a call that must not be repeated (it has been settled, one way or other).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pidurable.session._blobs import with_blobs
from pidurable.session._documents import Address, load
from pidurable.storage import ConversationRow, EntryRow, Storage, TaskRow

BUILT_IN = "pi."
ONCE = ("charge",)
"""Tools whose calls are not repeated: after a crash their result says so."""
NOT_COMPARED = ("pi.usage",)
LONG_CHARACTERS = 200


def canonical(storage: Storage) -> dict[str, Any]:
    """Describe everything that a store holds, in plain JSON."""
    return _Description(with_blobs(storage)).whole()


class _Description:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._numbers: dict[int, str] = {}
        """What an entry is called elsewhere."""

    def whole(self) -> dict[str, Any]:
        return {
            "documents": self._documents(0, 0),
            "conversations": self._owned_conversations(None),
            "live": sorted(row.kind for row in self._storage.live_tasks()),
        }

    def _owned_conversations(self, owner: int | None) -> dict[str, Any]:
        rows = self._storage.conversations_by_owner(owner)
        found = {str(row.key): self._conversation(row) for row in rows}
        return found if len(found) == len(rows) else {"two of one key": [row.key for row in rows]}

    def _conversation(self, row: ConversationRow) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if row.principal:
            told["principal"] = row.principal
        if row.parent is not None:
            parent = self._storage.conversation(row.parent)
            told["fork of"] = [
                parent and parent.key,
                self._numbers.get(row.parent_entry or 0),
            ]
        self._entries(row.id, told)
        told["documents"] = self._documents(1, row.id)
        told["submissions"] = self._submissions(row.id)
        tasks = list(_pages(self._storage, row.id))
        told["tasks"] = {
            f"{task.kind} {task.key}": self._task(task)
            for task in tasks
            if task.owner is None and not task.kind.startswith(BUILT_IN)
        }
        for task in tasks:
            if not task.kind.startswith(BUILT_IN):
                continue
            if task.outcome_status not in ("completed", "aborted") and not self._cut_off(task):
                told.setdefault("ended badly", []).append([task.kind, task.outcome_status])
            told.setdefault("conversations", {}).update(self._owned_conversations(task.id))
        return {name: value for name, value in told.items() if value}

    # --- tasks ---------------------------------------------------------------------------

    def _cut_off(self, row: TaskRow) -> bool:
        """Whether it is a call that a crash has interrupted: it fails, and the run goes on."""
        if row.kind != "pi.tool" or row.outcome_status != "failed":
            return False
        outcome = json.loads(self._storage.task_outcome(row.id) or "{}")
        return (outcome.get("result") or {}).get("code") == "interrupted"

    def _task(self, row: TaskRow) -> dict[str, Any]:
        outcome = json.loads(self._storage.task_outcome(row.id) or "null")
        told = {
            "version": row.version,
            "input": json.loads(self._storage.task_input(row.id) or "null"),
            "status": row.status,
            "blocked": row.blocked,
            "outcome": outcome and _outcome(outcome),
            "aborted for": row.abort_reason,
            "background": bool(row.background),
            "left over": [
                name
                for name, value in (
                    ("checkpoint", self._storage.task_checkpoint(row.id)),
                    ("wait", self._storage.task_wait(row.id)),
                    ("memos", self._storage.task_memos(row.id)),
                    ("signals", self._storage.signals(row.id)),
                )
                if value
            ],
            "documents": self._documents(2, row.id),
            "conversations": self._owned_conversations(row.id),
            "tasks": {
                f"{task.kind} {task.key}": self._task(task)
                for _, id in sorted(self._storage.keyed_tasks(row.id))
                if (task := self._storage.task(id)) is not None
            },
        }
        return {name: value for name, value in told.items() if value}

    # --- transcripts ---------------------------------------------------------------------

    def _entries(self, conversation: int, told: dict[str, Any]) -> None:
        """Entries in order; what tasks have noted side by side is told for each of them."""
        entries: list[Any] = []
        notes: dict[str, list[Any]] = {}
        for row in self._storage.entries(conversation, limit=10_000):
            messages = [
                _message(message)
                for message in json.loads(_text(self._storage, row.messages)) or ()
                if message.get("status", "complete") == "complete"
            ]
            if row.messages is not None and not messages and row.data is None:
                continue  # an answer that was cut off by a crash
            by = None if row.by_task is None else self._storage.task(row.by_task)
            if by is not None and not by.kind.startswith(BUILT_IN):
                noted = self._entry(row, messages)
                notes.setdefault(f"{by.kind} {by.key}", []).append(noted)
                continue
            self._numbers[row.id] = str(len(entries))
            entries.append(self._entry(row, messages))
        told["entries"] = _rounds(entries)
        told["notes"] = notes

    def _entry(self, row: EntryRow, messages: list[Any]) -> dict[str, Any]:
        data = json.loads(_text(self._storage, row.data))
        told = {
            "kind": row.kind,
            "data": _short(data),
            "messages": messages,
            "head": row.head and self._numbers.get(row.head),
            "edits": [
                [self._numbers.get(edit["target"]), edit.get("messages")]
                for edit in json.loads(_text(self._storage, row.edits)) or ()
            ],
        }
        return {name: value for name, value in told.items() if value}

    def _submissions(self, conversation: int) -> dict[str, Any]:
        """By request: text, status, reason, detail, where it was placed, where it was answered."""
        found: dict[str, Any] = {}
        for request in ("r1", "r2", "r3"):
            row = self._storage.submission_by_request(conversation, request)
            if row is not None:
                found[request] = [
                    " ".join(block["text"] for block in json.loads(row.content)),
                    row.status,
                    row.reason,
                    row.detail,
                    self._numbers.get(row.entry or 0),
                    self._numbers.get(row.answer or 0),
                ]
        still_open = [row.request_id for row in self._storage.open_submissions(conversation)]
        return {**found, "open": still_open} if still_open else found

    # --- documents -----------------------------------------------------------------------

    def _documents(self, scope: int, scope_id: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for row in self._storage.documents(scope, scope_id):
            if row.name in NOT_COMPARED:
                continue
            state = load(self._storage, Address(row.name, row.scope, row.scope_id, row.key))
            name = f"{row.name} {row.key}".strip()
            value = _short(state and state.value)
            if row.name.startswith(BUILT_IN):
                # At rest there is little in these, and what is not there yet is as good as empty.
                found[name] = {field: each for field, each in value.items() if each}
                if not found[name]:
                    del found[name]
                continue
            found[name] = [row.history, row.fork, value]
            if row.history == "rewindable":
                found[name].append(len(self._storage.revisions(row.id)))
        return found


def _outcome(stored: dict[str, Any]) -> dict[str, Any]:
    """An outcome without where in the code an error was raised."""
    error = stored.get("error")
    if error is not None:
        error = {name: value for name, value in error.items() if name != "traceback"}
        return {**stored, "error": error}
    return stored


def _message(stored: dict[str, Any]) -> dict[str, Any]:
    """A message without moments, ids of entries, and what was spent on it."""
    role = stored["role"]
    if role == "system":
        return {"role": role, "tools": [tool["name"] for tool in stored.get("tools_added", ())]}
    blocks = [block.get("text") or _block(block) for block in stored["blocks"]]
    if role == "tool_result":
        settled = stored["name"] in ONCE or stored.get("code") in ("aborted", "interrupted")
        told = "settled" if settled else blocks
        return {"role": role, "call": stored["call"][1], "name": stored["name"], "result": told}
    return {"role": role, "blocks": blocks}


def _block(block: dict[str, Any]) -> Any:
    if block["type"] == "tool_call":
        return [block["name"], block["arguments"]]
    return [block["type"], block.get("media_type")]


def _rounds(entries: list[Any]) -> list[Any]:
    """The results of a round in the order of their calls, whichever came first."""
    told: list[Any] = []
    results: list[Any] = []
    for each in [*entries, None]:
        if each is not None and each["kind"] == "pi.tool_result":
            results.append(each)
            continue
        told += sorted(results, key=lambda result: int(result["messages"][0]["call"]))
        results = []
        if each is not None:
            told.append(each)
    return told


def first_difference(expected: Any, found: Any, path: str = "$") -> str | None:
    """The first place at which two descriptions differ, or None."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in [*expected, *(name for name in found if name not in expected)]:
            if name not in found or name not in expected:
                which = "is missing" if name not in found else f"is there: {found[name]!r:.200}"
                return f"{path}[{name!r}] {which}"
            deeper = first_difference(expected[name], found[name], f"{path}[{name!r}]")
            if deeper is not None:
                return deeper
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            deeper = first_difference(one, other, f"{path}[{place}]")
            if deeper is not None:
                return deeper
        return None
    if type(expected) is type(found) and expected == found:
        return None
    return f"{path}: expected {expected!r:.300}, found {found!r:.300}"


def _pages(storage: Storage, conversation: int) -> Iterator[TaskRow]:
    after = 0
    while rows := storage.tasks(conversation=conversation, after=after):
        yield from rows
        after = rows[-1].id


def _text(storage: Storage, text: str | None) -> str:
    """The JSON of a column, which may lie in a blob."""
    if text is None:
        return "null"
    if text.startswith("@"):
        data = storage.blob(text[1:])
        return "null" if data is None else data.decode()
    return text


def _short(value: Any) -> Any:
    """A value in which long texts are told by their beginning and length."""
    if isinstance(value, str) and len(value) > LONG_CHARACTERS:
        return [value[:10], len(value)]
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return value
