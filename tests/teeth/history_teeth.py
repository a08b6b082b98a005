"""Planted bugs in documents, forks, watches and contexts, each of which the histories must find.

python tests/teeth/history_teeth.py                   all, and the last line says how many
python tests/teeth/history_teeth.py "off by one"      those whose name contains this

A text that is not there any more fails loudly, as it does in `teeth`.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import attrs
from teeth import CHECKOUT, Bite, BluntToothError, differences_in, play_planted, show_all

RUNNER = CHECKOUT / "tests" / "histories" / "run_histories.py"
GOALS = ("rewind", "watches", "context")
HISTORIES_MAX = 1000


@attrs.frozen(kw_only=True)
class HistoryTooth:
    """One planted bug: changes of one module, each of a text that occurs exactly once."""

    name: str
    goal: str
    """Which histories are to find it."""
    module: str
    """Below `pidurable`."""
    changes: tuple[tuple[str, str], ...]
    """What is looked for (blanks and line ends count as one blank), and what it becomes."""

    def plant(self, package: Path) -> None:
        path = package / self.module
        text = path.read_text()
        for find, become in self.changes:
            pattern = r"\s+".join(re.escape(part) for part in find.split())
            found = re.findall(pattern, text)
            if len(found) != 1:
                raise BluntToothError(
                    f"tooth {self.name!r}: {find!r} occurs {len(found)} times in {self.module}; "
                    "plant it anew where the code does this now"
                )
            text = re.sub(pattern, lambda _, become=become: become, text)
        path.write_text(text)


TEETH = (
    HistoryTooth(
        name="write a base without its last delta",
        goal="rewind",
        module="session/_documents.py",
        changes=(
            ("base = _json.dumps(value, path=path)", "base = _json.dumps(state.value, path=path)"),
        ),
    ),
    HistoryTooth(
        name="read the past off by one",
        goal="rewind",
        module="session/_session.py",
        changes=(("address, row.seq, )", "address,\n            row.seq - 1,\n        )"),),
    ),
    HistoryTooth(
        name="copy the current value into a fork for as_of",
        goal="rewind",
        module="session/_fork_work.py",
        changes=(
            (
                'if policy == "current" or (policy == "as_of" and fork.seq is None):',
                'if policy in ("current", "as_of"):',
            ),
        ),
    ),
    HistoryTooth(
        name="keep what a failed batch has staged",
        goal="rewind",
        module="session/_session.py",
        changes=(
            ("def revert(self) -> None: self._staged = Staged()", "def revert(self) -> None:"),
        ),
    ),
    HistoryTooth(
        name="show the document of today in the past",
        goal="rewind",
        module="session/_documents.py",
        changes=(
            (
                "storage.document_as_of(address.scope_id, address.name, address.key, seq=seq)",
                "storage.document(*address)",
            ),
        ),
    ),
    HistoryTooth(
        name="forget what is before a base of a rewindable document",
        goal="rewind",
        module="session/_documents.py",
        changes=(('if terms.history == "latest":', "if True:"),),
    ),
    HistoryTooth(
        name="count entries of the parent behind the fork point",
        goal="rewind",
        module="session/_forks.py",
        changes=(("cut = current.parent_entry + 1", "cut = 2**62"),),
    ),
    HistoryTooth(
        name="let a migration change what is stored",
        goal="rewind",
        module="session/_documents.py",
        changes=(("copy.deepcopy(", "("),),
    ),
    HistoryTooth(
        name="give an overflow frame without its value",
        goal="watches",
        module="session/_watch.py",
        changes=(("Frame(self.seq, value, whole=True", "Frame(self.seq, None, whole=True"),),
    ),
    HistoryTooth(
        name="publish to watches before the commit is durable",
        goal="watches",
        module="session/_session.py",
        changes=(
            (
                "self._staged.add(draft)",
                "self._staged.add(draft)\n        self._watches.publish(draft)",
            ),
            (
                "if self._watches.hubs:\n                    self._watches.publish(tx)",
                "if False:\n                    self._watches.publish(tx)",
            ),
        ),
    ),
    HistoryTooth(
        name="keep one frame more than a hundred",
        goal="watches",
        module="session/_watch.py",
        changes=(
            (
                "if len(self._frames) >= WATCH_FRAMES_MAX",
                "if len(self._frames) > WATCH_FRAMES_MAX",
            ),
        ),
    ),
    HistoryTooth(
        name="forget a watcher that has fallen behind",
        goal="watches",
        module="session/_watch.py",
        changes=(("self._active[watch] = None\n        value = self.value", "value = self.value"),),
    ),
    HistoryTooth(
        name="leave out the last operation of a patch",
        goal="watches",
        module="session/_document_watch.py",
        changes=(("patch_of(before, after, ops)", "patch_of(before, after, ops[:-1] or ops)"),),
    ),
    HistoryTooth(
        name="leave in a view's patch what has left its page",
        goal="watches",
        module="harness/_views.py",
        changes=(("for _ in range(left))", "for _ in range(0))"),),
    ),
    HistoryTooth(
        name="let a watch outlive its document",
        goal="watches",
        module="session/_document_watch.py",
        changes=(
            (
                "hub.publish(tx.seq, None, None)\n                    hub.end()",
                "hub.publish(tx.seq, None, None)",
            ),
        ),
    ),
    HistoryTooth(
        name="let the edit of an older entry win",
        goal="context",
        module="session/_transcript.py",
        changes=(
            (
                "edits[edit.target] = edit.messages or ()",
                "edits.setdefault(edit.target, edit.messages or ())",
            ),
        ),
    ),
    HistoryTooth(
        name="put a result into the slot of another call",
        goal="context",
        module="session/_context.py",
        changes=(
            (
                "place = self._places.get(item.message.call)",
                "place = self._places.get((item.message.call[0], 0))",
            ),
        ),
    ),
    HistoryTooth(
        name="let a head count that came after the cutoff",
        goal="context",
        module="session/_history.py",
        changes=(
            (
                "(member, end if bound is None else min(bound, end))",
                "(member, bound)",
            ),
        ),
    ),
)


def bite(tooth: HistoryTooth | None, *, goal: str = "", histories: int = HISTORIES_MAX) -> Bite:
    """Play histories against a copy of the package with a tooth in it, or none, until one fails."""
    started = time.perf_counter()
    goal = goal if tooth is None else tooth.goal
    command = [sys.executable, str(RUNNER), "--goal", goal, "--tries", "0"]
    said = play_planted([*command, "--histories", str(histories)], tooth)
    if said is None:
        # Nothing was found in the time that there is, which is no merit.
        said = "out of time at seed ?\ndifferences=0"
    first = next((line for line in said.splitlines() if " seed " in line), said[-200:])
    return Bite(
        tooth=tooth,
        caught=differences_in(said, tooth),
        said=re.sub(r"step (\d+) \[.*\]: ", r"step \1: ", first)[:160],
        seconds=time.perf_counter() - started,
    )


def main(part: str = "") -> int:
    return show_all("history teeth", [tooth for tooth in TEETH if part in tooth.name], bite)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
