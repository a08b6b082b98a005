"""The examples run as people run them, and show what they say they show."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBERED = sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))

pytestmark = pytest.mark.slow


Run = Callable[[str], list[str]]


def run_cold(name: str) -> list[str]:
    """Run an example as people do and return the lines of its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def run(slow_run: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run an example and return the lines of its output, which must be all that it says.

    With `-m slow` each is a Python of its own, as people run them; else a fork of one that has
    imported the product already, which costs less than half.
    """
    if slow_run:
        yield run_cold
        return
    folder = tmp_path_factory.mktemp("examples")
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PIDURABLE_")}
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(Path(__file__).with_name("warm_python.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as python:

        def run_warm(name: str) -> list[str]:
            assert python.stdin is not None
            assert python.stdout is not None
            output, errors = folder / f"{name}.out", folder / f"{name}.err"
            told = [str(EXAMPLES / name), str(output), str(errors)]
            print(json.dumps(told), file=python.stdin, flush=True)
            code = int(python.stdout.readline())
            assert code == 0, errors.read_text()
            assert errors.read_text() == ""
            return output.read_text().splitlines()

        yield run_warm


def test_a_payment_is_paid_aborted_and_resumed_after_a_kill(run: Run) -> None:
    """The payment runs to its end, gives back what was charged, and is charged once over a kill."""
    lines = run("01_payment.py")

    assert lines[1].startswith("paid: Receipt(id='R-4242-1999'")
    assert lines[2:5] == ["bank: charged 4343", "bank: refunded 4343", "left: aborted"]
    assert lines[5:] == [
        "child bank: charged 4444",
        "after the kill: R-4444-2500",
        "card 4444 was charged 1 time(s)",
    ]


def test_a_declined_card_undoes_the_whole_checkout(run: Run) -> None:
    """One decline aborts what still ran, refunds what was paid, and leaves nothing charged."""
    lines = run("02_checkout.py")

    bank = [line for line in lines if line.startswith("bank:")]
    charged = {line.rpartition(" ")[2] for line in bank if "charged" in line}
    refunded = {line.rpartition(" ")[2] for line in bank if "refunded" in line}
    assert charged == refunded == {"4242", "4343", "5555"}
    assert [line.split()[:2] for line in lines if line.startswith("shop.")] == [
        ["shop.checkout", "failed"],
        ["shop.payment", "completed"],
        ["shop.payment", "completed"],
        ["shop.payment", "aborted"],
        ["shop.payment", "failed"],
        ["shop.refund", "completed"],
        ["shop.refund", "completed"],
    ]


def test_an_agent_calls_its_tool_and_streams_its_answer(run: Run) -> None:
    """The events show the call, its result and the answer, which is also what the wait returns."""
    lines = run("03_agent.py")

    assert "  -> stock {'fruit': 'apples'}" in lines
    assert "  <- its result is stored" in lines
    assert "There are 12 apples." in lines
    assert "  run ended: done" in lines
    assert lines[-1] == "answer: There are 12 apples."


def test_a_tool_goes_on_with_its_sub_agents_after_a_restart(run: Run) -> None:
    """The first life ends in the middle of the survey; the second one brings the answer."""
    first, second = run("04_own_tool.py")

    assert first.startswith("left while the tool said: '1 of 3: ")
    assert second == "Sunny everywhere."


def test_reminders_of_months_ring_on_time_or_late_but_are_never_lost(run: Run) -> None:
    """One rings before the kill, one that came due meanwhile at the reopening, one on its day."""
    assert run("05_timers.py") == [
        "a process begins on 01 January",
        "  08 January: water the plants",
        "  it was killed on 15 February",
        "a process begins on 22 March",
        "  22 March: pay the rent",
        "  01 April: renew the passport",
    ]


def test_an_approval_is_taken_once_and_in_time(run: Run) -> None:
    """A double click is one comment, silence fails at the deadline, and a late click is told."""
    assert run("06_approval_by_signal.py") == [
        "lunch: approved by Ada, comments: was it good?",
        "yacht: failed",
        "too late: task 3 has ended (failed)",
    ]


def test_the_policies_of_a_join_decide_who_is_aborted(run: Run) -> None:
    """All of a thousand end; the first success, or the first failure, aborts who still works."""
    lines = [line.split(": ", 1) for line in run("07_fan_out.py")]

    assert [policy for policy, _ in lines] == ["all_settled", "first_success", "fail_fast"]
    assert [ast.literal_eval(counts) for _, counts in lines] == [
        {"completed": 999, "failed": 1},
        {"failed": 1, "completed": 1, "aborted": 1},
        {"completed": 1, "failed": 1, "aborted": 1},
    ]


def test_tasks_of_old_releases_are_finished_by_todays(run: Run) -> None:
    """An older build blocks the newer task alone; today's migrates and finishes all three."""
    lines = run("08_versions.py")

    assert lines[3:] == [
        "release 3: an order of version 1: waiting",
        "release 3: an order of version 2: waiting",
        "release 3: an order of version 3: waiting",
        "release 2: an order of version 1: waiting",
        "release 2: an order of version 2: waiting",
        "release 2: an order of version 3: definition_too_old",
        "release 3: an order of version 3: 1999 EUR to release 3",
        "release 3: an order of version 3: 2500 CHF to release 3",
        "release 3: an order of version 3: 3000 NOK to release 3",
    ]


def test_a_bank_that_is_down_is_asked_again_also_to_give_money_back(run: Run) -> None:
    """Nothing happens while it is down; then one is sent, the other taken back, and asked after."""
    assert run("09_retries.py") == [
        "01:05 sent: kept",
        "01:05 asked: kept",
        "01:06 taken back: regretted",
        "01:32 asked: kept",
        "02:26 asked: kept",
        "04:23 asked: kept",
        "kept: it has arrived",
    ]


def test_limits_bound_what_runs_and_starve_no_tree(run: Run) -> None:
    """Two of a kind, five in all; and a tree of 63 that waits in memory gets through one slot."""
    most, tree = run("10_limits.py")

    at_once = ast.literal_eval(most.removeprefix("at most at once: "))
    assert at_once["site.download"] == 2
    assert 2 < at_once["site.parse"] <= at_once["all kinds"] == 5
    assert tree == "folders through one slot: 63"


def test_documents_change_together_and_read_what_older_code_has_stored(run: Run) -> None:
    """The old cart is read today; a commit that is refused changes no document; retired is gone."""
    assert run("11_documents.py") == [
        "read today: Cart(items={'apples': 1}, diary='Monday: apples.')",
        "in the cart: Cart(items={'apples': 1, 'pears': 2}, "
        "diary='Monday: apples. Tuesday: 2 pears.')",
        "pears: Stock(pieces=10)",
        "refused: document 'shop.cart' would take 5076 bytes, at most 4096 are allowed",
        "apples: Stock(pieces=11)",
        "retired: None",
    ]


def test_a_discussion_is_rewound_and_forked_and_forgets_without_loss(run: Run) -> None:
    """Each fork policy gives its own, edits and heads change what is seen, and no entry is lost."""
    assert run("12_fork_and_rewind.py") == [
        "as of the hut: Plan(steps=['a hut'])",
        "the fork has: Plan(steps=['a hut', 'a tent']) Style(tone='frugal') None",
        "the fork sees: ['a hut', 'a tent', 'a campfire']",
        "the other sees: ['a hut', 'a tent', 'a castle']",
        "edited: ['a tent', 'a castle', 'no hut after all']",
        "from its head: ['forget all that']",
        "the fork still sees: ['a hut', 'a tent', 'a campfire']",
        "entries: 5 and 3",
    ]


SAID = [
    "user: How many apples and pears are there?",
    "assistant: Of apples there are twelve, and of pears none.",
    "user: Thank you.",
    "assistant: You are welcome.",
]


def test_a_view_that_is_watched_is_the_same_here_and_elsewhere(run: Run) -> None:
    """Without a terminal each line is shown once, and the patches gave the same view."""
    *said, last = run("13_watch.py")

    assert said == SAID
    assert last.startswith("the view elsewhere is the same, after ")


def test_a_live_view_is_drawn_anew_in_a_terminal_while_the_answer_streams() -> None:
    """The answer is seen as it grows, and the last screen is the whole talk."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / "13_watch.py")],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as running:
        os.close(theirs)
        # The other side is closed: Linux tells the end of a terminal by an error.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65_536):
                shown.append(part)
    os.close(ours)
    code = running.returncode
    screens = b"".join(shown).decode().replace("\r\n", "\n").split("\x1b[J")

    assert code == 0
    assert screens[-1].splitlines()[:4] == SAID
    assert any("\nwriting: Of apples " in screen for screen in screens)


def test_a_process_that_holds_nothing_is_answered_by_the_one_that_does(run: Run) -> None:
    """Asked twice under one key is once; a refusal crosses; what waits is done or taken back."""
    assert run("14_two_processes.py") == [
        "answered: 384,400 km",
        "refused: this session has no conversation 99.",
        "questions in the store: 1",
        "waits: sun",
        "waits: mars",
        "mars taken back: True",
        "answered: 150 million km",
    ]


def test_a_moved_session_asks_under_the_keys_that_a_copy_does_not_use(run: Run) -> None:
    """The move sends the parcel with the stamp that was sold already, the copy buys another."""
    assert run("15_backup_and_move.py") == [
        "exported, with unfinished tasks: 1",
        "moved: sent to Ada with stamp 1 - stamps sold: 1",
        "copied: sent to Ada with stamp 2 - stamps sold: 2",
    ]


def test_what_is_typed_meanwhile_is_answered_or_given_back(run: Run) -> None:
    """A steer joins the run, a follow-up starts the next, and what is taken back is never seen."""
    assert run("16_steer_and_follow_up.py") == [
        "queued: ['steer', 'follow_up', 'follow_up', 'write']",
        "withdrawn: True",
        "run 1: 12 red apples.",
        "run 1: 12 red apples.",
        "run 2: 2 euros each.",
        "note: done",
        "given back: ['Thank you!']",
        "aborted: aborted",
        "continued: That was cut; shall I go on?",
    ]


def test_a_log_book_that_outgrows_its_reader_is_summarised(run: Run) -> None:
    """Fewer messages are sent once there is a summary, and the history still holds every day."""
    *days, asked, names, left, kept = run("18_compaction.py")

    sent = [int(line.split()[2]) for line in days]
    assert sent[:8] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert sent[8] < sent[7]
    assert asked.startswith("applied: about ")
    assert names == "asked for names: True"
    assert left.endswith("messages are left; Ada is known: True")
    assert kept == "days in the history: 10"


def test_a_tool_runs_what_a_person_has_allowed(run: Run) -> None:
    """The request outlives its process; a pattern lets the next by, and no chain of commands."""
    assert run("17_approval.py") == [
        "the process ended, the request did not",
        "asked (high): 'rm old.log'",
        "  granted by Ada: Once()",
        "  ran: rm old.log",
        "asked (high): 'rm -rf /'",
        "  denied by Ada: Deny(text='Only here, please.')",
        "asked (high): 'git status'",
        "  granted by Ada: Pattern(pattern='git *', expires=None)",
        "  ran: git status",
        "  ran: git diff",
        "asked (high): 'git diff; rm -rf /'",
        "  denied by Ada: Deny(text='No.')",
        "All done.",
        "granted 'git *', used 1 time(s) since",
    ]


def test_an_office_keeps_its_rules_by_hooks(run: Run) -> None:
    """A letter goes elsewhere, another one nowhere, a call is hung up, and the run goes on once."""
    (line,) = run("19_hooks.py")

    assert line == (
        "I am. ['Sent to the boss. By post.', 'Prices are not told by mail.', "
        "'It rang for a minute.']"
    )


def test_a_conversation_is_told_as_json_lines(run: Run) -> None:
    """Each line is an event with its type, and who reads only lines has the answer at the end."""
    *lines, last = run("20_events_as_json.py")
    types = [json.loads(line)["type"] for line in lines]

    assert (types[0], types[-1]) == ("snapshot", "run_end")
    assert types.count("turn_start") == types.count("turn_end") == 2
    assert types.count("message_end") == 2
    assert types.index("tool_execution_start") < types.index("tool_execution_end")
    assert last == "the reader has seen: 'It is sunny.', 10 tokens"


def test_a_killed_payment_is_reconciled(run: Run) -> None:
    """The bank is asked what became of it: booked, it is not paid again; never there, it is."""
    assert run("21_reconcile.py") == [
        "child: bank: charged 4242",
        "asked the bank: it was booked",
        "after the kill: It is paid.",
        "card 4242 was charged 1 time(s)",
        "child: the line is down",
        "asked the bank: it never came",
        "bank: charged 4343",
        "after the kill: It is paid.",
        "card 4343 was charged 1 time(s)",
    ]


def test_a_killed_tool_finds_its_sub_agent_again(run: Run) -> None:
    """The second life asks the same conversation, which answers; nothing is left unfinished."""
    killed, found, *tasks, answer = run("22_subagent.py")

    assert killed == f"killed: {found}"
    assert len(tasks) == 4
    assert all(task.endswith(": terminal") for task in tasks)
    assert answer == "answer: There are three doors."


@pytest.mark.parametrize("name", NUMBERED)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    """Each example teaches one idea in under 80 lines and names the command that runs it."""
    text = (EXAMPLES / name).read_text()

    assert len(text.splitlines()) < 80
    assert "\nTeaches: " in text
    assert f"\nRun it with: python examples/{name}\n" in text
