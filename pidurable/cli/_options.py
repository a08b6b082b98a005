"""Options and where they come from: command line over variables over pyproject.toml over defaults.

Every option has one name in three places: `--store`, `PIDURABLE_STORE`, and `store` below
`[tool.pidurable]`. A value is checked the same way wherever it stands, and an error names the
place. Paths in pyproject.toml are relative to its folder, all others to the working directory.
"""

from __future__ import annotations

import difflib
import math
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import attrs

from pidurable.cli._errors import UsageError
from pidurable.errors import show

__all__ = [
    "DEFAULT_STORE",
    "Options",
    "Output",
    "Sources",
    "check_text",
    "find_sources",
    "resolve_options",
]

T = TypeVar("T")

DEFAULT_STORE = os.path.join(".pidurable", "session.sqlite")
Output = Literal["table", "json", "ids"]
OUTPUTS = ("table", "json", "ids")
TIMEOUT_SECONDS_MAX = 10 * 365 * 86_400.0
_NAMES = ("store", "model", "script", "cwd", "extensions", "output", "timeout")


@attrs.frozen(kw_only=True)
class Options:
    """What a command works with, every source considered."""

    store: str
    model: str | None
    """As provider/model; a script is `scripted/` and its absolute path."""
    model_source: str
    cwd: str
    """Absolute."""
    cwd_given: bool
    """Whether somebody named it; else it is where the command was started."""
    extensions: tuple[str, ...]
    output: Output
    timeout: float | None
    """Seconds."""

    @property
    def resume_command(self) -> str:
        """The command that goes on with this work, as it can be typed."""
        words = [word for extension in self.extensions for word in ("--extension", extension)]
        return " ".join([self.command("resume"), *(shlex.quote(word) for word in words)])

    def command(self, *words: str) -> str:
        """A command about this store, as it can be typed."""
        store = () if self.store == DEFAULT_STORE else ("--store", self.store)
        return " ".join(shlex.quote(word) for word in ("pidurable", *words, *store))


@attrs.frozen(kw_only=True)
class Sources:
    """The places below the command line."""

    environ: Mapping[str, str]
    project: Mapping[str, Any] = attrs.Factory(dict)
    """The table [tool.pidurable]."""
    project_file: Path | None = None


def find_sources(environ: Mapping[str, str] | None = None, folder: Path | None = None) -> Sources:
    """Read the variables and the nearest pyproject.toml that has a table for us.

    Raises:
        UsageError: The nearest pyproject.toml is not TOML, or its table has an unknown key.
    """
    environ = os.environ if environ is None else environ
    start = Path.cwd() if folder is None else folder
    for place in (start, *start.parents):
        file = place / "pyproject.toml"
        try:
            text = file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read ({error})") from error
        try:
            parsed = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{file} is not TOML: {error}", "Correct the file") from error
        tool = parsed.get("tool")
        table = tool.get("pidurable") if isinstance(tool, dict) else None
        if table is not None:
            return Sources(environ=environ, project=_checked(table, file), project_file=file)
    return Sources(environ=environ)


def _checked(table: object, file: Path) -> Mapping[str, Any]:
    if not isinstance(table, dict):
        raise UsageError(f"{file}: tool.pidurable is {show(table)}", "Make it a table")
    for name in table:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(_NAMES)}."
            raise UsageError(f"{file}: tool.pidurable has an unknown key {name!r}", remedy)
    return table


@attrs.frozen
class _Found:
    value: Any
    layer: int
    """0: the command line, 1: a variable, 2: the project's table."""
    place: str
    """What messages call the place it stands in."""
    folder: Path | None = None
    """What a relative path is relative to; None: the working directory."""


def _layers(name: str, given: object, sources: Sources) -> list[_Found]:
    """The values of an option, the one that counts first."""
    found = []
    if given is not None:
        # Several are given one by one: --extension A --extension B.
        found.append(_Found(given, 0, "--extension" if name == "extensions" else f"--{name}"))
    variable = f"PIDURABLE_{name.upper()}"
    if sources.environ.get(variable):
        found.append(_Found(sources.environ[variable], 1, variable))
    if name in sources.project:
        assert sources.project_file is not None
        place = f"{sources.project_file}, tool.pidurable.{name}"
        found.append(_Found(sources.project[name], 2, place, sources.project_file.parent))
    return found


def _first(
    name: str, given: object, sources: Sources, read: Callable[[_Found], T], default: T
) -> T:
    layers = _layers(name, given, sources)
    return read(layers[0]) if layers else default


def resolve_options(
    sources: Sources,
    *,
    store: str | None = None,
    model: str | None = None,
    script: str | None = None,
    cwd: str | None = None,
    extensions: tuple[str, ...] | list[str] | None = None,
    output: str | None = None,
    timeout: float | None = None,
) -> Options:
    """Put together what a command works with. None means that an option was not given.

    Raises:
        UsageError: A value is not possible; the message names the place that it stands in.
    """
    chosen, place = _model(sources, model, script)
    folder = _first("cwd", cwd, sources, _path, os.getcwd())
    if not os.path.isdir(folder):
        raise UsageError(f"--cwd {folder!r} is not a folder", "Name an existing one")
    return Options(
        store=_first("store", store, sources, _path, DEFAULT_STORE),
        model=chosen,
        model_source=place,
        cwd=os.path.abspath(folder),
        cwd_given=bool(_layers("cwd", cwd, sources)),
        extensions=_first("extensions", extensions or None, sources, _sources_of_code, ()),
        output=_first("output", output, sources, _output, "table"),
        timeout=_first("timeout", timeout, sources, _timeout, None),
    )


def _text(found: _Found) -> str:
    if not isinstance(found.value, str):
        raise UsageError(f"{found.place}: expected a text, got {show(found.value)}")
    return check_text(found.value, found.place)


def check_text(text: str, place: str) -> str:
    """Return a text that can be stored and bound; refuse an empty one, NUL, and broken UTF-8."""
    if not text or "\0" in text:
        raise UsageError(f"{place}: expected a text, got {show(text)}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{place}: {show(text)} holds bytes that are not UTF-8")
    return text


def _path(found: _Found) -> str:
    text = os.path.expanduser(_text(found))
    return text if found.folder is None else os.path.join(found.folder, text)


def _output(found: _Found) -> Output:
    text = _text(found)
    if text not in OUTPUTS:
        raise UsageError(f"{found.place}: {text!r} is not one of {', '.join(OUTPUTS)}")
    return cast("Output", text)


def _timeout(found: _Found) -> float | None:
    value = found.value
    try:
        if isinstance(value, bool):
            raise ValueError
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds <= TIMEOUT_SECONDS_MAX:
        raise UsageError(f"{found.place}: expected seconds, at least 0, got {show(value)}")
    return seconds


def _sources_of_code(found: _Found) -> tuple[str, ...]:
    """Extensions: a list, or in a variable a text with the separator of PATH."""
    value = found.value
    if isinstance(value, str):
        value = [part for part in value.split(os.pathsep) if part]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise UsageError(f"{found.place}: expected a list of texts, got {show(found.value)}")
    return tuple(_code(part, found.folder) for part in value)


def _code(text: str, folder: Path | None) -> str:
    """A path (it has a slash or ends with .py) made absolute to its place, or a module's name."""
    if not text or "\0" in text:
        raise UsageError(f"{show(text)} is no extension", "Give a path or the name of a module")
    if os.sep not in text and not text.endswith(".py"):
        return text
    path = os.path.expanduser(text)
    return path if folder is None else os.path.join(folder, path)


def _model(sources: Sources, model: str | None, script: str | None) -> tuple[str | None, str]:
    """The model of the first place that names one, as a model or as a script."""
    named = [
        (name, found)
        for name, given in (("model", model), ("script", script))
        for found in _layers(name, given, sources)
    ]
    if not named:
        return None, ""
    layer = min(found.layer for _, found in named)
    first = [(name, found) for name, found in named if found.layer == layer]
    if len(first) > 1:
        places = " and ".join(found.place for _, found in first)
        raise UsageError(f"{places} both name a model", "Give one of them")
    name, found = first[0]
    if name == "model":
        return _text(found), found.place
    path = os.path.abspath(_path(found))
    if not path.endswith((".yaml", ".yml")):
        raise UsageError(f"{found.place}: {path!r} is not a .yaml file")
    if not os.path.isfile(path):
        raise UsageError(f"{found.place}: there is no script {path!r}")
    return f"scripted/{path}", found.place
