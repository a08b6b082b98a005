"""`pidurable gc`: remove ended trees of tasks, and what nothing refers to, to free their space.

A dry run only reads, so it works beside a running holder. The removal itself holds the store, or
is done by the process that does.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import attrs

from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._outside import change
from pidurable.cli._sessions import bring_up_to_date
from pidurable.cli._tasks import check_store
from pidurable.errors import show
from pidurable.harness._client import Client
from pidurable.harness._open import Harness
from pidurable.harness._reader import open_reader
from pidurable.tasks._gc_report import GcReport

__all__ = ["collect_garbage", "parse_age"]

_AGE = re.compile(r"(\d{1,9})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_COUNTED = ("tasks", "conversations", "entries", "submissions", "documents", "blobs", "answers")


def parse_age(text: str, place: str = "--older-than") -> timedelta:
    """Read an age such as `30d`.

    Args:
        text: A number and a unit.
        place: The option it was given by.

    Raises:
        UsageError: It is none, or longer than there are days.
    """
    found = _AGE.fullmatch(text)
    problem = f"{place}: expected a number and s, m, h, d or w, got {show(text)}"
    if found is None:
        raise UsageError(problem, "30d is thirty days")
    try:
        return timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise UsageError(problem, "30d is thirty days") from None


async def collect_garbage(
    host: Host, options: Options, older_than: str, *, keep: bool, dry_run: bool, yes: bool
) -> int:
    """Remove what is old enough, or say what would be removed."""
    age = parse_age(older_than)
    check_store(options.store)
    if not dry_run and not yes and not host.is_terminal(host.stdin):
        raise UsageError("removing cannot be undone and nobody can be asked", "Pass --yes")
    if not dry_run:
        await bring_up_to_date(options.store)
    if dry_run or not yes:
        async with open_reader(options.store, clock=host) as reader:
            told = await reader.gc(older_than=age, keep_outcomes=keep)
        if dry_run:
            _show(host, options, told)
            return Exit.DONE
        if not (told.trees or told.documents or told.blobs or told.answers):
            _show(host, options, told)
            return Exit.DONE
        host.err(_sheet(told))
        if not host.confirm("Remove them?"):
            host.err("nothing was removed")
            return Exit.DONE

    async def own(harness: Harness) -> GcReport:
        return await harness.gc(older_than=age, keep_outcomes=keep)

    async def ask(client: Client, command: str) -> GcReport:
        return await client.gc(
            older_than=age, keep_outcomes=keep, key=command, timeout=options.timeout
        )

    _show(host, options, await change(host, options, own=own, ask=ask))
    return Exit.DONE


def _show(host: Host, options: Options, report: GcReport) -> None:
    if options.output == "json":
        host.out_json(_json(report))
    elif options.output == "ids":
        # What is gone has no ids that could be of use to the next command.
        host.err(_sheet(report))
    else:
        host.out(_sheet(report))


def _json(report: GcReport) -> dict[str, Any]:
    return {**attrs.asdict(report), "before": report.before.isoformat(), "kept": {**report.kept}}


def _sheet(report: GcReport) -> list[str]:
    verb = "would remove" if report.dry_run else "removed"
    trees = f"{report.trees:,} tree{'' if report.trees == 1 else 's'} of tasks"
    lines = [f"{verb} {trees} that ended before {report.before:%Y-%m-%d %H:%M} UTC"]
    facts = [(name, f"{getattr(report, name):,}") for name in _COUNTED]
    facts.append(("bytes", f"{report.bytes:,}"))
    if report.pages_freed is not None:
        left = f"{report.pages_left:,} stay in the file to be used again"
        facts.append(("pages", f"{report.pages_freed:,} given back, {left}"))
    lines += [f"  {name:<14} {text}" for name, text in facts]
    if report.kept:
        lines.append(f"kept {sum(report.kept.values()):,}:")
        lines += [f"  {number:>8,}  {why}" for why, number in report.reasons().items()]
    return lines
