"""Planted bugs of retention: each of them the tests of gc must find.

Run all of them, or those whose name contains a text, as `python tests/teeth/gc_teeth.py fork`; the
last line says how many were found. One takes some ten seconds.
"""

from __future__ import annotations

import sys
import time

from teeth import CHECKOUT, Bite, Tooth, play_planted, show_all

TESTS = (
    "session/test_removed_blobs.py",
    "tasks/test_gc.py",
    "tasks/test_gc_model.py",
    "tasks/test_gc_beside_work.py",
)

GC_TEETH = (
    Tooth(
        name="remove what others were forked from",
        module="_gc_trees.py",
        find="tree.forks += forks",
        become="tree.forks += ()",
    ),
    Tooth(
        name="remove a fork's parent before the fork",
        module="_gc_rows.py",
        find="heapq.merge(*parts, reverse=True)",
        become="[each for part in parts for each in part]",
    ),
    Tooth(
        name="remove what a live task waits for",
        module="_gc_trees.py",
        find="return AWAITED if row.id in self._awaited else None",
        become="return None",
    ),
    Tooth(
        name="remove a conversation with an open submission",
        module="_gc_trees.py",
        find='if row.status in ("queued", "placed"):',
        become='if row.status == "queued":',
    ),
    Tooth(
        name="look at the end of the root alone",
        module="_gc_trees.py",
        find="reason = self._reason(row) if reason is not None: return reason ids.append(row.id)",
        become="ids.append(row.id)",
    ),
    Tooth(
        name="overlook what came to a tree since it was read",
        module="_gc.py",
        find="if any(self._touched.has_any_of(tree) for tree in group.trees):",
        become="if False:",
    ),
    Tooth(
        name="overlook what was staged before a look began",
        module="_gc_touched.py",
        find="return tree.has_any(self._touched) or tree.has_any(self._staged)",
        become="return tree.has_any(self._staged)",
    ),
    Tooth(
        name="remove a large tree without a mark",
        module="_gc.py",
        find="tx.writes.append((Op.REMOVAL, RemovalRow(root, now)))",
        become="pass",
    ),
    Tooth(
        name="remove the mark with the first piece",
        module="_gc_rows.py",
        find="if root is not None and marked:",
        become="if marked and root is not None and not kept:",
    ),
    Tooth(
        name="let what is going grow",
        module="../session/_removals.py",
        find="if conversation.owner is None or not self.any:",
        become="if True:",
    ),
    Tooth(
        name="forget the key of a root",
        module="_gc_rows.py",
        find="if root is not None and root.key is not None:",
        become="if root is not None and root.key is not None and marked:",
    ),
    Tooth(
        name="forget a request id",
        module="_gc_rows.py",
        find="if row.request_id is not None:",
        become='if row.request_id is not None and row.status == "done":',
    ),
    Tooth(
        name="sweep what is named within another text",
        module="_gc_blobs.py",
        find='_RUN = re.compile("[0-9a-f]{64,}")',
        become="_RUN = re.compile('(?<=\\x22)[0-9a-f]{64}(?=\\x22)')",
    ),
    Tooth(
        name="sweep what is named in a text that lies in a blob",
        module="_gc_blobs.py",
        find="if is_reference(text) and text[1:] not in followed:",
        become="if False:",
    ),
    Tooth(
        name="sweep what is named while the texts are looked through",
        module="_gc_touched.py",
        find="if self._wanted: self._look_through(op, row)",
        become="pass",
    ),
    Tooth(
        name="sweep what is named in parts while the texts are looked through",
        module="_gc_touched.py",
        find="self._look_at_ends(change)",
        become="pass",
    ),
    Tooth(
        name="sweep what was put a moment ago",
        module="_gc.py",
        find="if name in window and name not in self._session.blobs_put:",
        become="if name in window:",
    ),
    Tooth(
        name="put nothing where bytes are about to be swept",
        module="../session/_session.py",
        find="return sha256 not in staged.blobs_removed and self.storage.has_blob(sha256)",
        become="return self.storage.has_blob(sha256)",
    ),
    Tooth(
        name="leave the watches of what is gone",
        module="../session/_document_watch.py",
        find="if hub.value is not None: hub.publish(seq, None, None) hub.end()",
        become="pass",
    ),
    Tooth(
        name="leave what was begun to the next collection",
        module="_gc.py",
        find="if not self._session.removals.published: return",
        become="return",
    ),
)


def bite_gc(tooth: Tooth | None) -> Bite:
    """Run the tests of gc against a copy of the package until one fails."""
    started = time.perf_counter()
    files = [str(CHECKOUT / "tests" / name) for name in TESTS]
    # Without -P the checkout would come before the copy.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
    ]
    said = play_planted([*command, *files], tooth)
    if said is None:
        said = "FAILED tests: it does not come to rest"
    failed = [
        line for line in said.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))
    ]
    assert failed or " passed" in said, said[-2000:]
    return Bite(
        tooth=tooth,
        caught=bool(failed),
        said=(failed or ["nothing"])[0][:160],
        seconds=time.perf_counter() - started,
    )


def main(part: str = "") -> int:
    return show_all("gc teeth", [tooth for tooth in GC_TEETH if part in tooth.name], bite_gc)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
