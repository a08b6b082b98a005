"""Rare states: counted as they occur, so that a run that never met one does not pass for a proof.

Most can be read off a commit and the model; the rest (refusals, closes, crashes at a given moment)
are counted where they happen, under a name of `RARE` as well.
"""

from __future__ import annotations

from typing import Any

from oracle import Oracle, live

RARE = (
    "mark during reservation",
    "mark against fault",
    "mark racing handover",
    "abort of a completing task",
    "held outcome over a crash",
    "crash with a mark and no handler yet",
    "crash between cascade levels",
    "join decided by a held outcome",
    "join over ended tasks",
    "idleness of a conversation waited for",
    "idle, and busy again before the waiter woke",
    "dependency ends in the commit that aborts the waiter's owner",
    "background below an ended task",
    "end and create in one commit",
    "work added below a held owner while its last ends",
    "wait cycle refused: explicit",
    "wait cycle refused: by ownership",
    "wait cycle refused: in memory",
    "tasks, signal and deadline due at once",
    "retry waiting over a crash",
    "blocked, then unblocked by a definition",
    "orphaned",
    "lent slot exceeding a limit",
    "crash loop",
    "interrupted and resumed",
    "migrated at the then of a wait",
    "fault after the mark",
    "close during a held commit",
    "commit refused below an ended owner",
    "late commit refused",
)


def note(
    model: Oracle,
    before: dict[int, dict[str, Any]],
    books: dict[int, dict[str, Any]],
    commit: dict[str, Any],
    published_seq: int,
) -> None:
    """Count what a commit that the model has accepted shows."""
    for id, task in commit["tasks"].items():
        old = before.get(id)
        if old is None:
            continue
        book = books[id]
        if task["mark"] is not None and old["mark"] is None:
            _marked(model, id, old, book, published_seq)
        if not live(task) and live(old):
            _ended(model, id, old, task, commit, before)
        parked = task["status"] == "waiting" and old["status"] == "running"
        on = (task["wait"] or {}).get("on") or ()
        if parked and any(each in model.tasks and model.settled(each) for each in on):
            model.rare["join over ended tasks"] += 1
        if old["status"] == "waiting" and task["status"] in ("pending", "running"):
            _woken(model, id, old, task, commit)
        if task["blocked"] != old["blocked"]:
            _blocked(model, id, old, task, commit)
        if task["version"] != old["version"] and (book.get("woken") or old["status"] == "waiting"):
            model.rare["migrated at the then of a wait"] += 1
        _keep(model, id, old, task, commit, book)
    for book_id, book in model.books.items():
        deciders = () if books.get(book_id, {}).get("deciders") else book.get("deciders") or ()
        if any(model.tasks[each]["status"] == "completing" for each in deciders):
            model.rare["join decided by a held outcome"] += 1
    _dependency(model, before, commit)
    _busy_again(model, before, commit)


def _marked(model: Oracle, id: int, old: Any, book: Any, published_seq: int) -> None:
    if old["status"] == "running" and book.get("reserved", 0) > published_seq:
        model.rare["mark during reservation"] += 1
    if old["status"] == "completing":
        model.rare["abort of a completing task"] += 1
    if book.get("handover"):
        model.rare["mark racing handover"] += 1


def _ended(
    model: Oracle, id: int, old: Any, task: Any, commit: Any, before: dict[int, dict[str, Any]]
) -> None:
    if task["outcome"] == "orphaned":
        model.rare["orphaned"] += 1
    if task["outcome"] == "faulted" and task["mark"] is not None:
        model.rare["fault after the mark"] += 1
    if commit["by"] == id and any(each not in before for each in commit["tasks"]):
        model.rare["end and create in one commit"] += 1
    for each, other in model.tasks.items():
        if other["background"] and live(other) and id in _all_above(model, each):
            model.rare["background below an ended task"] += 1


def _all_above(model: Oracle, id: int) -> list[int]:
    """Every task above, across background boundaries."""
    found, node = [], id
    while True:
        task = model.tasks.get(node)
        if task is None:
            above = model.conversations[node]
        else:
            above = task["owner"] if task["owner"] is not None else task["conversation"]
        if above is None:
            return found
        if above in model.tasks:
            found.append(above)
        node = above


def _woken(model: Oracle, id: int, old: Any, task: Any, commit: Any) -> None:
    wait = old["wait"]
    if task["mark"] is not None or not wait:
        return
    if task["woken_by"] == "tasks" and any(each in model.conversations for each in wait["on"]):
        model.rare["idleness of a conversation waited for"] += 1
    if wait["deadline"] is None or not wait["signals"]:
        return
    ended = wait["on"] is not None and all(model.settled(each) for each in wait["on"])
    if ended and model.signals.get(id) and wait["deadline"] <= commit["now"]:
        model.rare["tasks, signal and deadline due at once"] += 1


def _blocked(model: Oracle, id: int, old: Any, task: Any, commit: Any) -> None:
    if task["blocked"] == "crash_loop":
        model.rare["crash loop"] += 1
    if task["blocked"] is None and live(task) and task["mark"] is None:
        if id not in commit["renewed"] and commit["by"] == "scheduler":
            model.rare["blocked, then unblocked by a definition"] += 1
        elif old["blocked"] == "interrupted":
            model.rare["interrupted and resumed"] += 1


def _keep(model: Oracle, id: int, old: Any, task: Any, commit: Any, book: Any) -> None:
    """Notes of this task for later commits, beside those of the model."""
    notes: dict[str, Any] = {}
    if task["invocations"] > old["invocations"]:
        notes = {"reserved": commit["seq"], "woken": False, "handover": False}
    elif old["status"] == "waiting" and task["status"] == "pending":
        notes = {"woken": True}
    elif (old["status"], task["status"]) == ("running", "pending") and commit["by"] == id:
        plain = task["mark"] is None and not task["blocked"] and task["tries"] == old["tries"]
        notes = {"handover": plain}
    if notes:
        model.books[id] = {**model.books[id], **notes}


def _dependency(model: Oracle, before: dict[int, dict[str, Any]], commit: dict[str, Any]) -> None:
    changed = commit["tasks"]
    ended = {id for id, t in changed.items() if not live(t) and id in before and live(before[id])}
    marked = {
        id for id, t in changed.items() if t["mark"] and id in before and not before[id]["mark"]
    }
    if not ended or not marked or commit["by"] == "scheduler":
        return
    for id, task in model.tasks.items():
        waits = task["status"] == "waiting" and ended & set(task["wait"]["on"] or ())
        if waits and marked & set(model.above(id)):
            model.rare["dependency ends in the commit that aborts the waiter's owner"] += 1


def _busy_again(model: Oracle, before: dict[int, dict[str, Any]], commit: dict[str, Any]) -> None:
    """Work that is new in a conversation whose last work ended a moment ago."""
    made = [id for id in commit["tasks"] if id not in before]
    for id in made:
        for waiter, task in model.tasks.items():
            on = (task["wait"] or {}).get("on") or () if task["status"] == "waiting" else ()
            for each in set(on) & set(model.nodes_above(id)) - set(model.tasks):
                others = [n for n, other in before.items() if live(other)]
                if waiter != id and not any(each in model.nodes_above(n) for n in others):
                    model.rare["idle, and busy again before the waiter woke"] += 1


def note_death(model: Oracle, now: int) -> None:
    """Count what stood at the moment at which the process died."""
    for id, task in model.tasks.items():
        if not live(task):
            continue
        if task["status"] == "completing":
            model.rare["held outcome over a crash"] += 1
        elif task["mark"] is not None and model.books[id]["invocation"] != "abort":
            model.rare["crash with a mark and no handler yet"] += 1
        if task["mark"] is None and model.cancelled(id):
            model.rare["crash between cascade levels"] += 1
        if task["status"] == "pending" and task["tries"] and task["ready_at"] > now:
            model.rare["retry waiting over a crash"] += 1
