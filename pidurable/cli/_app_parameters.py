"""What commands have in common: options by the same name, and how one is run.

Each option has one name and one help in all commands; `options_of` looks where else it may stand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import trio
from cyclopts import Parameter

from pidurable.cli._errors import UsageError
from pidurable.cli._host import Host
from pidurable.cli._options import DEFAULT_STORE, Options, find_sources, resolve_options

Store = Annotated[
    str | None,
    Parameter(
        name=["--store", "-s"], help="The store. [env: PIDURABLE_STORE; .pidurable/session.sqlite]"
    ),
]
Model = Annotated[
    str | None,
    Parameter(name="--model", help="The model, as provider/model. [env: PIDURABLE_MODEL]"),
]
Script = Annotated[
    str | None,
    Parameter(
        name="--script", help="A YAML file that stands for the model. [env: PIDURABLE_SCRIPT]"
    ),
]
Cwd = Annotated[
    str | None, Parameter(name="--cwd", help="The folder tools work in. [env: PIDURABLE_CWD]")
]
Extensions = Annotated[
    list[str] | None,
    Parameter(
        name=["--extension", "-e"],
        negative="",
        help="A file, folder or module to load besides `coding`; may be repeated. "
        "[env: PIDURABLE_EXTENSIONS]",
    ),
]
Output = Annotated[
    str | None,
    Parameter(name=["--output", "-o"], help="table, json or ids. [env: PIDURABLE_OUTPUT]"),
]
NoQuestions = Annotated[
    bool,
    Parameter(
        name="--no-questions",
        negative="",
        help="Ask nobody: a call that needs a person's yes is denied at once, and a call that a "
        "crash interrupted stays unknown.",
    ),
]
Events = Annotated[
    bool,
    Parameter(
        name="--events",
        negative="",
        help="Write what happens to stdout, as one JSON object a line; the last is the result.",
    ),
]
Timeout = Annotated[
    float | None,
    Parameter(name="--timeout", help="Most seconds to wait; then exit 8. [env: PIDURABLE_TIMEOUT]"),
]


def options_of(host: Host, **given: Any) -> Options:
    """Return what a command works with: what was given on its line, and what stands elsewhere."""
    options = resolve_options(find_sources(host.environ), **given)
    host.store = None if options.store == DEFAULT_STORE else options.store
    return options


def run_trio(function: Callable[[], Awaitable[int]]) -> int:
    """Run a command and return its exit code."""
    return int(trio.run(function))


def ids_of(
    host: Host,
    given: Sequence[str],
    *,
    hint: str = "`pidurable task list` shows them; `-` reads them",
) -> list[int]:
    """Return the ids that were given, each once.

    Raises:
        UsageError: There is none, or something is no id; the hint says where ids are found.
    """
    from pidurable.cli._tasks import parse_ids

    ids = parse_ids(host, list(given))
    if not ids:
        raise UsageError("no id is given", hint)
    return list(dict.fromkeys(ids))
