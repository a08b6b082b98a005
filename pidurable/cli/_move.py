"""`pidurable export` and `import`: a session in one file, and a store made of one.

Both hold nothing: an export works beside a running holder, an import makes a new store. With `-`
the export is the result and goes to standard output alone; what is said of it goes to stderr.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import attrs

from pidurable.cli._errors import Exit, UsageError, missing_store
from pidurable.cli._host import STDIN, Host
from pidurable.cli._options import Options, check_text
from pidurable.cli._render import clean_line
from pidurable.cli._sessions import store_exists
from pidurable.errors import NotFoundError
from pidurable.harness._move import export_session, import_session
from pidurable.storage._export import ExportReport, MoveProgress
from pidurable.storage._import import ImportReport

__all__ = ["export_store", "import_store"]

MIB = 1024 * 1024
_SHOW_SECONDS = 0.2


async def export_store(host: Host, options: Options, file: str, *, overwrite: bool) -> int:
    """Export a session, and say what is in the file."""
    if not store_exists(options.store):
        raise missing_store(options.store)
    streaming = file == STDIN
    target: str | BinaryIO = _bytes(host.stdout, "standard output") if streaming else file
    if not streaming:
        check_text(file, "FILE")
    with _progress(host) as progress:
        report = await export_session(options.store, target, overwrite=overwrite, progress=progress)
    if streaming:
        host.stdout.buffer.flush()
    if options.output == "json" and not streaming:
        host.out_json(attrs.asdict(report))
    elif options.output == "ids" and not streaming:
        host.out(report.uuid)
    else:
        (host.err if streaming else host.out)(_exported(report))
    return Exit.DONE


async def import_store(
    host: Host, options: Options, file: str, *, as_: str | None, value_mib: int
) -> int:
    """Make a store of an export, and say what it means for the original."""
    if as_ not in ("copy", "move"):
        raise UsageError(
            "say what this import is" if as_ is None else f"--as: {as_!r} is neither copy nor move",
            "`--as move`: the session goes on here and never again where it was. `--as copy`: "
            "another session, which does its unfinished work for itself",
        )
    if value_mib < 1:
        raise UsageError(f"--value-mib: expected at least 1, got {value_mib}")
    source: str | BinaryIO = file
    if file == STDIN:
        source = _bytes(host.stdin, "standard input")
    elif not store_exists(check_text(file, "FILE")):
        raise NotFoundError("export", file, "Name the file of an export.", place="this folder")
    with _progress(host) as progress:
        report = await import_session(
            source,
            options.store,
            as_copy=as_ == "copy",
            value_bytes_max=value_mib * MIB,
            progress=progress,
        )
    if options.output == "json":
        host.out_json(attrs.asdict(report, filter=lambda field, _: field.name != "storage"))
    elif options.output == "ids":
        host.out(report.uuid)
    else:
        host.out(_imported(report))
        host.err(_meaning(report, options))
    return Exit.DONE


def _bytes(stream: Any, what: str) -> BinaryIO:
    if stream.isatty():
        raise UsageError(f"{what} is a terminal", "Name a file, or connect a pipe")
    stream.flush()
    found: BinaryIO = stream.buffer
    return found


def _counts(records: dict[str, int]) -> str:
    total = sum(records.values())
    named = [
        f"{records[kind]:,} {plural}"
        for kind, plural in (("conversation", "conversations"), ("entry", "entries"))
        if records.get(kind)
    ]
    tasks = f"{records.get('task', 0):,} tasks"
    return f"{total:,} records ({', '.join([*named, tasks])})"


def _exported(report: ExportReport) -> str:
    file = "" if report.file == "-" else f" to {clean_line(report.file)}"
    return (
        f"exported session {report.uuid} at commit {report.seq}{file}: "
        f"{_counts(report.records)}, {report.size_bytes:,} bytes"
    )


def _imported(report: ImportReport) -> str:
    kind = "a copy of session" if report.as_copy else "session"
    return (
        f"imported {kind} {report.origin} to {clean_line(report.store)}: {_counts(report.records)}"
    )


def _meaning(report: ImportReport, options: Options) -> list[str]:
    lines = []
    if report.as_copy:
        lines.append(f"it is a session of its own, {report.uuid}: its effects have other keys")
        if report.live_tasks:
            lines.append(
                f"{report.live_tasks:,} unfinished tasks are in both: each does them for itself"
            )
    else:
        lines.append("its effects keep their keys: never work on the original again")
    if report.live_tasks:
        command = clean_line(options.resume_command)
        lines.append(f"nothing was run. `{command}` goes on with {report.live_tasks:,} tasks")
    return lines


@contextlib.contextmanager
def _progress(host: Host) -> Iterator[Callable[[MoveProgress], None] | None]:
    """One line on a terminal that says how far it is, and is gone at the end."""
    if not host.is_terminal(host.stderr):
        yield None
        return
    stream = host.display_stream()
    shown_at = -_SHOW_SECONDS

    def show(progress: MoveProgress) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at < _SHOW_SECONDS:
            return
        shown_at = now
        of = f" of {progress.total:,}" if progress.total else ""
        unit = "pages" if progress.stage == "copying" else "records"
        stream.write(f"\r\x1b[K{progress.stage} {progress.done:,}{of} {unit}")
        stream.flush()

    try:
        yield show
    finally:
        stream.write("\r\x1b[K")
        stream.flush()
