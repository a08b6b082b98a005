"""The examples in docstrings are true: each Python block runs, as those of the manual do."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

import pidurable

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def documented() -> list[tuple[str, object]]:
    """Every public name, and the public members of the classes among them."""
    found: list[tuple[str, object]] = []
    for name in sorted(pidurable._ORIGINS):
        value = getattr(pidurable, name)
        found.append((name, value))
        if isinstance(value, type):
            found += [
                (f"{name}.{member}", thing)
                for member, thing in vars(value).items()
                if not member.startswith("_")
            ]
    return found


EXAMPLES = [
    pytest.param(textwrap.dedent(block), id=f"{name}-{number}")
    for name, value in documented()
    for number, block in enumerate(BLOCK.findall(inspect.getdoc(value) or ""))
]


def test_there_are_examples_to_run() -> None:
    """The extraction finds what is written."""
    assert "hook-0" in [each.id for each in EXAMPLES]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_of_a_docstring_runs(
    code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each Python block runs offline, alone, in an empty folder."""
    module = types.ModuleType("docstring_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)

    exec(compile(code, "a docstring", "exec"), module.__dict__)
