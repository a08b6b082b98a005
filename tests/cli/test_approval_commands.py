"""Approvals as a person meets them: on the screen of a run, in lists and sheets, and decided there.

A guard asks for every call of `act`, whose ledger is a file: what it says is what really ran.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
import yaml
from terminals import Terminal, terminal

from pidurable import AgentChange, Deny, Once, Settings, open_harness
from pidurable.cli import _run
from pidurable.cli._asking import decision_of
from pidurable.registry import ExtensionLoader, Registry
from pidurable.testing import ScriptedModel

Command = Callable[..., Any]

GUARD = '''
import os
from pidurable import AgentChange, Ask, Extension, ToolCall, ToolTask, hook, tool

@tool(permission_text=lambda arguments: str(arguments["what"]))
async def act(what: str) -> str:
    """Act."""
    with open("ledger", "a") as ledger:
        ledger.write("acted\\n")
    return "it is done"

@tool(replay="park")
async def pay(what: str) -> str:
    """Pay."""
    with open("ledger", "a") as ledger:
        ledger.write("paid\\n")
    if not os.path.exists("mended"):
        os._exit(9)
    return "paid"

@tool(replay="safe")
async def ask(task: str, call: ToolCall) -> str:
    """Ask a sub-agent."""
    child = await call.child(agent=AgentChange())
    return (await (await child.submit(task, request_id=call.key("task"))).wait()).text

async def before_tool(call):
    if call.name == "act":
        return Ask("high", "it \\x1b[31macts\\u202e")

hooks = [hook(ToolTask, before_tool=before_tool)]
extension = Extension("guard", tools=[act, pay, ask], hooks=hooks)
'''
HOSTILE = (
    "ls\r\x1b[2K\x1b[1A\x1b]0;t\x07\x1b]52;c;x\x07 \x9d hidden \x9c \u202egnp\u2066 \U000e0041"
)
ACT = "- calls: [{name: act, arguments: {what: ship}}]\n- text: all done\n"


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the guard, and a script that acts once."""
    monkeypatch.setattr(_run, "STUCK_LOOK_SECONDS", 0.02)
    (tmp_path / "guard.py").write_text(GUARD)
    (tmp_path / "s.yaml").write_text(ACT)
    return tmp_path


def run(command: Command, *more: str, **options: Any) -> Any:
    """Run the prompt of these tests."""
    return command("run", "go", "--script", "s.yaml", "-e", "guard.py", *more, **options)


def resume(command: Command, *more: str) -> Any:
    """Go on with it."""
    return command("resume", "--script", "s.yaml", "-e", "guard.py", *more)


def ledger(folder: Path) -> list[str]:
    """What really ran."""
    path = folder / "ledger"
    return path.read_text().splitlines() if path.exists() else []


def commands_in(text: str) -> list[list[str]]:
    """The commands that a screen tells to type, without the program's name."""
    found = re.findall(r"`pidurable ([^`]+)`", text)
    return [each.split() for each in found]


def test_without_a_terminal_a_run_ends_with_6_and_the_commands_it_names_go_on(
    command: Command, guarded: Path
) -> None:
    """What waits is told with the commands that decide it; typed as told, they do."""
    first = run(command)
    approve = next(each for each in commands_in(first.err) if each[1] == "approve")
    show = next(each for each in commands_in(first.err) if each[1] == "show")
    again = next(each for each in commands_in(first.err) if each[0] == "resume")
    shown = command(*show)
    before = ledger(guarded)
    approved = command(*approve)
    plan = command(*again, "--plan")
    last = command(*again)

    assert (first.code, first.out, before) == (6, "", [])
    assert "waits for a person" in first.err
    assert approve[2] in shown.out
    assert approve in commands_in(shown.out)
    assert re.fullmatch(r"permission \d+ \(act, task \d+\) granted; digest \w{16}\n", approved.out)
    assert "`pidurable resume` goes on" in approved.err
    assert f"permission {approve[2]} is granted: it begins, if it still is" in plan.out
    assert (last.code, last.out, ledger(guarded)) == (0, "all done\n", ["acted"])


def test_a_plan_without_the_extension_says_that_what_was_granted_will_not_run(
    command: Command, guarded: Path
) -> None:
    """Whoever forgets to load it is told where they decide, and before anything is lost."""
    run(command)
    (id,) = command("approval", "list", "-o", "ids").out.split()
    approved = command("approval", "approve", id)
    plan = command("resume", "--plan")
    whole = resume(command, "--plan")

    assert 'load "guard" with it (`--extension PATH`)' in approved.err
    assert f"permission {id} is granted, but its tool is not installed now: not run" in plan.out
    assert 'load the extension "guard"' in plan.out
    assert "not installed" not in whole.out
    assert ledger(guarded) == []


def test_a_denial_tells_the_model_why(command: Command, guarded: Path) -> None:
    """The words of the person are the call's result, and nothing ran."""
    run(command)
    (id,) = command("approval", "list", "-o", "ids").out.split()
    denied = command("approval", "deny", id, "use the other one")
    last = resume(command)
    log = command("conversation", "log").out

    assert denied.code == last.code == 0
    assert "denied" in denied.out
    assert f"permission {id} is denied: not run, and the model is told" in last.err
    assert "use the other one" in log
    assert ledger(guarded) == []


def test_a_decision_comes_once(command: Command, guarded: Path) -> None:
    """The second one is told what the first was, and who decided."""
    run(command)
    (id,) = command("approval", "list", "-o", "ids").out.split()
    command("approval", "deny", id, "--by", "ann")
    late = command("approval", "approve", id)

    assert late.code == 1
    assert f"permission request {id} is denied by 'ann'" in late.err
    assert command("approval", "list").err.startswith("nothing waits for a person\n")
    assert command("approval", "show", id, "-o", "json").code == 0


def test_what_was_decided_is_told_also_where_another_cannot_be(
    command: Command, guarded: Path
) -> None:
    """Of several requests each is decided or named with the reason, in any order."""
    acts = [f"{{name: act, arguments: {{what: {what}}}}}" for what in ("git log", "ship", "git go")]
    (guarded / "s.yaml").write_text(f"- calls: [{', '.join(acts)}]\n- text: all done\n")
    run(command)
    asked = json.loads(command("approval", "list", "-o", "json").out)
    ids = [str(each["id"]) for each in sorted(asked, key=lambda each: each["text"])]
    found = command("approval", "approve", ids[0], ids[2], ids[1], "--pattern", "git *")

    assert found.code == 1
    assert [line.split()[1] for line in found.out.splitlines()] == ids[:2]
    assert f"permission {ids[2]} was not decided: " in found.err
    assert "nothing was run" in found.err
    assert command("approval", "list", "-o", "ids").out.split() == ids[2:]


def test_a_pattern_lets_later_calls_through_until_it_is_revoked(
    command: Command, guarded: Path
) -> None:
    """Granted with an end, listed with its uses, and asked again once it is taken back."""
    run(command)
    (id,) = command("approval", "list", "-o", "ids").out.split()
    granted = command("approval", "approve", id, "--pattern", "sh*", "--expires", "30d")
    resume(command)
    (guarded / "s.yaml").write_text(f"steps:\n{_indented(ACT)}position: turn\n")
    second = run(command)
    (grant,) = json.loads(command("approval", "grants", "-o", "json").out)
    listed = command("approval", "grants").out
    revoked = command("approval", "revoke", str(grant["id"]))
    third = run(command)

    assert 'later calls that match "sh*", until ' in granted.out
    assert (second.code, ledger(guarded)) == (0, ["acted", "acted"])
    assert (grant["pattern"], grant["uses"]) == ("sh*", 1)
    assert "sh*" in listed
    assert "revoked, after 1 uses" in revoked.out
    assert third.code == 6


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def test_a_request_whose_time_is_over_is_shown_so_where_nobody_holds_the_session(
    command: Command, guarded: Path
) -> None:
    """It says for how long it is over and names no way to decide it: there is none any more."""
    soon = GUARD.replace('u202e")', 'u202e", seconds=600)')
    assert soon != GUARD
    (guarded / "guard.py").write_text(soon)
    run(command)
    (id,) = command("approval", "list", "-o", "ids").out.split()
    in_time = (command("approval", "list").out, command("approval", "show", id).out)
    store = guarded / ".pidurable" / "session.sqlite"
    _ask_earlier(store, by_us=700_000_000)
    listed, sheet = command("approval", "list").out, command("approval", "show", id).out
    late = command("approval", "approve", id)

    assert re.search(r" in \d+m\d\ds", in_time[0])
    assert f"approval approve {id}" in in_time[1]
    assert re.search(r" \dm\d\ds ago", listed)
    assert re.search(r"open, but its time was over \dm\d\ds ago: it expires when", sheet)
    assert "next:" not in sheet
    assert (late.code, "expired" in late.err) == (1, True)


def _ask_earlier(store: Path, *, by_us: int) -> None:
    """Let the open request have been made, and end, that much earlier."""
    with contextlib.closing(apsw.Connection(str(store))) as db, db:
        ((document, text),) = db.execute(
            "select document, value from revisions join documents on documents.id = document"
            " where name = 'pi.permission'"
        )
        value = json.loads(text)
        for name in ("created_us", "expires_us"):
            value[name] -= by_us
        db.execute(
            "update revisions set value = ? where document = ?", (json.dumps(value), document)
        )


@pytest.mark.parametrize(
    ("what", "code", "lines", "result"),
    [
        (("rerun",), 0, ["paid", "paid"], "paid"),
        (("happened", "--result", "receipt 7"), 0, ["paid"], "receipt 7"),
        (("interrupted",), 0, ["paid"], "outcome unknown"),
    ],
)
def test_an_effect_that_a_crash_interrupted_is_decided_by_a_person(
    command: Command,
    guarded: Path,
    what: tuple[str, ...],
    code: int,
    lines: Any,
    result: str,
    slow_run: bool,
) -> None:
    """Run again, or its result, or that nobody knows; a plain yes is pointed to the right verb."""
    if not slow_run and what[0] != "happened":
        pytest.skip("takes seconds; run it with -m slow")
    (guarded / "s.yaml").write_text("- calls: [{name: pay, arguments: {what: rent}}]\n- text: ok\n")
    with terminal(guarded, "run", "go", "--script", "s.yaml", "-e", "guard.py") as first:
        assert first.wait() == 9
    (guarded / "mended").touch()
    plan = resume(command, "--plan")
    parked = resume(command)
    (id,) = command("approval", "list", "-o", "ids").out.split()
    yes = command("approval", "approve", id)
    decided = command("approval", "decide", id, *what)
    last = resume(command)
    log = command("conversation", "log").out

    assert "park" in plan.out
    assert "a person is asked" in plan.out
    assert parked.code == 6
    assert "what became of it?" in parked.err
    assert yes.code == 2
    assert f"`pidurable approval decide {id} rerun`" in yes.err
    assert decided.code == 0
    follows = {"rerun": "it is run again", "happened": "has given", "interrupted": "not repeated"}
    assert follows[what[0]] in last.err
    assert (last.code, ledger(guarded)) == (code, lines)
    assert result in log or result == "outcome unknown"


# C060
def test_a_sub_agents_question_is_listed_with_its_path_and_answered_after_a_restart(
    command: Command, guarded: Path
) -> None:
    """Asked at depth 3 with nobody there: told by the run, listed below the root, and decided."""
    (guarded / "s.yaml").write_text(
        """
- when: {user: leaf, turn: 0}
  calls: [{name: act, arguments: {what: ship}}]
- when: {user: leaf}
  text: leaf done
- when: {user: middle, turn: 0}
  calls: [{name: ask, arguments: {task: leaf}}]
- when: {user: middle}
  text: middle done
- when: {user: go, turn: 0}
  calls: [{name: ask, arguments: {task: middle}}]
- when: {user: go}
  text: all done
"""
    )
    first = run(command)
    (request,) = json.loads(command("approval", "list", "-o", "json").out)
    (root, *_) = (id for kind, id in request["path"] if kind == "conversation")
    below = command("approval", "list", "--below", str(root), "-o", "ids").out.split()
    sheet = command("approval", "show", str(request["id"])).out
    plan = resume(command, "--plan")
    explained = command("task", "explain", str(request["path"][-1][1]))
    command("approval", "approve", str(request["id"]))
    last = resume(command)

    assert first.code == 6
    assert f"permission {request['id']}" in first.err
    assert [kind for kind, _ in request["path"]] == [
        *("conversation", "pi.generation", "pi.tool") * 2,
        *("conversation", "pi.generation"),
    ]
    assert below == [str(request["id"])]
    assert " > ".join(f"{kind} {id}" for kind, id in request["path"]) in sheet
    assert f"waits for a person: permission {request['id']}" in plan.out
    assert f"permission {request['id']}" in explained.out
    assert (last.code, last.out, ledger(guarded)) == (0, "all done\n", ["acted"])


# C060
def test_a_run_that_may_ask_nobody_settles_by_itself(command: Command, guarded: Path) -> None:
    """With `--no-questions` the call is denied at once, the model is told, and the run ends."""
    done = run(command, "--no-questions")
    log = command("conversation", "log").out

    assert (done.code, done.out, ledger(guarded)) == (0, "all done\n", [])
    assert "nobody can be asked" in log.lower()
    assert not commands_in(done.err)


# C063
@pytest.mark.parametrize("what", [HOSTILE, "\n" * 100_000 + "; rm -rf ~"])
def test_hostile_arguments_are_shown_escaped_and_cuts_are_marked(
    command: Command, guarded: Path, what: str
) -> None:
    """On every screen nothing is obeyed, nothing hidden in silence, and the digest stands there."""
    script = [{"calls": [{"name": "act", "arguments": {"what": what}}]}, {"text": "all done"}]
    (guarded / "s.yaml").write_text(yaml.safe_dump(script))
    screens = {"run": run(command).err}
    (request,) = json.loads(command("approval", "list", "-o", "json").out)
    id, task = str(request["id"]), str(request["task"])
    for verb in (
        ("approval", "list"),
        ("approval", "show", id),
        ("conversation", "log"),
        ("task", "show", task),
        ("task", "explain", task),
        ("task", "tree"),
        ("resume", "--plan", "-e", "guard.py"),
    ):
        found = command(*verb)
        screens[" ".join(verb)] = found.out + found.err
    approved = command("approval", "approve", id).out

    assert request["arguments"] == {"what": what}
    for name, text in screens.items():
        lines = [line for line in text.split("\n") if not line.isprintable()]
        assert lines == [], name
        assert max(map(len, text.split("\n"))) < 9_000, name
        assert len(text.split("\n")) < 120, name
    sheet = screens[f"approval show {id}"]
    assert request["digest"] in sheet
    assert request["digest"][:16] in screens["run"]
    assert request["digest"][:16] in approved
    if len(what) > 10_000:
        assert "more]" in sheet
    else:
        assert "\\u009d hidden \\u009c" in sheet
        assert "\\u001b[2K" in sheet
        assert "\\u202egnp" in sheet
        assert "\\U000e0041" in sheet


ON_CUE = '''

import trio
from pidurable.cli import _asking

class CuedTrio:
    """Is deaf until it is told that whatever is not to be heard was typed."""

    def __getattr__(self, name):
        return getattr(trio, name)

    async def sleep(self, seconds):
        assert seconds == _asking.DEAF_SECONDS == 0.5
        while not os.path.exists("typed"):
            await trio.sleep(0.01)
        os.unlink("typed")

def forget_typed(stream, forget=_asking._forget_typed):
    forget(stream)
    open("listening", "w").close()

_asking.trio, _asking._forget_typed = CuedTrio(), forget_typed
'''


@contextlib.contextmanager
def asked(guarded: Path) -> Iterator[Terminal]:
    """A run at a terminal whose half second of deafness ends when `until_it_listens` says so."""
    (guarded / "guard.py").write_text(GUARD + ON_CUE)
    with terminal(guarded, "run", "go", "--script", "s.yaml", "-e", "guard.py") as shell:
        yield shell


def until_it_listens(guarded: Path, shell: Terminal) -> None:
    """Let the half second be over, and wait until what was typed in it has been thrown away."""
    (guarded / "typed").touch()
    shell.read_until((guarded / "listening").exists)
    assert not (guarded / "typed").exists()
    (guarded / "listening").unlink()


def test_at_a_terminal_the_person_is_asked_right_there(guarded: Path) -> None:
    """What was typed before the question counts for nothing; y lets the call run, once."""
    with asked(guarded) as shell:
        shell.press(b"n\n")
        shell.until("y: yes, this once")
        shell.press(b"n\n")  # in the first half second
        until_it_listens(guarded, shell)
        shell.press(b"y\n")
        code = shell.wait()
        text = shell.text()

    assert code == 0, text
    assert "granted" in text
    assert ledger(guarded) == ["acted"]


@pytest.mark.slow
def test_at_a_terminal_any_other_words_are_a_no_with_a_text(guarded: Path, slow_run: bool) -> None:
    """What the person types goes to the model as the result of the call."""
    if not slow_run:
        pytest.skip("takes seconds; run it with -m slow")
    with asked(guarded) as shell:
        shell.until("y: yes, this once")
        until_it_listens(guarded, shell)
        for nothing_yet in (b"\n", b"yse\n"):
            shell.press(nothing_yet)
            until_it_listens(guarded, shell)
        shell.press(b"use the other one\n")
        code = shell.wait()
        text = shell.text()

    assert code == 0, text
    assert "'yse' is neither y nor n" in text
    assert "They said: use the other one" in text
    assert ledger(guarded) == []


@pytest.mark.slow
def test_at_a_terminal_the_end_of_input_leaves_the_question_open(
    guarded: Path, slow_run: bool
) -> None:
    """Ctrl-D stops asking: the run ends with 6, as without a terminal, and can be resumed."""
    if not slow_run:
        pytest.skip("takes seconds; run it with -m slow")
    with asked(guarded) as shell:
        shell.until("y: yes, this once")
        until_it_listens(guarded, shell)
        shell.press(b"\x04")
        code = shell.wait()

    assert code == 6, shell.text()
    assert "the requests stay open" in shell.text()


@pytest.mark.parametrize("verb", ["approve", "deny"])
async def test_a_holder_decides_for_who_asks_beside_it(
    command: Command, guarded: Path, verb: str
) -> None:
    """Beside a running process the decision is handed to it, and its call goes on at once."""
    registry = Registry()
    ExtensionLoader(registry).load(str(guarded / "guard.py"))
    os.chdir(guarded)
    store = guarded / ".pidurable" / "session.sqlite"
    store.parent.mkdir()
    models = ScriptedModel.load(guarded / "s.yaml", name="m").models()
    async with open_harness(store, registry=registry, models=models) as harness:
        root = await harness.root(agent=AgentChange(model="scripted/m"))
        submission = await root.submit("go")
        while not harness.permissions():  # noqa: ASYNC110 - read from outside as a person would
            await trio.sleep(0.01)
        (request,) = harness.permissions()
        found = await trio.to_thread.run_sync(
            lambda: command("approval", verb, str(request.id), "--by", "ann")
        )
        with trio.fail_after(60):
            settled = await submission.wait()
        after = await harness.permission(request.id)

    assert found.code == 0
    assert "holds this session: asking it" in found.err
    assert "nothing was run" not in found.err
    assert settled.text == "all done"
    assert after.decided_by == "ann"
    assert isinstance(after.decision, Once if verb == "approve" else Deny)
    assert ledger(guarded) == (["acted"] if verb == "approve" else [])


async def test_a_run_beside_a_holder_says_what_waits_and_leaves_with_6(
    command: Command, guarded: Path
) -> None:
    """The holder's call waits for a person: told with the commands, and nobody is waited for."""
    registry = Registry()
    ExtensionLoader(registry).load(str(guarded / "guard.py"))
    store = guarded / ".pidurable" / "session.sqlite"
    store.parent.mkdir()
    models = ScriptedModel.load(guarded / "s.yaml", name="m").models()
    settings = Settings(commands_seconds=0.01)
    async with open_harness(store, registry=registry, models=models, settings=settings) as harness:
        await harness.root(agent=AgentChange(model="scripted/m"))
        found = await trio.to_thread.run_sync(lambda: command("run", "go"))
        (request,) = harness.permissions()

    assert found.code == 6
    assert ["approval", "approve", str(request.id)] in commands_in(found.err)
    assert f"it goes on in process {os.getpid()}" in found.err


def test_what_a_typed_line_decides() -> None:
    """Yes and no in their words, everything else is a no with a text.

    Nothing is decided by a blank line, or by a short word that is nearly one of them.
    """

    class Request:
        subject = "call"

    request: Any = Request()

    assert decision_of(request, " Y\n") == Once()
    assert decision_of(request, "no\n") == Deny()
    assert decision_of(request, "yes please\n") == Deny("yes please")
    assert decision_of(request, " \n") is None
    for slip in ("yse", "ye", "nope", "yes!", "Yess", "on", "nyo", "nah", "yep", "ys", "n,"):
        assert decision_of(request, f"{slip}\n") is None, slip
    for meant in ("stop", "ask me", "never", "why?", "no, later", "rm", "5", "yes, but", "\u00e9"):
        assert decision_of(request, f"{meant}\n") == Deny(meant), meant
    request.subject = "effect"
    assert decision_of(request, "y\n") is None
    assert decision_of(request, "h it was sent\n").result == "it was sent"
