"""What commands have in common: options by the same name, and how one is run.

Each option has one name and one help in all commands; `options_of` looks where else it may stand.
Options that go together are fields of one class, which the parser takes for as many options.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, ParamSpec

import attrs
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
Flag = Annotated[bool, Parameter(negative="")]
Conversation = Annotated[int | None, Parameter(help="Its id; the root by default.")]

P = ParamSpec("P")


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Looking:
    """The options of a command that looks, and waits for nobody."""

    store: Store = None
    output: Output = None


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Waiting(Looking):
    """The options of a command that waits, until a holder has answered or something is over."""

    timeout: Timeout = None


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Working:
    """The options of a command that runs agents, but for how long it may take."""

    store: Store = None
    model: Model = None
    script: Script = None
    cwd: Cwd = None
    extension: Extensions = None
    output: Output = None


def options_of(host: Host, given: Looking | Working | None = None, **others: Any) -> Options:
    """Return what a command works with: what was given on its line, and what stands elsewhere."""
    named = {} if given is None else attrs.asdict(given, recurse=False)
    if "extension" in named:
        # Given one by one, and several all the same.
        named["extensions"] = named.pop("extension")
    options = resolve_options(find_sources(host.environ), **named, **others)
    host.store = None if options.store == DEFAULT_STORE else options.store
    return options


def run_trio(command: Callable[P, Awaitable[int]], /, *args: P.args, **kwargs: P.kwargs) -> int:
    """Run a command with its arguments and return its exit code."""
    return int(trio.run(functools.partial(command, *args, **kwargs)))


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
