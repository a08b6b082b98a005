"""What a set of programs must have met, or it has proved less than it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turn_player import Player

RARE = (
    "died at commit.before",
    "died at commit.after",
    "died at CP1",
    "died at CP2",
    "died at CP3",
    "died at CP4",
    "died at CP5",
    "died at CP6",
    "died at CP7",
    "unanswered: aborted",
    "unanswered: context_overflow",
    "unanswered: model_error",
    "unanswered: no_model",
    "unanswered: turn_limit",
    "unanswered: withdrawn",
    "unanswered: reset",
    "unanswered: stopped",
    "result: aborted",
    "result: blocked",
    "result: denied",
    "result: permission_expired",
    "result: interrupted",
    "result: invalid_arguments",
    "result: tool_error",
    "result: tool_unavailable",
    "a sender was not told, and sent again",
    "a request id was used for something else",
    "an input was refused, as somebody was busy",
    "a safe tool ran twice",
    "a tool was asked what became of its call",
    "a steer joined a run",
    "a follow-up started the next run",
    "a run had three turns",
    "a partial answer was kept",
    "a provider answered later",
    "a fork was taken inside a round",
    "a sub-agent answered",
    "an extension was replaced in a round",
    "queued input was given back",
    "one input was withdrawn",
    "a write waited for a boundary",
    "a run was continued",
    "a hook continued a run",
    "a person allowed a call",
    "a person denied a call",
    "a pattern let a later call through",
    "two people decided at once",
    "a decision came too late",
    "a decision was cut by a death",
    "a yes was about an older version",
    "an effect found after a crash: rerun",
    "an effect found after a crash: happened",
    "an effect found after a crash: interrupted",
    "a sub-agent asked a person",
    "a nested call asked a person",
    "a nested caller ran again, and its call did not",
    "a summary was placed",
    "a tool ended the run",
    "a tool handed the input on",
)


def met(player: Player) -> Counter[str]:
    """What a program has met, of that."""
    return Counter(set(_met(player)))


def _met(player: Player) -> Iterator[str]:
    if player.model.polls:
        yield "a provider answered later"
    for point in player.deaths:
        yield f"died at {point}"
    for stands in player.facts["submissions"].values():
        if stands["status"] == "unanswered":
            yield f"unanswered: {stands['reason']}"
        elif stands["kind"] == "continue":
            yield "a run was continued"
    yield from _met_in_the_book(player)
    yield from _met_in_transcripts(player)


def _met_in_the_book(player: Player) -> Iterator[str]:
    find = player.book.find
    if find("sent again"):
        yield "a sender was not told, and sent again"
    if find("conflict"):
        yield "a request id was used for something else"
    if find("busy"):
        yield "an input was refused, as somebody was busy"
    if find("forked", inside=True):
        yield "a fork was taken inside a round"
    if any(line["taken"] for line in find("aborted")):
        yield "queued input was given back"
    if find("withdrawn"):
        yield "one input was withdrawn"
    if find("duel"):
        yield "two people decided at once"
    if find("too late"):
        yield "a decision came too late"
    yield from _met_in_decisions(player)
    effects = Counter(line["marker"] for line in find("effect"))
    for marker, count in Counter(line["marker"] for line in find("nests")).items():
        if count > 1 and effects[f"{marker}n1."] == 1:
            yield "a nested caller ran again, and its call did not"
    if any(count > 1 for count in effects.values()):
        yield "a safe tool ran twice"


def _met_in_decisions(player: Player) -> Iterator[str]:
    find = player.book.find
    asked = {line["marker"]: line for line in find("effect", tool="asked")}
    seen: dict[str, set[str]] = {}
    for line in find("deciding"):
        seen.setdefault(line["marker"], set()).add(line["version"])
    for line in find("decided"):
        marker = line["marker"]
        if line["subject"] == "effect":
            yield f"an effect found after a crash: {line['decision']}"
        elif line["decision"] == "deny":
            yield "a person denied a call"
        elif marker in asked:
            yield "a person allowed a call"
        if "n2." in marker:
            yield "a nested call asked a person"
        if line["deep"]:
            yield "a sub-agent asked a person"
        if len(seen[marker]) > 1:
            yield "a yes was about an older version"
    if any(marker not in seen for marker in asked):
        yield "a pattern let a later call through"
    told = Counter(line["id"] for name in ("decided", "too late") for line in find(name))
    if any(line["id"] not in told for line in find("deciding")):
        yield "a decision was cut by a death"


def _met_in_transcripts(player: Player) -> Iterator[str]:
    reloads: dict[str, set[int]] = {}
    for line in player.book.find("effect"):
        reloads.setdefault(line["marker"].split("-")[1], set()).add(line["reloads"])
    if any(len(found) > 1 for found in reloads.values()):
        yield "an extension was replaced in a round"
    runs: dict[int, list[int]] = {}
    for stands in player.facts["submissions"].values():
        if stands["run"] is not None and stands["entry"] is not None:
            runs.setdefault(stands["run"], []).append(stands["entry"])
            if stands["mode"] == "follow_up" and stands["status"] == "done":
                yield "a follow-up started the next run"
    for conversation in player.facts["conversations"].values():
        spoken = [
            entry["id"]
            for entry in conversation["entries"]
            for message in entry["messages"]
            if message["role"] == "assistant"
        ]
        if any(min(e) < answer < max(e) for e in runs.values() for answer in spoken):
            yield "a steer joined a run"
        turns = 0
        for entry in conversation["entries"]:
            if entry["kind"] == "pi.compaction":
                yield "a summary was placed"
            for message in entry["messages"]:
                if message["role"] == "user":
                    turns = 0
                    if entry["kind"] == "told" and spoken and spoken[-1] > entry["id"]:
                        yield "a write waited for a boundary"
                    if message["text"].startswith("and after ans-"):
                        yield "a hook continued a run"
                elif message["role"] == "assistant" and message["status"] == "complete":
                    turns += 1
                    if turns == 3:
                        yield "a run had three turns"
                elif message["role"] == "assistant" and message["status"] == "aborted":
                    yield "a partial answer was kept"
                elif message["role"] == "result":
                    if message["code"] is not None:
                        yield f"result: {message['code']}"
                    if "as the book says" in message["text"]:
                        yield "a tool was asked what became of its call"
                    if message["name"] == "bye" and not message["is_error"]:
                        yield "a tool ended the run"
                    if message["name"] == "hand" and not message["is_error"]:
                        yield "a tool handed the input on"
                    if message["name"] == "subagent" and "ans-" in message["text"]:
                        yield "a sub-agent answered"
