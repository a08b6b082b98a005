"""Judges a program of turns by what the outside knows: the book, and the provider's own requests.

Nothing of the product is asked how it thinks; of the store only the transcripts and how the
submissions stand are taken, as plain JSON. What must hold is said here once more, in other words:

* each input that was acknowledged is one submission with one end, its marker is an input of the
  transcript at most once, and if it is done the model has seen it and its answer came after that;
* inputs reach the model in the order in which they arrived, but that a steer may overtake a
  follow-up, and a write may overtake both;
* an effect that may not be repeated happens at most once, and a result that says that a tool has
  done its work is of a call whose effect is in the book; what was refused is not in it;
* each call has exactly one result, before the model says anything more;
* at the end every conversation answers one more input.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from turn_outside import markers

Line = dict[str, Any]
Request = list[dict[str, Any]]

NEVER_RAN = ("denied", "blocked", "invalid_arguments", "tool_unavailable", "permission_expired")
REASONS = {
    "no_model", "model_error", "context_overflow", "aborted", "turn_limit", "handoff_limit",
    "stopped", "reset", "stale", "withdrawn",
}  # fmt: skip


def judge(
    lines: list[Line], requests: list[Request], given: list[Line], facts: dict[str, Any]
) -> list[str]:
    """Everything that is wrong."""
    court = Court(lines, requests, given, facts)
    found = [line["problem"] for line in lines if line["what"] == "wrong"]
    for check in CHECKS:
        found.extend(check(court))
    return found


class Court:
    """The facts of a case, as the checks want them."""

    def __init__(
        self, lines: list[Line], requests: list[Request], given: list[Line], facts: dict[str, Any]
    ) -> None:
        self.lines = lines
        self.given = given
        self.facts = facts
        self.conversations: dict[str, Any] = facts["conversations"]
        self.submissions: dict[str, Any] = facts["submissions"]
        self.places = {
            line["marker"]: place for place, line in enumerate(lines) if line["what"] == "sent"
        }
        self.sent = {line["marker"]: line for line in lines if line["what"] == "sent"}
        self.acked = {line["marker"]: line for line in lines if line["what"] == "acked"}
        self.told = {
            marker: next(
                place
                for place, line in enumerate(lines)
                if line["what"] == "acked" and line["marker"] == marker
            )
            for marker in self.acked
        }
        self.effects: dict[str, list[Line]] = defaultdict(list)
        for line in lines:
            if line["what"] == "effect":
                self.effects[line["marker"]].append(line)
        self.inputs = [
            # A request for a summary quotes what is said in a conversation, and is none.
            [] if answer["summary"] else list(_inputs_in(request))
            for request, answer in zip(requests, given, strict=True)
        ]
        self.requested = {line["number"]: place for place, line in enumerate(given)}
        """By answer, the request that it was given to; they come in one order."""
        self.entries = {
            entry["id"]: entry
            for conversation in self.conversations.values()
            for entry in conversation["entries"]
        }
        self.read = {marker for request in requests for marker in _inputs_in(request)}
        """What a model was given, be it only to make a summary of it."""
        self.summarised = {
            marker
            for request, answer in zip(requests, given, strict=True)
            if answer["summary"]
            for marker in _inputs_in(request)
        }
        self.first: dict[str, int] = {}
        for number, seen in enumerate(self.inputs):
            for marker in seen:
                self.first.setdefault(marker, number)

    def named(self, marker: str) -> dict[str, Any] | None:
        """How the submission of a marker stands, if it was acknowledged."""
        line = self.acked.get(marker)
        return None if line is None else self.submissions[str(line["submission"])]

    def find(self, what: str) -> list[Line]:
        """The lines of a kind."""
        return [line for line in self.lines if line["what"] == what]

    def must_precede(self, one: str, other: str) -> bool:
        """Whether `one` arrived first and nothing allows `other` to overtake it."""
        if one not in self.told or other not in self.sent:
            return False
        first, second = self.sent[one], self.sent[other]
        if first["conversation"] != second["conversation"]:
            return False
        if self.told[one] > self.places[other]:
            return False  # they were under way together
        if second["mode"] == "write":
            return first["mode"] == "write"
        return first["mode"] in ("write", "steer") or second["mode"] != "steer"

    def inputs_of_answer(self, number: int) -> list[str]:
        """The inputs that the request had which this answer was given to."""
        return self.inputs[self.requested[number]]

    def call(self, place: list[int]) -> list[Any] | None:
        """The name and the arguments of a call, by where it stands."""
        entry = self.entries.get(place[0])
        if entry is None:
            return None
        for message in entry["messages"]:
            if message["role"] == "assistant" and place[1] < len(message["calls"]):
                return list(message["calls"][place[1]])
        return None

    def own_entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each entry once, with the conversation that it was stored in."""
        for id, conversation in self.conversations.items():
            for entry in conversation["entries"]:
                if entry["id"] > conversation["own after"]:
                    yield id, entry


def _inputs_in(request: Request) -> Iterator[str]:
    for message in request:
        if message["role"] == "user":
            for sign in ("in", "wr"):
                yield from markers(message["text"], sign)


# --- inputs ---------------------------------------------------------------------------------------


def _each_input_is_answered_once_or_says_why(court: Court) -> Iterator[str]:
    ids = Counter(line["submission"] for line in court.lines if line["what"] == "acked")
    by_marker: dict[str, set[int]] = defaultdict(set)
    for line in court.lines:
        if line["what"] == "acked":
            by_marker[line["marker"]].add(line["submission"])
    for marker, found in by_marker.items():
        if len(found) != 1:
            yield f"{marker} is the submissions {sorted(found)}"
    if len(ids) != len(by_marker):
        yield f"{len(by_marker)} inputs are {len(ids)} submissions"
    for marker in court.acked:
        stands = court.named(marker)
        assert stands is not None
        if stands["status"] not in ("done", "unanswered"):
            yield f"{marker} is {stands['status']} for ever"
        elif stands["status"] == "unanswered" and stands["reason"] not in REASONS:
            yield f"{marker} is unanswered for the reason {stands['reason']!r}"
        elif stands["status"] == "done" and stands["kind"] == "input" and marker not in court.read:
            yield f"{marker} is done, and no request had it"


def _an_answer_is_of_a_request_that_had_the_input(court: Court) -> Iterator[str]:
    entries = {entry["id"]: (id, entry) for id, entry in court.own_entries()}
    for marker in court.acked:
        stands = court.named(marker)
        assert stands is not None
        if stands["kind"] != "input" or stands["status"] != "done":
            continue
        if stands["answer"] not in entries:
            yield f"{marker} is done, and its answer {stands['answer']} is no entry"
            continue
        conversation, entry = entries[stands["answer"]]
        if conversation != str(stands["conversation"]):
            yield f"{marker} is answered in another conversation"
        for message in entry["messages"]:
            for answer in markers(message["text"], "ans"):
                number = int(answer[4:-1])
                cut = any(
                    # A handoff says its inputs again; a plain reset and a summary do not.
                    e["head"] is not None and not (e["kind"] == "pi.reset" and e["messages"])
                    for e in court.conversations[conversation]["entries"]
                )
                if marker not in court.inputs_of_answer(number) and not cut:
                    yield f"{marker} is answered by {answer}, whose request did not have it"


def _an_input_is_in_the_transcript_once(court: Court) -> Iterator[str]:
    seen: Counter[str] = Counter()
    moved: dict[str, set[str]] = defaultdict(set)
    for id, entry in court.own_entries():
        if entry["kind"] == "pi.reset" and entry["messages"]:
            # A handoff: behind its note, what the run is to answer is said once more.
            moved[id] = set(seen)
        elif entry["kind"] == "pi.user":
            for message in entry["messages"]:
                for marker in markers(message["text"], "in"):
                    seen[marker] += marker not in moved[id]
                    moved[id].discard(marker)
    for marker, count in seen.items():
        if count > 1:
            yield f"{marker} was placed {count} times"
        if marker not in court.sent:
            yield f"{marker} was placed, and nobody sent it"
    for line in court.lines:
        if line["what"] == "withdrawn":
            stands = court.named(line["marker"])
            assert stands is not None
            if stands["reason"] != "withdrawn":
                yield f"{line['marker']} was given back, and is {stands['status']}"
    for marker in court.acked:
        stands = court.named(marker)
        assert stands is not None
        if stands["reason"] == "withdrawn" and (seen[marker] or marker in court.first):
            yield f"{marker} is withdrawn, and was placed"
        if stands["kind"] != "input":
            continue
        if stands["status"] == "done" and not seen[marker]:
            yield f"{marker} is done, and was not placed"


def _a_write_is_in_the_transcript_once(court: Court) -> Iterator[str]:
    seen: Counter[str] = Counter()
    observed: Counter[int] = Counter()
    for _, entry in court.own_entries():
        if entry["kind"] == "told":
            for message in entry["messages"]:
                seen.update(markers(message["text"], "wr"))
        elif entry["kind"] == "note":
            seen[entry["data"]["marker"]] += 1
        elif entry["kind"] == "observed":
            observed[entry["data"]["round"]] += 1
    for marker, line in court.acked.items():
        mode = court.sent[marker]["mode"]
        if mode not in ("write", "note"):
            continue
        stands = court.submissions[str(line["submission"])]
        if seen[marker] != (stands["status"] == "done"):
            yield f"{marker} ({mode}) is {stands['status']}, and stands there {seen[marker]} times"
    for assistant, count in observed.items():
        if count > 1:
            yield f"the round of entry {assistant} was observed {count} times"


def _inputs_come_in_their_order(court: Court) -> Iterator[str]:
    for number, seen in enumerate(court.inputs):
        for marker, count in Counter(seen).items():
            if count > 1:
                yield f"request {number} has {marker} {count} times"
        for earlier, later in combinations(seen, 2):
            if court.must_precede(later, earlier):
                yield f"request {number} has {earlier} before {later}, which came first"
    if court.find("forked") and any(line["mode"] == "reset" for line in court.sent.values()):
        # What a reset took out of one conversation may first be seen later, by its fork.
        return
    for one, other in combinations(court.first, 2):
        for first, second in ((one, other), (other, one)):
            if court.must_precede(first, second) and court.first[second] < court.first[first]:
                yield f"{second} reached the model before {first}, which came first"


def _a_follow_up_joins_no_run(court: Court) -> Iterator[str]:
    begun: dict[int, int] = {}
    for stands in court.submissions.values():
        if stands["run"] is not None and stands["entry"] is not None:
            known = begun.get(stands["run"], stands["entry"])
            begun[stands["run"]] = min(known, stands["entry"])
    for marker, line in court.acked.items():
        stands = court.submissions[str(line["submission"])]
        if stands["mode"] != "follow_up" or stands["kind"] != "input" or not stands["entry"]:
            continue
        for entry in court.conversations[str(stands["conversation"])]["entries"]:
            between = begun[stands["run"]] < entry["id"] < stands["entry"]
            if between and any(m["role"] in ("assistant", "result") for m in entry["messages"]):
                yield f"{marker} is a follow-up, and joined run {stands['run']}"
                break


def _what_a_summary_replaces_was_summarised(court: Court) -> Iterator[str]:
    for id, conversation in court.conversations.items():
        start = 0
        for entry in conversation["entries"]:
            if entry["head"] is None:
                continue
            if entry["kind"] == "pi.compaction":
                for replaced in conversation["entries"]:
                    if not start <= replaced["id"] < entry["head"]:
                        continue
                    for marker in _inputs_in(replaced["messages"]):
                        if marker not in court.summarised:
                            yield f"conversation {id}: {marker} was dropped by entry {entry['id']}"
            start = max(start, entry["head"])


def _nothing_is_left(court: Court) -> Iterator[str]:
    for id, conversation in court.conversations.items():
        if conversation["busy"]:
            yield f"conversation {id} is busy at the end"
        if conversation["owner"] is None and (conversation["open"] or conversation["inbox"]):
            yield f"conversation {id} has open submissions {conversation['open']} at the end"
    if court.facts["live"]:
        yield f"tasks are live at the end: {court.facts['live']}"
    lasts = court.find("last")
    for line, following in zip(lasts, [*lasts[1:], None], strict=True):
        again = following is not None and court.sent[following["marker"]]["conversation"]
        if line["reason"] == "context_overflow":
            if again != court.sent[line["marker"]]["conversation"]:
                yield f"the last input {line['marker']} does not fit, and none was sent after it"
        elif line["status"] != "done":
            yield f"the last input {line['marker']} is {line['status']} ({line['reason']})"


# --- calls ----------------------------------------------------------------------------------------


def _effects_happen_as_often_as_they_may(court: Court) -> Iterator[str]:
    reruns = Counter(
        line["marker"]
        for line in court.lines
        if line["what"] == "deciding" and line["decision"] == "rerun"
    )
    for marker, effects in court.effects.items():
        policies = {line["policy"] for line in effects}
        most = 1 + reruns[marker]
        if len(effects) > most and policies != {"safe"}:
            yield f"{marker} happened {len(effects)} times ({', '.join(sorted(policies))})"
        if len({line["call"] for line in effects}) > 1:
            yield f"{marker} happened in two calls"


def _what_ran_was_approved(court: Court) -> Iterator[str]:
    approved: dict[str, set[str]] = defaultdict(set)
    patterns: list[str] = []
    denied: dict[str, str] = {}
    for line in court.lines:
        if line["what"] == "deciding" and line["decision"] in ("once", "pattern"):
            approved[line["marker"]].add(line["version"])
            if line["decision"] == "pattern":
                patterns.append(line["pattern"])
        elif line["what"] == "decided" and line["decision"] == "deny":
            denied[line["marker"]] = line["version"]
        elif line["what"] == "effect" and line["tool"] == "asked":
            marker, version = line["marker"], f"version {line['version']}"
            text = json.dumps({"what": marker})
            granted = any(text.startswith(pattern.removesuffix("*")) for pattern in patterns)
            if version not in approved[marker] and not granted:
                yield f"{marker} ran as {version}, which nobody approved"
            if marker in denied:
                yield f"{marker} was denied, and ran"
        elif line["what"] == "effect" and line["tool"] == "once" and line["marker"].endswith("-3."):
            yield f"{line['marker']} was blocked, and ran"


def _results_tell_what_happened(court: Court) -> Iterator[str]:
    for _, entry in court.own_entries():
        for message in entry["messages"]:
            if message["role"] != "result":
                continue
            call = court.call(message["call"])
            if call is None:
                yield f"entry {entry['id']} is the result of a call that nobody made"
                continue
            name, arguments = call
            marker = arguments.get("what") if isinstance(arguments, dict) else None
            effects = len(court.effects[marker]) if isinstance(marker, str) else 0
            if message["name"] != name:
                yield f"entry {entry['id']}: the result of {message['name']} for {name}"
            if effects and message["code"] in NEVER_RAN:
                yield f"{marker} was not run ({message['code']}), and happened"
            if effects and message["code"] == "aborted" and "before it" in message["text"]:
                yield f"{marker} was aborted before it ran, and happened"
            worked = f"did {marker}" in message["text"] and not message["is_error"]
            if worked and not effects:
                yield f"{marker} has the result {message['text']!r}, and did not happen"


def _each_call_has_one_result_before_the_next_answer(court: Court) -> Iterator[str]:
    for id, conversation in court.conversations.items():
        open_calls: dict[tuple[int, int], str] = {}
        answered: set[tuple[int, int]] = set()
        for entry in conversation["entries"]:
            if entry["id"] <= conversation["own after"]:
                # A fork may be taken in the middle of a round, whose results stay there.
                continue
            for message in entry["messages"]:
                partial = message["role"] == "assistant" and message["status"] != "complete"
                if open_calls and message["role"] in ("assistant", "user") and not partial:
                    yield f"conversation {id}: {entry['id']} stands before {open_calls}"
                if message["role"] == "assistant" and message["status"] == "complete":
                    for index, (name, _) in enumerate(message["calls"]):
                        open_calls[entry["id"], index] = name
                elif message["role"] == "result":
                    call = (message["call"][0], message["call"][1])
                    if call in answered:
                        yield f"conversation {id}: two results for {call}"
                    if open_calls.pop(call, None) is None:
                        yield f"conversation {id}: {entry['id']} is no result of an open call"
                    answered.add(call)
        if open_calls:
            yield f"conversation {id}: no result for {open_calls}"


CHECKS: tuple[Callable[[Court], Iterator[str]], ...] = (
    _each_input_is_answered_once_or_says_why,
    _an_answer_is_of_a_request_that_had_the_input,
    _an_input_is_in_the_transcript_once,
    _a_write_is_in_the_transcript_once,
    _inputs_come_in_their_order,
    _a_follow_up_joins_no_run,
    _what_a_summary_replaces_was_summarised,
    _nothing_is_left,
    _effects_happen_as_often_as_they_may,
    _what_ran_was_approved,
    _results_tell_what_happened,
    _each_call_has_one_result_before_the_next_answer,
)
