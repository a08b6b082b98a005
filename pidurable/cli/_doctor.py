"""`pidurable doctor`: what is wrong with a store, and what to type next."""

from __future__ import annotations

from typing import Any

import attrs

from pidurable.cli._errors import Exit
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import clean_line, duration
from pidurable.cli._tasks import check_store
from pidurable.harness._doctor import Diagnosis, examine

__all__ = ["show_doctor"]

TABLES_SHOWN = 5


async def show_doctor(host: Host, options: Options, *, full: bool) -> int:
    """Examine the store; the exit code says whether there is anything to act on."""
    check_store(options.store)
    found = await examine(options.store, full=full, clock=host)
    if options.output == "json":
        host.out_json(_json(found))
    elif options.output == "ids":
        host.out(str(id) for id in found.blocked_tasks)
    else:
        host.out(_sheet(found))
        host.out(host.fitted(_findings(found), host.stdout))
    return Exit.DONE if found.healthy else Exit.FAILED


def _json(found: Diagnosis) -> dict[str, Any]:
    return {**attrs.asdict(found), "healthy": found.healthy}


def _sheet(found: Diagnosis) -> list[str]:
    """What the store is, a fact a line."""
    facts = [
        ("file", _file(found)),
        ("checked", "every record" if found.full else "the pages; --full checks every record"),
        ("session", _session(found)),
        ("holder", _holder(found)),
        ("tasks", _tasks(found)),
        *_size(found),
    ]
    if found.readers:
        facts.append(("readers", ", ".join(found.readers)))
    if found.commands:
        text = ", ".join(f"{number} {kind}" for kind, number in sorted(found.commands.items()))
        facts.append(("commands", text))
    if found.removals:
        facts.append(("gc", f"{found.removals} trees are being removed"))
    lines = [clean_line(found.store)]
    return lines + [f"  {name:<10} {clean_line(text)}" for name, text in facts]


def _file(found: Diagnosis) -> str:
    where = found.file_system or "unknown file system"
    schema = "unknown schema" if found.schema is None else f"schema {found.schema}"
    return f"{schema}, SQLite {found.sqlite}, {where}, mode {found.mode}"


def _session(found: Diagnosis) -> str:
    if found.session_uuid is None:
        return "cannot be read"
    return f"{found.session_uuid}, epoch {found.epoch}, commit {found.seq}"


def _holder(found: Diagnosis) -> str:
    holder = found.holder
    if holder is None:
        return "nobody so far"
    if holder.state == "released":
        return "nobody; the last one closed it"
    who = f"process {holder.record.pid} on {holder.record.host}"
    return f"{who}, {holder.state}, last heartbeat {duration(holder.heartbeat_age)} ago"


def _tasks(found: Diagnosis) -> str:
    total = sum(found.live_tasks.values())
    parts = [f"{number:,} {word}" for word, number in sorted(found.live_tasks.items())]
    text = f"{total:,} live" + (f" ({', '.join(parts)})" if parts else "")
    if found.blocked_tasks:
        text += f", {len(found.blocked_tasks):,} of them blocked"
    if found.size is not None:
        text += f", {found.size.tasks:,} in all"
    return text


def _size(found: Diagnosis) -> list[tuple[str, str]]:
    size = found.size
    text = f"{_bytes(found.store_bytes)}, its log {_bytes(found.log_bytes)}"
    if size is None:
        return [("size", text)]
    text += f", free inside {_bytes(size.free_pages * size.page_bytes)}"
    records = (
        f"{size.conversations:,} conversations, {size.entries:,} entries, "
        f"{size.documents:,} documents, {size.blobs:,} blobs of {_bytes(size.blob_bytes)}"
    )
    facts = [("size", text), ("records", records)]
    if size.tables:
        largest = [f"{name} {_bytes(count)}" for name, count in size.tables[:TABLES_SHOWN]]
        facts.append(("largest", ", ".join(largest)))
    return facts


def _bytes(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    if size < 1024 * 1024:
        return f"{size / 1024:,.0f} KiB"
    return f"{size / 1024 / 1024:,.1f} MiB"


def _findings(found: Diagnosis) -> list[str]:
    """What to act on, numbered, with the way out; then what is good to know."""
    lines = [""]
    if found.healthy:
        lines.append("healthy: nothing to act on")
    else:
        many = "1 finding" if len(found.findings) == 1 else f"{len(found.findings)} findings"
        lines.append(many)
    for number, finding in enumerate(found.findings, 1):
        lines.append(f"{number:>3}. {clean_line(finding.text)}")
        lines.append(f"     next: {clean_line(finding.remedy)}")
        if finding.command is not None:
            lines.append(f"       $ {clean_line(finding.command)}")
    lines += [f"  note: {clean_line(note)}" for note in found.notes]
    return lines
