"""What is stored of one tool call: its input, its checkpoints, its outcome."""

from __future__ import annotations

from typing import Any

import attrs

from pidurable.agent._replay import Replay


@attrs.frozen(kw_only=True)
class ToolInput:
    """One call: whose it is, the tool's name, the arguments as the model, or a tool, wrote them.

    A nested call has the place of the model's call that it is made below of.
    """

    assistant: int
    index: int
    name: str
    arguments: Any
    caller: int | None = None
    """The call whose tool made this one; None for a call of the model itself."""
    depth: int = 0
    """How many calls this one is nested below."""


@attrs.frozen
class Call:
    """Nothing has happened yet."""


@attrs.frozen(kw_only=True)
class Execute:
    """The tool may have run with these arguments."""

    arguments: Any
    replay: Replay
    unknown: str | None = None
    """What the tool said when it could not tell whether its effect happened."""
    granted: str | None = None
    """The digest of what a person, or a grant of theirs, has let run; None: nobody was asked."""


@attrs.frozen(kw_only=True)
class Approval:
    """A person decides: may the call run, or what became of the effect that was found?"""

    request: int
    effect: Execute | None = None
    """What was found after a crash; None for a call that has not run."""


@attrs.frozen(kw_only=True)
class ToolReceipt:
    """How a call ended, the entry of its result, and what it asks of its round."""

    entry: int
    is_error: bool
    code: str | None = None
    terminate: bool = False
    """The result asks for the end of the run."""
    handoff: str | None = None
    """The note of a fresh context in which the input is to go on."""
    add_tools: tuple[str, ...] = ()
    """Tools that the conversation gets from now on."""
    nested: Any = None
    """The result of a nested call, as JSON: see `_nested`."""
