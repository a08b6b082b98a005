"""What workload W comes to, written by hand from what its program says, as plain dicts.

It does not look at the product or at a run: the workload says `a hut`, `a tent`, `a castle`, so
that is what must stand there. Written as `workload_looks.canonical` tells it.
"""

from __future__ import annotations

from typing import Any


def said(text: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "w.said",
        "data": {"said": text},
        "messages": [{"role": "user", "blocks": [text]}],
        **more,
    }


def note(**data: Any) -> dict[str, Any]:
    return {"kind": "w.note", "data": data}


def receipt(what: str) -> dict[str, Any]:
    return {"kind": "w.receipt", "data": {"what": what, "cents": len(what.partition(" ")[2])}}


def ended(input: str, outcome: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": 1, "input": input, "status": 4, "outcome": outcome, **more}


def completed(input: str, result: str, **more: Any) -> dict[str, Any]:
    return ended(input, {"status": "completed", "result": result}, **more)


def paid(input: str, **more: Any) -> dict[str, Any]:
    return completed(input, f"paid {len(input.partition(' ')[2])}", **more)


def failed(name: str) -> dict[str, Any]:
    error = {"type": "ValueError", "message": f"no {name}", "detail": {"name": name}}
    return ended(f"bad {name}", {"status": "failed", "result": "half", "error": error})


def undone(name: str) -> dict[str, Any]:
    outcome = {"status": "aborted", "result": "nothing left", "reason": "undone"}
    return ended(name, outcome, **{"aborted for": "join"})


# --- documents --------------------------------------------------------------------------------

STEPS = [
    *("documents 1", "documents 2"),
    *(f"diary {number}" for number in range(6)),
    *("retire", "anew", "say a hut", "say a tent", "say a castle", "picture", "edit", "fork"),
    *("head", "camp", "fork of the fork", "order", "tell", "tell more", "background", "tree"),
    *("fell", "clock", "deadline", "parked", "repaired", "ghost", "exorcise", "grown", "grow up"),
    *("chat", "side", "end"),
]
DIARY_CHARACTERS = len("begun") + 6 * (len("; 0 ") + 1_500)


def plan(revisions: int, *steps: str) -> list[Any]:
    return ["rewindable", "as_of", {"steps": list(steps)}, revisions]


STYLE = ["latest", "current", {"tone": "frugal"}]


def terms(revisions: int) -> list[Any]:
    return ["rewindable", "current", {"text": "in writing"}, revisions]


ROOT_DOCUMENTS = {
    "w.cart": [
        "latest",
        "initial",
        {
            "items": {"apples": 1, "pears": 2, "plums": 5},
            "diary": ["begun; 0 .", DIARY_CHARACTERS],
        },
    ],
    "w.terms": terms(2),
    "w.plan": plan(5, "a hut", "a tent", "a castle", "no hut", "forget that"),
    "w.mood": ["latest", "initial", {"smiles": 5}],
    "w.style": STYLE,
}
# The plan of a fork is as of its entry, or as of now where it names none; the mood stays behind.
OWN_FORK = {
    "fork of": ["root", "7"],
    "documents": {
        "w.plan": plan(1, "a hut", "a tent", "a castle", "no hut", "forget that"),
        "w.style": STYLE,
        "w.terms": terms(1),
    },
}
FORK = {
    "fork of": ["root", "1"],
    "entries": [{"kind": "w.said", "data": {"said": "a campfire"}}],
    "documents": {
        "w.plan": plan(2, "a hut", "a tent", "a campfire"),
        "w.style": STYLE,
        "w.terms": terms(1),
    },
}
SECOND_FORK = {
    "fork of": ["fork", "0"],
    "documents": {
        "w.plan": plan(1, "a hut", "a tent", "a campfire"),
        "w.style": STYLE,
        "w.terms": terms(1),
    },
}

# --- tasks ------------------------------------------------------------------------------------

FIGS = {"type": "LookupError", "message": "figs is lost"}
ORDER = completed(
    "one",
    "ordered",
    tasks={
        "w.part good apples": paid("good apples"),
        "w.part bad pears": failed("pears"),
        "w.part wobbly plums": paid("wobbly plums"),
        "w.part broken figs": ended("broken figs", {"status": "faulted", "error": FIGS}),
        "w.part bad nuts": failed("nuts"),
        "w.part sleeper one": undone("sleeper one"),
        "w.part good bread": paid("good bread"),
        "w.part sleeper two": undone("sleeper two"),
    },
    conversations={
        "talk": {
            "notes": {
                "w.order order": [note(order=7)],
                "w.part by": [receipt("good background")],
            },
            "tasks": {"w.part by": paid("good background", background=True)},
        },
        "own fork": OWN_FORK,
    },
)


def branch(name: str, reason: str) -> dict[str, Any]:
    """A tree whose top was aborted: what is below was aborted by its owner."""
    told = ended(name, {"status": "aborted", "reason": "felled"}, **{"aborted for": reason})
    if len(name) < 3:
        told["conversations"] = {"room": {"notes": {_branch(name): [note(room=name)]}}}
        told["tasks"] = {f"w.branch {n}": branch(f"{name}{n}", "owner") for n in range(2)}
    return told


def _branch(name: str) -> str:
    return "w.branch tree" if name == "b" else f"w.branch {name[-1]}"


ROOT = {
    "entries": [
        said("a hut"),
        said("a tent"),
        said("a castle"),
        {"kind": "w.seen", "messages": [{"role": "user", "blocks": [["image", "image/png"]]}]},
        {"kind": "w.receipt", "data": {"what": "long", "cents": 1}},
        note(long=["long long ", 70_000]),
        said("no hut", edits=[["0", None]]),
        said("forget that", head="7"),
    ],
    "notes": {
        "w.part good apples": [receipt("good apples")],
        "w.part wobbly plums": [receipt("wobbly plums")],
        "w.part sleeper one": [note(undone="sleeper one")],
        "w.part good bread": [receipt("good bread")],
        "w.part sleeper two": [note(undone="sleeper two")],
        "w.part ground": [receipt("good ground")],
        "w.order order": [
            note(heard=["news", {"n": 1}]),
            note(heard=["news", {"n": 2}]),
            note(heard=["more", [3]]),
            note(notes=["order 7, told", "completed", "failed", "completed", "faulted"]),
        ],
    },
    "documents": ROOT_DOCUMENTS,
    "tasks": {
        "w.order order": ORDER,
        "w.part ground": paid("good ground", background=True),
        "w.branch tree": branch("b", "no longer wanted"),
        "w.clocked clock": completed("timer", "woken by deadline"),
        "w.clocked late": ended(
            "forever", {"status": "aborted", "reason": "deadline"}, **{"aborted for": "deadline"}
        ),
        "w.parked parked": completed("machine", "repaired"),
        "w.ghost ghost": ended(
            "boo",
            {"status": "orphaned", "reason": "missing_definition"},
            **{"aborted for": "begone"},
        ),
        "w.grown grown": {**completed("child, grown", "child, grown"), "version": 2},
    },
}

# --- agents -----------------------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"kind": "pi.user", "messages": [{"role": "user", "blocks": [text]}]}


def system(*tools: str) -> dict[str, Any]:
    return {"kind": "pi.system", "messages": [{"role": "system", "tools": list(tools)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"kind": "pi.assistant", "messages": [{"role": "assistant", "blocks": list(blocks)}]}


def result(call: int, name: str, told: Any) -> dict[str, Any]:
    message = {"role": "tool_result", "call": call, "name": name, "result": told}
    return {"kind": "pi.tool_result", "messages": [message]}


def agent(model: str, *tools: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {"model": f"scripted/{model}"}
    return {"pi.agent": {**chosen, "tools": list(tools)} if tools else chosen}


CLERK = {
    "principal": "someone",
    "entries": [user("enough?"), assistant("plenty")],
    "documents": agent("clerk"),
}
CHAT = {
    "principal": "someone",
    "entries": [
        user("hello"),
        system("look", "charge", "ask"),
        assistant("hello to you too"),
        user("work"),
        assistant("looking", ["look", {"what": "shelves"}], ["charge", {"cents": 250}]),
        result(0, "look", ["saw shelves"]),
        result(1, "charge", "settled"),
        assistant(["ask", {"question": "enough?"}]),
        result(0, "ask", ["plenty"]),
        assistant("all done"),
        user("more"),
        assistant(["look", {"what": "cellar"}]),
        result(0, "look", ["saw cellar"]),
        assistant("nothing there"),
    ],
    "documents": agent("chief", "look", "charge", "ask"),
    "submissions": {
        "r1": ["hello", "done", None, None, "0", "2"],
        "r2": ["work", "done", None, None, "3", "9"],
        "r3": ["more", "done", None, None, "10", "13"],
    },
    "conversations": {"clerk": CLERK},
}
SIDE = {
    "principal": "someone",
    "entries": [
        user("wait"),
        system("hang"),
        assistant(["hang", {}]),
        result(0, "hang", "settled"),
    ],
    "documents": agent("chief", "hang"),
    "submissions": {
        "r1": ["wait", "unanswered", "aborted", "changed my mind", "0", None],
        "r2": ["never mind", "unanswered", "withdrawn", None, None, None],
    },
}

# --- all of it --------------------------------------------------------------------------------

EXPECTED: dict[str, Any] = {
    "documents": {
        "w.stock apples": ["latest", "initial", {"pieces": 3}],
        "w.stock pears": ["latest", "initial", {"pieces": 10}],
        "w.steps": ["latest", "initial", {"done": STEPS}],
    },
    "conversations": {
        "root": ROOT,
        "fork": FORK,
        "second fork": SECOND_FORK,
        "chat": CHAT,
        "side": SIDE,
    },
    "live": [],
}
"""What `canonical` tells of a store in which W has come to its end."""

EFFECTS = sorted(
    [
        *(f"fell b{below}" for below in ("", "0", "1", "00", "01", "10", "11")),
        *("look at cellar", "look at shelves", "repair", "try plums 0", "try plums 1"),
        *("pay good apples", "pay good background", "pay good bread", "pay good ground"),
        *("pay wobbly plums", "undo sleeper one", "undo sleeper two"),
    ]
)
"""The effects that may be tried again, each of which has happened once."""
