"""Histories of commits: what was asked and answered, against what the store has in the end (R7).

Each process that commits writes a log of its own: a line before it asks (`invoke`), and one with
the answer: `ok` (acknowledged), `fail` (certainly not stored) or `unknown`. A process that died or
was stopped for good leaves commits without an answer, which are unknown too. Moments are of the
monotonic clock, which all processes of a machine share. The judge holds the logs against the rows:

* acknowledged is a subset of stored, and stored of invoked;
* what failed is not stored; what is unknown is stored whole or not at all;
* a commit that was acknowledged before another one was asked for has the smaller number.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

PARTS = 2
"""Rows of each commit: half of one would show as a single row."""


class HistoryLog:
    """An append-only file of JSON lines, each written at once, so that a kill cuts none."""

    def __init__(self, path: Path, who: str) -> None:
        self.who = who
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, what: str, **facts: Any) -> None:
        line = {"what": what, "who": self.who, "at": time.monotonic_ns(), **facts}
        os.write(self._handle, json.dumps(line).encode() + b"\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log so far; none where there is no file yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@attrs.define
class _Asked:
    invoked: int
    answer: str = "unknown"
    answered: int | None = None


def judge_history(
    logs: Iterable[Sequence[Mapping[str, Any]]], stored: Mapping[tuple[str, int], Sequence[int]]
) -> list[str]:
    """Return what is wrong with a history; an empty list where nothing is.

    Args:
        logs: The lines of each process.
        stored: By (who, n), the number of the commit of each row that was found.
    """
    asked: dict[tuple[str, int], _Asked] = {}
    for log in logs:
        for line in log:
            if line["what"] == "invoke":
                asked[line["who"], line["n"]] = _Asked(line["at"])
            elif line["what"] in ("ok", "fail", "unknown"):
                commit = asked[line["who"], line["n"]]
                commit.answer, commit.answered = line["what"], line["at"]
    wrong = [f"{name}: stored, and nobody asked for it" for name in stored if name not in asked]
    for name, commit in asked.items():
        rows = stored.get(name, ())
        if len(rows) not in (0, PARTS) or len(set(rows)) > 1:
            wrong.append(f"{name}: half of it is stored (commits {list(rows)})")
        elif commit.answer == "ok" and not rows:
            wrong.append(f"{name}: acknowledged and not stored")
        elif commit.answer == "fail" and rows:
            wrong.append(f"{name}: said to have failed, and stored as commit {rows[0]}")
    return wrong + _out_of_order(asked, stored)


def _out_of_order(
    asked: Mapping[tuple[str, int], _Asked], stored: Mapping[tuple[str, int], Sequence[int]]
) -> list[str]:
    """Commits that were asked for after an answer, and have a smaller number than what it was of.

    One sweep over the moments: `newest` is the largest number that was acknowledged so far.
    """
    moments: list[tuple[int, int, tuple[str, int], int]] = []
    for name, commit in asked.items():
        rows = stored.get(name)
        if not rows:
            continue
        moments.append((commit.invoked, 0, name, rows[0]))
        if commit.answer == "ok" and commit.answered is not None:
            moments.append((commit.answered, 1, name, rows[0]))
    wrong = []
    newest, whose = -1, ("", 0)
    for _, kind, name, seq in sorted(moments):
        if kind == 1:
            if seq > newest:
                newest, whose = seq, name
        elif seq <= newest:
            wrong.append(
                f"{name}: commit {seq}, asked for after {whose} was acknowledged as {newest}"
            )
    return wrong
