"""Planted bugs in the agent loop, each of which the programs of turns must find.

A tooth says which text of which module becomes what; see teeth.py.

    python tests/teeth/turn_teeth.py                 all of them, and the last line says how many
    python tests/teeth/turn_teeth.py "result twice"  those whose name contains this
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import attrs
from teeth import CHECKOUT, Bite, BluntToothError, differences_in, play_planted, show_all

RUNNER = CHECKOUT / "tests" / "agent" / "turn_programs.py"
TREE = RUNNER.with_name("subagent_tree.py")
PROGRAMS_MAX = 400
SECONDS_MAX = 150.0


@attrs.frozen(kw_only=True)
class TurnTooth:
    """One planted bug."""

    name: str
    module: str
    """Below `pidurable`."""
    find: str
    """Text that occurs exactly once; blanks and line ends count as one blank."""
    become: str
    tree: bool = False
    """Whether it is to be found by the tree of sub-agents."""

    def plant(self, package: Path) -> None:
        """Change a copy of the package."""
        path = package / self.module
        text = path.read_text()
        pattern = r"\s+".join(re.escape(part) for part in self.find.split())
        found = re.findall(pattern, text)
        if len(found) != 1:
            raise BluntToothError(
                f"tooth {self.name!r}: {self.find!r} occurs {len(found)} times in {self.module}; "
                "plant it anew where the code does this now"
            )
        path.write_text(re.sub(pattern, lambda _: self.become, text))


TEETH = (
    TurnTooth(
        name="store the same request twice",
        module="agent/_inbox.py",
        find="if earlier is not None: return earlier live = read_doc(tx, LiveDocument, "
        'conversation_id) if live["run"] is not None and when_busy',
        become="live = read_doc(tx, LiveDocument, conversation_id)\n"
        '    if live["run"] is not None and when_busy',
    ),
    TurnTooth(
        name="put new input before what was queued",
        module="agent/_inbox.py",
        find="run = start_run(tx, conversation_id, queued) "
        "entry = say(tx, conversation_id, blocks)",
        become="entry = say(tx, conversation_id, blocks)\n"
        "        run = start_run(tx, conversation_id, queued)",
    ),
    TurnTooth(
        name="queue the newest first",
        module="agent/_documents.py",
        find='ops = [{"op": "add", "path": "/items/-", "value": item}]',
        become='ops = [{"op": "add", "path": "/items/0", "value": item}]',
    ),
    TurnTooth(
        name="leave in the inbox what an abort has given back",
        module="agent/_inbox.py",
        find="unqueue(tx, conversation_id, ids) withdrawn",
        become="withdrawn",
    ),
    TurnTooth(
        name="place what was withdrawn",
        module="agent/_inbox.py",
        find="unqueue(tx, record.conversation_id, {submission_id})",
        become="",
    ),
    TurnTooth(
        name="let follow-ups join the run",
        module="agent/_boundaries.py",
        find='steers = _of_mode(others, "steer", settings.steers) rest',
        become="steers = list(others)\n    rest",
    ),
    TurnTooth(
        name="lose the steers of a boundary",
        module="agent/_boundaries.py",
        find="place(tx, conversation_id, steers, run=run)",
        become="",
    ),
    TurnTooth(
        name="place the newest steer first",
        module="agent/_boundaries.py",
        find='return found[:1] if most == "one" else found',
        become='return found[-1:] if most == "one" else found[::-1]',
    ),
    TurnTooth(
        name="keep a placed input in the inbox",
        module="agent/_boundaries.py",
        find="rest = _without(rest, taken)",
        become="rest = list(rest)",
    ),
    TurnTooth(
        name="hand nothing on but the note",
        module="agent/_boundaries.py",
        find='if record.status != "placed" or record.run != run or record.kind != "input":',
        become="if True:",
    ),
    TurnTooth(
        name="give a call that was not offered no result",
        module="agent/_round.py",
        find="append_result(tx, conversation, (entry, index), call.name, ended) continue",
        become="continue",
    ),
    TurnTooth(
        name="give a model the results of the calls of a sequential round but for the last",
        module="agent/_round.py",
        find="index, *rest = at.queued",
        become="index, *rest = at.queued\n    rest = rest[:-1]",
    ),
    TurnTooth(
        name="begin a call without its intent",
        module="agent/_tool_call.py",
        find="await ctx.goto(intent) await self._run(",
        become="await self._run(",
    ),
    TurnTooth(
        name="run an interrupted call again",
        module="agent/_tool_call.py",
        find='if tool is None or policy not in ("safe", "reconcile"):',
        become="if tool is None:",
    ),
    TurnTooth(
        name="let the looser policy count",
        module="agent/_replay.py",
        find="return max(",
        become="return min(",
    ),
    TurnTooth(
        name="run a call again that the tool knows to have happened",
        module="agent/_tool_call.py",
        find="if found is not False:",
        become="if False:",
    ),
    TurnTooth(
        name="run a call whose arguments do not fit",
        module="agent/_tool_call.py",
        find="return invalid_arguments(tool, problem) if not",
        become='kwargs = {"what": str(arguments)}\n        if not',
    ),
    TurnTooth(
        name="run what a hook has blocked",
        module="agent/_tool_call.py",
        find="if decision.block is not None:",
        become="if False:",
    ),
    TurnTooth(
        name="run what a person has denied",
        module="agent/_permissions.py",
        find='"granted" if isinstance(decision, GRANTING) else "denied"',
        become='"granted"',
    ),
    TurnTooth(
        name="let a yes hold for another version of the tool",
        module="agent/_approval.py",
        find="and given.digest == asked.digest",
        become="",
    ),
    TurnTooth(
        name="take a second decision",
        module="agent/_permissions.py",
        find='if state != "open": raise AlreadyDecidedError',
        become='if state == "closed":\n            raise AlreadyDecidedError',
    ),
    TurnTooth(
        name="take a call for granted that no grant covers",
        module="agent/_approval.py",
        find="if grant is not None: note_use(tx, task=task, conversation=conversation, asked=asked",
        become="grant = grant or int(ctx.task_id)\n        if grant is not None:\n"
        "            note_use(tx, task=task, conversation=conversation, asked=asked",
    ),
    TurnTooth(
        name="make a nested call anew when its caller runs again",
        module="agent/_nested.py",
        find='task = tx.create_task(_tool_class(), given, key=f"pi.tool {self.step}")',
        become="task = tx.create_task(_tool_class(), given)",
    ),
    TurnTooth(
        name="leave the newest messages out of a summary that replaces them",
        module="agent/_compaction_text.py",
        find="for place in range(at.message, stop):",
        become="for place in range(at.message, stop - 3):",
    ),
    TurnTooth(
        name="keep a compaction for ever",
        module="agent/_compaction.py",
        find="tx.wait(then=waiting, on=[record.id])",
        become="tx.wait(then=waiting, signals=True)",
    ),
    TurnTooth(
        name="give a call that runs again another child",
        module="harness/_conversation.py",
        find="id = tx.create_conversation(key=key)",
        become="id = tx.create_conversation()",
        tree=True,
    ),
)


def bite(tooth: TurnTooth | None, *, programs: int = PROGRAMS_MAX) -> Bite:
    """Play programs against a copy of the package, until one fails; a tooth is planted, or none."""
    started = time.perf_counter()
    if tooth is not None and tooth.tree:
        return _bite_tree(tooth)
    command = [sys.executable, str(RUNNER), str(programs), "0", "--tries", "0"]
    said = play_planted([*command, "--seconds", f"{SECONDS_MAX}"], tooth)
    if said is None:
        said = "differences=1: it does not come to rest"
    first = next((line for line in said.splitlines() if line.startswith("seed ")), said[-200:])
    return Bite(
        tooth=tooth,
        caught=differences_in(said, tooth),
        said=first[:160],
        seconds=time.perf_counter() - started,
    )


def _bite_tree(tooth: TurnTooth) -> Bite:
    """Grow small trees of sub-agents on a copy with a tooth in it, until one is not right."""
    started = time.perf_counter()
    said = ""
    for seed in range(3):
        said = play_planted(
            [sys.executable, str(TREE), "6", f"{seed}", "--widths", "2", "2"], tooth
        )
        said = "FAIL: it does not come to rest" if said is None else said.strip()
        if not said.endswith("PASS"):
            break
    return Bite(
        tooth=tooth,
        caught=not said.endswith("PASS"),
        said=said.splitlines()[-1][:160],
        seconds=time.perf_counter() - started,
    )


def main(part: str = "") -> int:
    """Try all teeth whose name contains a text."""
    return show_all("turn teeth", [tooth for tooth in TEETH if part in tooth.name], bite)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
