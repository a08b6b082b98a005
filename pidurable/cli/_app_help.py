"""Help texts as wide as the terminal: the lines of a docstring are where the source breaks them."""

from __future__ import annotations

import inspect
import re

from cyclopts import App

__all__ = ["one_line_paragraphs"]

_ARGUMENT = re.compile(r"    \w+: ")


def one_line_paragraphs(app: App) -> App:
    """Make each paragraph of an application's help one line, which its printer wraps to fit."""
    app.help = _joined(app.help or "")
    for name in app:
        if name.startswith("-"):
            continue  # the printer's own, as --help
        command = app[name]
        function = command.default_command
        if function is None:
            one_line_paragraphs(command)
        else:
            # The function was made for this application, and help is read from it when asked for.
            function.__doc__ = _joined(function.__doc__ or "")
    return app


def _joined(text: str) -> str:
    lines: list[str] = []
    for line in inspect.cleandoc(text).split("\n"):
        begins = not line or not lines or not lines[-1]
        begins = begins or lines[-1] == "Args:" or _ARGUMENT.match(line) is not None
        if begins:
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(lines)
