"""`pidurable usage`: what was spent, by model and by tool, with sums."""

from __future__ import annotations

from collections.abc import Mapping

from pidurable.cli._errors import Exit
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import clean_line, columns
from pidurable.cli._tasks import check_store
from pidurable.harness._reader import open_reader
from pidurable.records._codec import encode_usage
from pidurable.records._messages import Usage

__all__ = ["show_usage"]

_HEADER = ("", "REQUESTS", "INPUT", "OUTPUT", "CACHE READ", "CACHE WRITE", "COST")


async def show_usage(host: Host, options: Options, below: int | None) -> int:
    """Show what a session, or a part of it, has spent."""
    check_store(options.store)
    async with open_reader(options.store) as reader:
        spent = await reader.usage(below=below)
    models, tools = spent["models"], spent["tools"]
    if options.output == "json":
        host.out_json(
            {
                kind: {name: encode_usage(each) for name, each in table.items()}
                for kind, table in spent.items()
            }
        )
    elif options.output == "ids":
        host.out(clean_line(name) for name in sorted(models))
    elif not models and not tools:
        host.err("nothing was spent")
    else:
        # One table, so that the columns stand below each other.
        rows = [*_rows(models, "all models"), *_rows(tools, "all tools")]
        host.out(columns(_HEADER, rows, cells=host.width(host.stdout)))
    return Exit.DONE


def _rows(table: Mapping[str, Usage], all_of_them: str) -> list[tuple[str, ...]]:
    rows = [_row(name, table[name]) for name in sorted(table)]
    if len(table) > 1:
        rows.append(_row(all_of_them, sum(table.values(), Usage())))
    return rows


def _row(name: str, spent: Usage) -> tuple[str, ...]:
    return (
        name,
        f"{spent.requests:,}",
        f"{spent.input_tokens:,}",
        f"{spent.output_tokens:,}",
        f"{spent.cache_read_tokens:,}",
        f"{spent.cache_write_tokens:,}",
        f"{spent.cost:,.4f}" if spent.cost else "-",
    )
