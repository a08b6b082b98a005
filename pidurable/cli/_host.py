"""The host of a command: its streams, its clock, and how lines get onto them.

Results go to stdout and everything else to stderr, so that a pipe gets the result alone. Lines
arrive here cleaned; this module only writes them, in colour where there is a terminal that wants
it. A reader that went away (`| head`) ends the command quietly.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO, cast

import attrs

from pidurable.cli._errors import UsageError
from pidurable.cli._render import clean, clean_line, wrapped
from pidurable.cli._screen import screen_size
from pidurable.session._seams import Failpoints

__all__ = ["STDIN", "Host"]

_COMMAND = re.compile(
    r"`pidurable (?:run|resume|task|conversation|approval|usage|gc|doctor|export)\b"
    r"(?![^`]*--(?:store|help)\b)[^`]*`"
)

STDIN = "\0stdin"
"""What a lone `-` on the command line is handed on as: read standard input."""


@attrs.define(eq=False)
class Host:
    """What the commands of one process share."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    environ: Mapping[str, str]
    failpoints: Failpoints | None = None
    above: Callable[[Iterable[str], str], None] | None = None
    """While a live display is on: how lines get above it."""
    events: bool = False
    """Whether what happens is written to stdout too, as one JSON object a line."""
    store: str | None = None
    """The store of the command, where it is not the one that commands take by themselves."""
    gone: bool = False
    """Nobody reads stderr any more (the terminal was closed); the work goes on all the same."""

    @classmethod
    def of_process(cls, failpoints: Failpoints | None = None) -> Host:
        """Return the host of this process, with streams that no text can break."""
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                # A stream in ASCII shows \uXXXX for what it cannot hold, instead of failing.
                reconfigure(errors="backslashreplace")
        # A stream that was closed by whoever started this (`<&-`) is none at all.
        reads = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the whole process
        writes = [
            stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            for stream in (sys.stdout, sys.stderr)
        ]
        return cls(reads, writes[0], writes[1], os.environ, failpoints)

    def now_us(self) -> int:
        """Return the moment now, in UTC microseconds."""
        return time.time_ns() // 1000

    # --- streams -------------------------------------------------------------------------

    def is_terminal(self, stream: TextIO) -> bool:
        """Whether a person reads this stream."""
        return stream.isatty() and self.environ.get("TERM") != "dumb"

    def has_colour(self, stream: TextIO) -> bool:
        """Whether lines on this stream may be coloured (NO_COLOR says no)."""
        return self.is_terminal(stream) and not self.environ.get("NO_COLOR")

    def width(self, stream: TextIO) -> int | None:
        """Cells of a line on a terminal; None where lines may have any length, as in a pipe."""
        return screen_size(stream)[0] if self.is_terminal(stream) else None

    def display_stream(self) -> TextIO:
        """Return stderr for a live display: a terminal that is closed meanwhile is no error."""
        return cast("TextIO", _Tolerant(self))

    def out(self, lines: str | Iterable[str]) -> None:
        """Write lines of the result."""
        self._write(self.stdout, lines)

    def err(self, lines: str | Iterable[str], style: str = "") -> None:
        """Write lines that are not the result; `style` is one of rich's, for terminals."""
        if self.gone:
            return
        try:
            if self.above is not None:
                self.above(_each(lines), style)
                return
            if style and self.has_colour(self.stderr):
                lines = [f"{_STYLES[style]}{line}\x1b[0m" for line in _each(lines)]
            self._write(self.stderr, lines)
        except OSError:
            # The report of what happens is lost; what happens is not.
            self.gone = True

    def say(self, lines: str | Iterable[str], style: str = "") -> None:
        """Write lines of ours, as `err` does; commands in them name the store where they must.

        On a terminal they are broken between words. What others have written is not: where somebody
        decides by it, a line that begins with a part of it could be taken for one of ours.
        """
        self.err(self.fitted(map(self.typed, _each(lines)), self.stderr), style)

    def fitted(self, lines: Iterable[str], stream: TextIO) -> list[str]:
        """Return lines of prose as they fit a stream: broken between words on a terminal."""
        cells = self.width(stream)
        if cells is None:
            return list(lines)
        return [part for line in lines for part in wrapped(line, cells)]

    def typed(self, text: str) -> str:
        """Return a text of ours with its commands as they can be typed to work on this store."""
        if self.store is None:
            return text
        option = f" --store {clean_line(shlex.quote(self.store))}`"
        return _COMMAND.sub(lambda found: f"{found[0][:-1]}{option}", text)

    def log_handler(self) -> logging.Handler:
        """Return a handler that shows log records as lines of ours."""
        return _LogHandler(self)

    def forget_streams(self) -> None:
        """Stop writing to streams that nobody reads, so that closing them does not fail either."""
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (self.stdout, self.stderr) if self.gone else (self.stdout,):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(null, stream.fileno())
        os.close(null)

    def _write(self, stream: TextIO, lines: str | Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in _each(lines))
        stream.write(text)
        stream.flush()

    def out_json(self, value: Any) -> None:
        """Write one JSON value: whole for programs, without anything a terminal would obey."""
        text = json.dumps(
            value, ensure_ascii=self.stdout.isatty(), indent=2 if self.stdout.isatty() else None
        )
        self.out(text)

    def out_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Write events as JSON lines, if they are wanted; whoever reads them is a program."""
        if self.events:
            ascii_only = self.stdout.isatty()
            self.out(json.dumps(event, ensure_ascii=ascii_only) for event in events)

    # --- input -----------------------------------------------------------------------

    def read_stdin(self) -> str:
        """Read standard input to its end.

        Raises:
            UsageError: It is not text.
        """
        try:
            return self.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 ({error})") from error

    def confirm(self, question: str) -> bool:
        """Ask a person; only `y` or `yes` is a yes. Not to be called without a terminal."""
        self.stderr.write(f"{question} [y/N] ")
        self.stderr.flush()
        return self.stdin.readline().strip().lower() in ("y", "yes")


class _Tolerant:
    """A stream whose reader may go away."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host.stderr, name)

    def write(self, text: str) -> int:
        """Write, as long as somebody is there."""
        if not self._host.gone:
            try:
                return self._host.stderr.write(text)
            except OSError:
                self._host.gone = True
        return len(text)

    def flush(self) -> None:
        """Flush, as long as somebody is there."""
        if not self._host.gone:
            try:
                self._host.stderr.flush()
            except OSError:
                self._host.gone = True


class _LogHandler(logging.Handler):
    """What the kernel reports, one cleaned line a record; tracebacks only where debugging."""

    def __init__(self, host: Host) -> None:
        super().__init__(logging.WARNING)
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        self._host.err(f"pidurable: {clean_line(record.getMessage())}", "yellow")
        if record.exc_info and self._host.environ.get("PIDURABLE_DEBUG"):
            self._host.err(clean(logging.Formatter().formatException(record.exc_info)))


_STYLES = {"dim": "\x1b[2m", "bold": "\x1b[1m", "red": "\x1b[31m", "yellow": "\x1b[33m"}


def _each(lines: str | Iterable[str]) -> Iterable[str]:
    return (lines,) if isinstance(lines, str) else lines
