"""Records in the forms that every command has: lines for people, JSON and ids for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import columns

__all__ = ["show_list", "show_records", "show_sheets"]

R = TypeVar("R")


def show_records(
    host: Host,
    options: Options,
    records: Sequence[R],
    *,
    id: Callable[[R], object],
    json: Callable[[R], Any],
    lines: Callable[[R], str],
) -> bool:
    """Show some records, a line each; return whether it was for people, who may be told more.

    Args:
        host, options: Of the command.
        records: What is shown.
        id: What stands for one where only ids are wanted.
        json: Its JSON.
        lines: Its line, cleaned.
    """
    if options.output == "json":
        host.out_json([json(record) for record in records])
    elif options.output == "ids":
        host.out(str(id(record)) for record in records)
    else:
        host.out(lines(record) for record in records)
        return True
    return False


def show_list(
    host: Host,
    options: Options,
    records: Sequence[R],
    *,
    id: Callable[[R], object],
    json: Callable[[R], Any],
    header: Sequence[str],
    row: Callable[[R], Sequence[str]],
) -> bool:
    """Show a list in columns; return whether it was for people. One without rows has no header.

    On a terminal it is cut to the width of that; elsewhere it is whole.
    """
    if options.output != "table":
        return show_records(host, options, records, id=id, json=json, lines=str)
    if records:
        cells = host.width(host.stdout)
        host.out(columns(header, [row(record) for record in records], cells=cells))
    return True


def show_sheets(
    host: Host,
    options: Options,
    records: Sequence[R],
    *,
    id: Callable[[R], object],
    json: Callable[[R], Any],
    sheet: Callable[[R], Iterable[str]],
) -> bool:
    """Show all of some records, a sheet each; return whether it was for people.

    As JSON one record is an object and several are a list.
    """
    if options.output == "json" and len(records) == 1:
        host.out_json(json(records[0]))
    elif options.output != "table":
        return show_records(host, options, records, id=id, json=json, lines=str)
    else:
        for number, record in enumerate(records):
            if number:
                host.out("")
            host.out(sheet(record))
        return True
    return False
