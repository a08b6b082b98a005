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
    "died at CP7",
    "unanswered: aborted",
    "unanswered: context_overflow",
    "unanswered: model_error",
    "unanswered: no_model",
    "unanswered: turn_limit",
    "unanswered: withdrawn",
    "result: aborted",
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
    "a fork was taken inside a round",
    "a sub-agent answered",
    "an extension was replaced in a round",
    "queued input was given back",
)


def met(player: Player) -> Counter[str]:
    """What a program has met, of that."""
    return Counter(set(_met(player)))


def _met(player: Player) -> Iterator[str]:
    for point in player.deaths:
        yield f"died at {point}"
    for stands in player.facts["submissions"].values():
        if stands["status"] == "unanswered":
            yield f"unanswered: {stands['reason']}"
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
    effects = Counter(line["marker"] for line in find("effect"))
    if any(count > 1 for count in effects.values()):
        yield "a safe tool ran twice"


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
            for message in entry["messages"]:
                if message["role"] == "user":
                    turns = 0
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
                    if message["name"] == "subagent" and "ans-" in message["text"]:
                        yield "a sub-agent answered"
