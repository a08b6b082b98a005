"""`run` and `resume` end to end: a scripted model, real tools, real exit codes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from pidurable import ExtensionLoader, Registry, open_harness
from pidurable.cli import _run
from pidurable.cli._options import Sources, resolve_options
from pidurable.cli._plan import Plan, PlanItem
from pidurable.cli._run import NOTICE
from pidurable.cli._signals import Interrupts
from pidurable.errors import StorageAccessError
from pidurable.session._seams import Failpoints


class DieAt(Failpoints):
    """Raises at the n-th passing of a point."""

    def __init__(self, name: str, number: int = 1) -> None:
        self.name = name
        self.left = number

    def hit(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A model that runs one command and answers."""
    path = tmp_path / "model.yaml"
    path.write_text(
        '- text: "I look."\n'
        '  calls: [{name: bash, arguments: {command: "echo one >> effects; echo seen"}}]\n'
        '- expect: {text: "seen"}\n'
        '  text: ["It is ", "\\e[31mdone\\e[0m."]\n'
    )
    return path


def lines_of(text: str) -> list[str]:
    """Lines with durations left out."""
    return [re.sub(r"\d+\.\d+s", "0.0s", line) for line in text.splitlines()]


def test_the_answer_goes_to_stdout_and_everything_else_to_stderr(command, script) -> None:
    """A pipe gets the answer alone; what happened is told in plain lines, what tools may first."""
    found = command("run", "do it", "--script", str(script))

    assert (found.code, found.out) == (0, "It is done.\n")
    assert lines_of(found.err) == [
        NOTICE,
        "run 4 began",
        "I look.",
        'task 9: bash {"command": "echo one >> effects; echo seen"}',
        "task 9: bash done in 0.0s",
        "    seen",
        "run 4 done after 0.0s",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "bad.yaml cannot be read: while parsing"),
        ("- txt: x\n", "steps[0] has no field 'txt'; did you mean 'text'?"),
        ("- 7\n", "steps[0] must be a mapping, got 7"),
        ("", "bad.yaml must be a mapping, got None"),
    ],
)
def test_a_script_that_is_none_is_refused_before_anything_is_stored(
    command, tmp_path: Path, text: str, said: str
) -> None:
    """A mistake in the file is a mistake of usage, with its place, and no run that has failed."""
    (tmp_path / "bad.yaml").write_text(text)

    found = command("run", "do it", "--script", "bad.yaml")

    assert found.code == 2
    assert found.err.startswith("pidurable: --script: ")
    assert said in found.err
    assert not (tmp_path / ".pidurable").exists()


def test_a_script_that_is_none_is_refused_before_a_resume_says_anything_else(
    command, script, tmp_path: Path
) -> None:
    """Nothing is announced that does not come; the plan alone needs no model."""
    command("run", "do it", "--script", str(script), failpoints=DieAt("CP2"))
    (tmp_path / "bad.yaml").write_text("- 7\n")

    found = command("resume", "--script", "bad.yaml")
    plan = command("resume", "--plan", "--script", "bad.yaml")

    assert found.code == 2
    assert found.err.startswith("pidurable: --script: ")
    assert "resuming" not in found.err
    assert plan.code == 0
    assert "not answered yet" in plan.out


def test_json_is_one_object_with_the_whole_result(command, script) -> None:
    """`-o json` gives submission, run, status, text, reason and usage, and nothing besides."""
    found = command("run", "do it", "--script", str(script), "-o", "json")

    value = json.loads(found.out)
    usage = value.pop("usage")
    assert value == {
        "submission": 3,
        "run": 4,
        "status": "done",
        "text": "It is \x1b[31mdone\x1b[0m.",
        "reason": None,
        "detail": None,
    }
    assert usage["requests"] == 2
    assert usage["output_tokens"] > 0


def test_events_are_json_lines_and_the_last_is_the_result(command, script) -> None:
    """A program that reads lines sees all that happens, and then what came of it."""
    found = command("run", "do it", "--script", str(script), "--events")
    told = [json.loads(line) for line in found.out.splitlines()]
    types = [each["type"] for each in told]

    assert found.code == 0
    assert (types[0], types[-2], types[-1]) == ("snapshot", "run_end", "result")
    assert types.count("tool_execution_end") == 1
    assert told[-1]["status"] == "done"
    assert told[-1]["text"].startswith("It is ")
    assert "run 4 began" in found.err


class PressAt(Failpoints):
    """Presses Ctrl-C at the first passing of a point."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.caught: list[tuple[Interrupts, trio.lowlevel.TrioToken]] = []
        monkeypatch.setattr(_run, "catch_interrupts", self._catch)

    @contextmanager
    def _catch(self, resume_command: str) -> Iterator[Interrupts]:
        interrupts = Interrupts(resume_command=resume_command)
        self.caught.append((interrupts, trio.lowlevel.current_trio_token()))
        yield interrupts

    def hit(self, name: str) -> None:
        if name == self.name and self.caught[-1][0].first is None:
            self.caught[-1][0].on_signal(signal.SIGINT, self.caught[-1][1])


def test_the_last_event_tells_how_it_stands_when_a_person_has_left(
    command, script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C a program learns that its prompt is placed, in which run, and what was spent."""
    argv = ("run", "do it", "--script", str(script), "--events")
    found = command(*argv, failpoints=PressAt("CP2", monkeypatch))
    told = [json.loads(line) for line in found.out.splitlines()]
    usage = told[-1].pop("usage")
    resumed = command("resume")

    assert found.code == 130
    assert "run_end" not in [each["type"] for each in told]
    assert told[-1] == {
        "type": "result",
        "submission": 3,
        "run": 4,
        "status": "placed",
        "text": None,
        "reason": None,
        "detail": None,
    }
    assert usage["requests"] == 1
    assert (resumed.code, resumed.out) == (0, "It is done.\n")


def test_who_reads_no_events_is_not_kept_by_a_store_that_cannot_be_read(
    command, script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C nothing is read that nobody is told: the exit code says that a person left."""

    def cannot_be_read(*args: object) -> None:
        raise StorageAccessError("s.db", "on purpose")

    monkeypatch.setattr(_run, "settled_of", cannot_be_read)
    argv = ("run", "do it", "--script", str(script))
    found = command(*argv, failpoints=PressAt("CP2", monkeypatch))

    assert found.code == 130


def test_the_next_prompt_goes_on_in_the_same_conversation(command, script, tmp_path) -> None:
    """A second run finds the first one's history, model and folder."""
    command("run", "do it", "--script", str(script))
    with script.open("a") as file:
        file.write('- {when: {user: "more"}, expect: {text: "do it"}, text: "more done"}\n')

    found = command("run", "-", stdin="more, please")

    assert (found.code, found.out) == (0, "more done\n")


@pytest.mark.parametrize(
    ("step", "code", "message"),
    [
        ("{error: other}", 1, "model_error"),
        ("{error: auth}", 1, "model_error"),
        ("{error: overflow}", 1, "context_overflow"),
        ("{text: '', calls: [{name: nothing}]}", 1, "model_error"),
    ],
)
def test_a_run_without_an_answer_is_a_failure(
    command, tmp_path: Path, step: str, code: int, message: str
) -> None:
    """No answer means exit 1, nothing on stdout, and the reason with its meaning on stderr."""
    (tmp_path / "m.yaml").write_text(f"- {step}\n")

    found = command("run", "x", "--script", "m.yaml")

    assert (found.code, found.out) == (code, "")
    assert f"unanswered: {message}" in found.err
    assert "pidurable conversation log" in found.err


def test_a_wait_that_takes_too_long_ends_with_8_and_can_be_resumed(command, tmp_path) -> None:
    """`--timeout` leaves the work in the store; `resume` brings it to its end."""
    (tmp_path / "m.yaml").write_text(
        "log: requests\nsteps:\n- {text: [a, b], stall: {after: 1}, times: 1}\n"
    )

    late = command("run", "x", "--script", "m.yaml", "--timeout", "0.3")
    done = command("resume")

    assert (late.code, late.out) == (8, "")
    assert "`pidurable resume` goes on" in late.err
    assert (done.code, done.out) == (0, "ab\n")


def test_a_request_id_given_twice_is_done_once(command, script, tmp_path) -> None:
    """The same prompt under the same request id gives the first answer again, without new work."""
    first = command("run", "do it", "--script", str(script), "--request-id", "r1")
    again = command("run", "do it", "--request-id", "r1")
    other = command("run", "do that", "--request-id", "r1")

    assert first.out == again.out == "It is done.\n"
    assert (tmp_path / "effects").read_text() == "one\n"
    assert other.code == 2
    assert "already names submission 3" in other.err


# --- resuming ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "verdict"),
    [
        ("CP1", "had not begun|interrupt"),
        ("CP2", "interrupt"),
        ("CP3", "interrupt"),
        ("CP5", "resend|goes"),
    ],
)
def test_an_interrupted_run_says_what_becomes_of_it_and_ends(
    command, script, tmp_path: Path, point: str, verdict: str
) -> None:
    """Stopped anywhere, a run is planned, resumed and answered; its effect is not repeated."""
    script.write_text(script.read_text().replace('expect: {text: "seen"}', "thinking: hm"))
    stopped = command("run", "do it", "--script", str(script), failpoints=DieAt(point))
    effects = tmp_path / "effects"
    before = effects.read_text() if effects.exists() else ""

    plan = command("resume", "--plan")
    as_json = json.loads(command("resume", "--plan", "-o", "json").out)
    refused = command("run", "something else")
    resumed = command("resume")
    after = effects.read_text() if effects.exists() else ""
    nothing = command("resume")

    assert stopped.code == 130
    assert "pidurable resume" in stopped.err
    assert re.search(verdict, plan.out)
    assert as_json["submissions"] == [3]
    assert refused.code == 2
    assert (resumed.code, resumed.out) == (0, "It is done.\n")
    assert before in after
    assert len(after.split()) <= 1
    assert (nothing.code, nothing.out) == (0, "")
    assert "nothing to resume" in nothing.err


def test_a_safe_call_is_run_again(command, tmp_path: Path) -> None:
    """A call that only reads is planned as `rerun` and gives its result after all."""
    (tmp_path / "notes").write_text("remember\n")
    (tmp_path / "m.yaml").write_text(
        "- calls: [{name: read, arguments: {path: notes}}]\n"
        "- {expect: {results: [remember]}, text: read}\n"
    )

    command("run", "x", "--script", "m.yaml", failpoints=DieAt("CP3"))
    plan = command("resume", "--plan")
    found = command("resume", "-o", "json")

    assert "rerun     task 9: read" in plan.out
    assert found.code == 0
    assert json.loads(found.out)["submissions"][0]["text"] == "read"


def test_continue_goes_on_with_the_old_work_and_then_does_the_new(command, script) -> None:
    """`run --continue` finishes what was left, then answers its own prompt."""
    with script.open("a") as file:
        file.write('- {when: {user: "second"}, text: "second done"}\n')
    command("run", "do it", "--script", str(script), failpoints=DieAt("CP1"))

    found = command("run", "second", "--continue")
    log = command("conversation", "log")

    assert (found.code, found.out) == (0, "second done\n")
    assert log.out.index("It is done.") < log.out.index("second done")


# C015
def test_work_whose_code_is_gone_is_named_and_left_for_a_person(command, tmp_path: Path) -> None:
    """With a definition missing, resume says which task is blocked and how to go on: exit 6."""
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "m.yaml").write_text("- calls: [{name: pay, arguments: {}}]\n- ok\n")
    extension = str(tmp_path / "shop.py")
    late = command("run", "x", "--script", "m.yaml", "-e", extension, "--timeout", "0.3")

    stuck = command("resume")
    done = command("resume", "-e", extension)

    assert late.code == 8
    assert stuck.code == 6
    assert "missing_definition" in stuck.err
    assert "pidurable task abort" in stuck.err
    assert (done.code, done.out) == (0, "ok\n")


def test_the_plan_judges_by_what_is_installed_now(command, tmp_path: Path) -> None:
    """Whether a task is blocked over its code is looked up, not read from the last process."""
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "m.yaml").write_text("- calls: [{name: pay, arguments: {}}]\n- ok\n")
    extension = str(tmp_path / "shop.py")
    command("run", "x", "--script", "m.yaml", "-e", extension, "--timeout", "0.3")

    before = command("resume", "--plan")
    command("resume")
    after = command("resume", "--plan", "-e", extension)

    assert "shop.payment: missing_definition" in before.out
    assert "missing_definition" not in after.out


def test_a_long_plan_is_cut_and_counted() -> None:
    """Thousands of tasks do not scroll away what matters; JSON has them all."""
    items = [PlanItem(task=n, kind="x", verdict="continue", text="goes on") for n in range(60)]
    items.append(PlanItem(task=60, kind="x", verdict="blocked", text="waits"))
    plan = Plan(items=tuple(items), submissions=(), queued=0, held=())

    lines = plan.lines(resolve_options(Sources(environ={})))

    assert len(lines) == 41
    assert lines[-1] == "  … and 21 tasks more: 1 blocked, 20 continue"
    assert len(plan.to_json()["items"]) == 61


@pytest.mark.parametrize(
    ("store", "typed"),
    [
        (None, "(`pidurable run --continue PROMPT`)"),
        ("my work/s", "(`pidurable run --continue PROMPT --store 'my work/s'`)"),
    ],
)
def test_a_plan_names_the_command_for_its_own_store(store: str | None, typed: str) -> None:
    """As it stands there it takes the held input along, and works on no other store."""
    plan = Plan(items=(), submissions=(7,), queued=1, held=(7,))

    lines = plan.lines(resolve_options(Sources(environ={}), store=store))

    assert lines[-1].endswith(f"takes it along {typed}")


SHOP = '''
from datetime import UTC, datetime, timedelta
import attrs
from pidurable import Extension, Task, TaskContext, ToolCall, nothing_to_undo, phase, tool

@attrs.frozen
class Wait:
    """Nothing has happened."""

@attrs.frozen
class Pay:
    """May have been paid."""

class Payment(Task[str, Wait | Pay, str]):
    name = "shop.payment"
    version = 1
    def initial(self, input: str) -> Wait:
        return Wait()
    @phase
    async def wait(self, at: Wait, ctx) -> None:
        soon = datetime.now(UTC) + timedelta(seconds=0.5)
        await ctx.wait(then=Pay(), deadline=soon)
    @phase
    async def pay(self, at: Pay, ctx) -> None:
        await ctx.complete("paid")
    abort = nothing_to_undo

@tool(replay="safe")
async def pay(call: ToolCall) -> str:
    """Pay."""
    task = await call.create_task(Payment, "x", key="pay")
    return "paid"

extension = Extension("shop", tools=[pay], tasks=[Payment()])
'''


WAITS = '''
import attrs
from pidurable import Extension, Task, nothing_to_undo, phase

@attrs.frozen
class Begin:
    """Nothing has happened."""

class Night(Task[None, Begin, str]):
    name = "shop.night"
    abort = nothing_to_undo
    def initial(self, input: None) -> Begin:
        return Begin()
    @phase
    async def begin(self, at: Begin, ctx) -> None:
        await ctx.complete("done")

extension = Extension("night", tasks=[Night()])
'''


def test_what_a_restart_interrupted_is_resumed_by_the_two_commands_that_are_named(
    command, tmp_path: Path
) -> None:
    """`resume` says how a person lets it go on, and that is what it takes, also after a look."""
    (tmp_path / "night.py").write_text(WAITS)
    extension = str(tmp_path / "night.py")
    store = str(tmp_path / "s.sqlite")

    async def prepare() -> int:
        registry = Registry()
        ExtensionLoader(registry).load(extension)
        night = registry.snapshot.definition("shop.night")
        async with open_harness(store, registry=registry) as harness:
            root = await harness.root()
            async with harness.commit() as tx:
                return tx.create_task(type(night), None, conversation=root.id, on_restart="wait")

    task = trio.run(prepare)
    stuck = command("resume", "-e", extension, "--store", store)
    lifted = command("task", "resume", str(task), "--store", store)
    looked = command("task", "retry", str(task), "--store", store)
    done = command("resume", "-e", extension, "--store", store)

    assert stuck.code == 6
    named = f"next: `pidurable task resume {task} --store {store}` and `pidurable resume --store"
    assert named in stuck.err
    assert (lifted.code, looked.code, done.code) == (0, 0, 0)
    assert command("task", "show", str(task), "--store", store).out.count("completed") >= 1


# C029
def test_what_is_queued_behind_a_failed_run_is_named_and_not_waited_for(
    command, tmp_path: Path
) -> None:
    """Resume ends with 6 over an input that nothing would place, and says what takes it along."""
    # However long the first life takes to end, its run does not end in it.
    (tmp_path / "m.yaml").write_text("- {stall: {after: 0}}\n")
    command("run", "first", "--script", "m.yaml", failpoints=DieAt("CP5"))
    (tmp_path / "m.yaml").write_text(
        "- {when: {user: first}, error: other}\n"
        "- {when: {user: second}, error: other}\n"
        "- {when: {user: third}, text: all answered}\n"
    )

    behind = command("run", "second", "--continue", "--timeout", "100")
    plan = command("resume", "--plan")
    stuck = command("resume", "--timeout", "100", "-o", "json")
    taken = command("run", "third", "--continue")

    assert behind.code == 6
    assert "stays queued" in behind.err
    assert "pidurable run --continue PROMPT" in behind.err
    assert re.search(r"held +input \d+: the run before it had no answer", plan.out)
    assert stuck.code == 6
    assert [each["status"] for each in json.loads(stuck.out)["submissions"]] == ["queued"]
    assert (taken.code, taken.out) == (0, "all answered\n")
    assert command("resume").code == 0


def test_the_plan_says_that_a_tool_is_asked_what_became_of_its_call(
    command, tmp_path: Path
) -> None:
    """A call with `replay="reconcile"` is planned as that, and goes that way."""
    (tmp_path / "post.py").write_text(POST)
    (tmp_path / "m.yaml").write_text(
        "- calls: [{name: post, arguments: {}}]\n- {expect: {results: [it arrived]}, text: ok}\n"
    )
    extension = ("-e", str(tmp_path / "post.py"))
    command("run", "x", "--script", "m.yaml", *extension, failpoints=DieAt("CP3"))

    plan = command("resume", "--plan", *extension)
    done = command("resume", *extension)

    assert "reconcile task 9: post {} had begun" in plan.out
    assert (done.code, done.out) == (0, "ok\n")


POST = '''
from pidurable import Extension, ToolCall, ToolResult, tool

async def ask(arguments, call: ToolCall):
    return ToolResult("it arrived")

@tool(replay="reconcile", reconcile=ask)
async def post(call: ToolCall) -> str:
    """Post."""
    return "posted"

extension = Extension("post", tools=[post])
'''


# --- aborting ---------------------------------------------------------------------------------


def test_abort_ends_a_task_and_says_so(command, script) -> None:
    """`task abort` ends the run; a second time it says that there is nothing to do."""
    command("run", "do it", "--script", str(script), failpoints=DieAt("CP1"))

    first = command("task", "abort", "4", "--yes")
    again = command("task", "abort", "4", "--yes")
    both = command("task", "list", "-o", "json")

    assert (first.code, first.out) == (0, "task 4 aborted\n")
    assert (again.code, again.out) == (0, "")
    assert "task 4 has ended already: aborted" in again.err
    outcomes = {task["id"]: task["outcome"]["status"] for task in json.loads(both.out)}
    assert set(outcomes.values()) == {"aborted"}
    assert command("resume").code == 0


def test_abort_ends_nothing_without_its_code_unless_told_so(command, tmp_path: Path) -> None:
    """What has begun would be undone by nobody: it is said before, and `--orphan` is the way."""
    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "m.yaml").write_text("- calls: [{name: spawn, arguments: {}}]\n")
    extension = ("-e", str(tmp_path / "two.py"))
    command("run", "x", "--script", "m.yaml", *extension, "--timeout", "1")
    (first, second) = command(
        "task", "list", "--kind", "two.slow", "--live", "-o", "ids"
    ).out.split()
    effects = (tmp_path / "effects").read_text()

    refused = command("task", "abort", first, "--yes")
    left = command("task", "list", "--kind", "two.slow", "--live", "-o", "ids").out.split()
    no = command("task", "abort", first, stdin="n\n", terminal=True)
    orphaned = command("task", "abort", first, "--yes", "--orphan")
    asked = command("task", "abort", second, stdin="y\n", terminal=True)

    assert refused.code == 2
    assert f"task {first} (two.slow) has begun and its code is not loaded here" in refused.err
    assert "nothing was done" in refused.err
    assert "Name its extension with -e, or pass --orphan" in refused.err
    assert left == [first, second]
    assert "its code is not loaded here" in no.err
    assert (orphaned.code, orphaned.out) == (0, f"task {first} orphaned\n")
    assert (asked.code, asked.out) == (0, f"task {second} orphaned\n")
    assert (tmp_path / "effects").read_text() == effects


# C006
def test_abort_starts_no_other_work(command, tmp_path: Path) -> None:
    """While one task is aborted, what else a dead process left stands still."""
    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "m.yaml").write_text("- calls: [{name: spawn, arguments: {}}]\n")
    extension = ("-e", str(tmp_path / "two.py"))
    command("run", "x", "--script", "m.yaml", *extension, "--timeout", "1")
    effects = tmp_path / "effects"
    before = effects.read_text()
    ids = command("task", "list", "--kind", "two.slow", "--live", "-o", "ids").out.split()

    found = command("task", "abort", ids[0], "--yes", *extension)

    assert sorted(before.split()) == ["did-1", "did-2"]
    assert (found.code, found.out) == (0, f"task {ids[0]} aborted\n")
    (undone,) = effects.read_text().removeprefix(before).split()
    assert undone.startswith("undid-")
    left = command("task", "list", "--kind", "two.slow", "--live", "-o", "ids").out.split()
    assert left == ids[1:]


TWO = '''
import attrs
from pidurable import Extension, Task, ToolCall, phase, tool

@attrs.frozen
class Go:
    """It may have been done."""

def note(text: str) -> None:
    with open("effects", "a") as file:
        file.write(text + " ")

class Slow(Task[int, Go, str]):
    name = "two.slow"
    version = 1
    def initial(self, input: int) -> Go:
        return Go()
    @phase
    async def go(self, at: Go, ctx) -> None:
        note(f"did-{ctx.input}")
        await ctx.sleep(3600)
    async def abort(self, at: Go, ctx) -> None:
        note(f"undid-{ctx.input}")
        await ctx.end_aborted("undone")

@tool
async def spawn(call: ToolCall) -> str:
    """Create two tasks and wait."""
    for number in (1, 2):
        await call.create_task(Slow, number, key=str(number))
    await call.sleep(3600)
    return ""

extension = Extension("two", tools=[spawn], tasks=[Slow()])
'''


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("", 1)])
def test_abort_asks_a_person_first(command, script, typed: str, code: int) -> None:
    """On a terminal abort shows what it would end and takes only a yes for a yes."""
    command("run", "do it", "--script", str(script), failpoints=DieAt("CP1"))

    found = command("task", "abort", "4", stdin=typed, terminal=True)

    assert found.code == code
    assert "abort task 4? [y/N]" in found.err
    assert "(1 below it)" in found.err
    assert found.out == ("task 4 aborted\n" if code == 0 else "")


def test_hostile_text_never_reaches_the_terminal_alive(command, tmp_path: Path) -> None:
    """Names, arguments, output, answers and errors are cleaned on every way to the screen."""
    # C063, C081, C082
    (tmp_path / "m.yaml").write_text(
        '- text: "a\\e[2Jb\\u202e"\n'
        "  calls: [{name: bash, arguments: {command: \"printf 'x\\\\033]0;t\\\\007y\\\\000z'\"}},\n"
        '          {name: "evil\\e[31m", arguments: {}}]\n'
        '- {error: {kind: other, detail: "bad\\e[1A\\r gone"}}\n'
    )

    found = command("run", "x\x1b[31m", "--script", "m.yaml")
    log = command("conversation", "log")
    listed = command("task", "list")

    assert found.code == 1
    for text in (found.err, log.out, log.err, listed.out):
        assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text) is None
    assert "ab<U+202E>" in found.err
