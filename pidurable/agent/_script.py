"""Scripts: what a scripted model answers, written in Python or YAML.

Which step answers is a function of the request, never of the memory of a process, so that a script
works across a kill and a restart: the step number is the number of complete answers that the
request already holds (of the whole context, or since the last user message), unless a step names
the requests it is for (`when`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
from attrs import validators as v

from pidurable.agent._models import ModelRequest, render_system_message
from pidurable.errors import InvalidArgumentError, MissingExtraError, NotJsonError, show
from pidurable.records._json import check_json
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    JsonValue,
    StopReason,
    SystemMessage,
    TextBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)

__all__ = [
    "Cut",
    "Defer",
    "Expect",
    "RequestView",
    "Script",
    "ScriptedCall",
    "ScriptedError",
    "Stall",
    "Step",
    "When",
    "Wire",
    "load_script",
]

RecordT = TypeVar("RecordT")
Position = Literal["conversation", "run"]


@attrs.frozen(kw_only=True)
class RequestView:
    """What a script may look at, the same for our requests and for an OpenAI chat body."""

    answers: int
    """Complete answers in the whole context."""
    turn: int
    """Complete answers since the last message of a user."""
    user: str
    """The text of the last message of a user."""
    results: tuple[str, ...]
    """The texts of the tool results after the last answer, in call order."""
    system: str
    tools: tuple[str, ...]
    text: str
    """All text of the request; its length stands for its size in tokens."""

    @property
    def input_tokens(self) -> int:
        """An estimate: four characters are a token."""
        return len(self.text) // 4 + 1


def view_request(request: ModelRequest) -> RequestView:
    """Reduce a request to what a script may look at."""
    answers = turn = 0
    user = ""
    results: list[str] = []
    texts = [request.system]
    for item in request.messages:
        message = item.message
        if isinstance(message, SystemMessage):
            texts.append(render_system_message(message))
            continue
        text = _text(message.blocks)
        texts.append(text)
        if isinstance(message, AssistantMessage):
            texts.extend(str(call.arguments) for call in message.tool_calls)
            if message.status == "complete":
                answers, turn, results = answers + 1, turn + 1, []
        elif isinstance(message, ToolResultMessage):
            results.append(text)
        elif isinstance(message, UserMessage):
            user, turn = text, 0
    return RequestView(
        answers=answers,
        turn=turn,
        user=user,
        results=tuple(results),
        system=request.system,
        tools=tuple(tool.name for tool in request.tools),
        text="\n".join(texts),
    )


def _text(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


# --- steps ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ScriptedCall:
    """A tool call to answer with. `arguments` as a str is sent as it is, valid JSON or not."""

    name: str
    arguments: JsonValue = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class ScriptedError:
    """An error instead of an answer."""

    kind: Literal["retryable", "overflow", "auth", "other"] = "retryable"
    detail: str = "scripted error"
    retry_after: float | str | None = None
    """Seconds; a str (an HTTP date) only makes sense to the HTTP server."""


@attrs.frozen(kw_only=True)
class Cut:
    """The stream ends after so many pieces, without its last event."""

    after: int = 1
    raises: bool = False
    """True: the connection breaks. False: it ends as if all were well."""


@attrs.frozen(kw_only=True)
class Stall:
    """The stream falls silent after so many pieces, and stays so until it is left.

    -1 is silence before anything: for the HTTP server, before the headers.
    """

    after: int = 0
    keepalive: bool = False
    """The HTTP server goes on sending comments, which are no events."""


@attrs.frozen(kw_only=True)
class Defer:
    """The answer comes later, and has to be asked for."""

    polls: int = attrs.field(default=1, validator=v.ge(1))
    """Which time of asking gives the answer."""
    seconds: float = attrs.field(default=30.0, validator=v.ge(0))
    """Until it may be asked for again."""
    error: ScriptedError | None = None
    """What the first time of asking gives instead; it is not counted."""


@attrs.frozen(kw_only=True)
class Expect:
    """What the request must hold; otherwise the request fails and the script says so."""

    user: str | None = None
    """In the text of the last message of a user."""
    results: tuple[str, ...] = ()
    """One text for each result of the last round, each contained in its result, in call order."""
    system: str | None = None
    tools: tuple[str, ...] = ()
    text: str | None = None
    """Anywhere."""
    absent: str | None = None
    """Nowhere."""

    def problem(self, view: RequestView) -> str | None:
        """Return what does not hold, or None."""
        if self.user is not None and self.user not in view.user:
            return f"expected {self.user!r} in the user's text, saw {show(view.user)}"
        if self.results and len(self.results) != len(view.results):
            return f"expected {len(self.results)} tool results, saw {show(view.results)}"
        for expected, seen in zip(self.results, view.results, strict=False):
            if expected not in seen:
                return f"expected {expected!r} in a tool result, saw {show(seen)}"
        if self.system is not None and self.system not in view.system:
            return f"expected {self.system!r} in the system prompt, saw {show(view.system)}"
        for tool in self.tools:
            if tool not in view.tools:
                return f"expected the tool {tool!r}, saw {show(view.tools)}"
        if self.text is not None and self.text not in view.text:
            return f"expected {self.text!r} somewhere in the request"
        if self.absent is not None and self.absent in view.text:
            return f"expected {self.absent!r} nowhere in the request"
        return None


@attrs.frozen(kw_only=True)
class When:
    """Which requests a step is for; every condition given must hold."""

    user: str | None = None
    result: str | None = None
    """In any tool result of the last round."""
    system: str | None = None
    text: str | None = None
    turn: int | None = None
    """So many answers since the last message of a user."""
    answers: int | None = None

    def __call__(self, view: RequestView) -> bool:
        return (
            (self.user is None or self.user in view.user)
            and (self.result is None or any(self.result in text for text in view.results))
            and (self.system is None or self.system in view.system)
            and (self.text is None or self.text in view.text)
            and (self.turn is None or self.turn == view.turn)
            and (self.answers is None or self.answers == view.answers)
        )


@attrs.frozen(kw_only=True)
class Wire:
    """What only the HTTP server can do with an answer."""

    status: int | None = None
    """Answer with this status and `body`, instead of a stream."""
    headers: Mapping[str, str] = attrs.field(factory=dict)
    body: str = ""
    split_bytes: int | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    """Write the stream in pieces of so many bytes, also in the middle of a character."""
    raw: tuple[str, ...] = ()
    """Lines put into the stream as they are, before the answer; "\\xNN" escapes make odd bytes."""
    call_id: str | None = None
    """The id that every call of the answer carries, instead of a fresh one."""


@attrs.frozen(kw_only=True)
class Step:
    """One answer of a script, or a fault, or a fault first and an answer later (`times`)."""

    text: str | tuple[str, ...] = ""
    """The answer; a tuple is sent piece by piece."""
    thinking: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    delay: float = attrs.field(default=0.0, validator=v.ge(0))
    """Seconds before each piece."""
    piece_chars: int | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    """Cut texts and arguments into pieces of so many characters."""
    error: ScriptedError | None = None
    cut: Cut | None = None
    stall: Stall | None = None
    defer: Defer | None = None
    """Without a fault: answer later, when asked again. What the answer is, is said here all the
    same."""
    times: int | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    """How often the fault happens before the answer comes; None: once, or for ever if the step
    has no answer."""
    usage: Usage | None = None
    """None estimates it from the length of the texts."""
    stop: StopReason | None = None
    expect: Expect | None = None
    when: When | Callable[[RequestView], bool] | None = None
    wire: Wire = Wire()

    @property
    def has_answer(self) -> bool:
        """Whether there is something to answer with."""
        return bool(self.text or self.calls)

    def is_fault(self, tries: int) -> bool:
        """Tell whether the fault happens, when the step was asked `tries` times before."""
        if self.error is None and self.cut is None and self.stall is None:
            return self.wire.status is not None and self._fails(tries)
        return self._fails(tries)

    def _fails(self, tries: int) -> bool:
        if self.times is not None:
            return tries < self.times
        return tries < 1 or not self.has_answer

    @property
    def text_pieces(self) -> tuple[str, ...]:
        """The answer in the pieces it is sent in."""
        pieces = (self.text,) if isinstance(self.text, str) else self.text
        return tuple(part for piece in pieces for part in self.split(piece))

    def split(self, text: str) -> tuple[str, ...]:
        """Cut a text into the pieces that this step sends."""
        if not text:
            return ()
        size = self.piece_chars or len(text)
        return tuple(text[start : start + size] for start in range(0, len(text), size))


# --- scripts ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Script:
    """The steps of a scripted model, and how one is chosen."""

    steps: tuple[Step, ...]
    position: Position = "conversation"
    repeat_last: bool = False
    """Answer with the last step when there are no more, instead of failing."""
    context_window: int | None = None
    """Requests of more (estimated) tokens overflow."""
    log: str | None = None
    """A file to append every request to, as JSON lines."""

    def choose(self, view: RequestView) -> int | None:
        """Return the number of the step that answers a request, or None if there is none.

        Steps with `when` are asked first, in order; the others answer by position.
        """
        for number, step in enumerate(self.steps):
            if step.when is not None and step.when(view):
                return number
        plain = [number for number, step in enumerate(self.steps) if step.when is None]
        position = view.answers if self.position == "conversation" else view.turn
        if position < len(plain):
            return plain[position]
        return plain[-1] if plain and self.repeat_last else None


def make_step(value: Step | str | Mapping[str, Any], path: str = "$") -> Step:
    """Make a step of a text, of a mapping as YAML gives it, or of a step."""
    if isinstance(value, Step):
        return value
    if isinstance(value, str):
        return Step(text=value)
    fields = dict(_mapping(value, path))
    for name, kind in _NESTED.items():
        if (
            fields.get(name) is not None
            and not isinstance(fields[name], kind)
            and not callable(fields[name])
        ):
            fields[name] = _record(kind, _shorthand(name, fields[name]), f"{path}.{name}")
    calls = fields.get("calls", ())
    fields["calls"] = tuple(
        _record(ScriptedCall, call, f"{path}.calls[{index}]")
        for index, call in enumerate(_sequence(calls, f"{path}.calls"))
    )
    text = fields.get("text", "")
    fields["text"] = text if isinstance(text, str) else tuple(_sequence(text, f"{path}.text"))
    return _record(Step, fields, path)


_NESTED: dict[str, type[Any]] = {
    "error": ScriptedError,
    "cut": Cut,
    "stall": Stall,
    "defer": Defer,
    "expect": Expect,
    "when": When,
    "usage": Usage,
    "wire": Wire,
}


def _shorthand(name: str, value: Any) -> Any:
    """Return the mapping that a short form stands for: `error: auth`, `cut: 2`, `defer: 3`."""
    if isinstance(value, bool | float) or not isinstance(value, int | str):
        return value
    short = {
        "error": "kind",
        "cut": "after",
        "stall": "after",
        "defer": "polls",
        "expect": "user",
        "when": "user",
    }
    return {short[name]: value} if name in short else value


def _record(kind: type[RecordT], value: Any, path: str) -> RecordT:
    if isinstance(value, kind):
        return value
    fields = dict(_mapping(value, path))
    known = [field.name for field in attrs.fields(kind)]  # type: ignore[arg-type]
    for name, given in fields.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InvalidArgumentError("script", f"{path} has no field {name!r}; {hint}")
        if name in ("results", "tools", "raw") and isinstance(given, list):
            fields[name] = tuple(given)
    if kind is Defer and fields.get("error") is not None:
        error = _shorthand("error", fields["error"])
        fields["error"] = _record(ScriptedError, error, f"{path}.error")
    try:
        made = kind(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("script", f"{path}: {error}") from error
    if isinstance(made, ScriptedCall):
        _check_arguments(made, path)
    return made


def _check_arguments(call: ScriptedCall, path: str) -> None:
    # YAML reads an unquoted date as a date; say where, instead of failing in mid-answer.
    try:
        check_json(call.arguments, f"{path}.arguments")
    except NotJsonError as error:
        raise InvalidArgumentError("script", str(error)) from error


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError("script", f"{path} must be a mapping", show(value))
    return value


def _sequence(value: Any, path: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidArgumentError("script", f"{path} must be a list", show(value))
    return value


def load_script(path: str | Path) -> Script:
    """Read a script from a YAML file: a list of steps, or a mapping with `steps` and options.

    Raises:
        InvalidArgumentError: The file is missing, is no YAML, or has a field that does not exist.
        MissingExtraError: The YAML library is not installed.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("cli", "a scripted model in a YAML file") from error
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError("script", f"{path} cannot be read: {error}") from error
    fields: dict[str, Any] = (
        {"steps": value} if isinstance(value, list) else dict(_mapping(value, str(path)))
    )
    steps = _sequence(fields.get("steps", ()), f"{path}: steps")
    fields["steps"] = tuple(
        make_step(step, f"{path}: steps[{number}]") for number, step in enumerate(steps)
    )
    return _record(Script, fields, str(path))
