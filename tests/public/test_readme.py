"""The manual is true: its code runs, its tables are those of the code, its commands exist."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import attrs
import pytest

from pidurable import Settings
from pidurable.records import _limits
from pidurable.records._value_rules import VALUE_DOORS, VALUE_RULES

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
NO_LIMITS = ("on_fault", "steers", "follow_ups", "sequential_tools", "extensions")
"""Settings that are choices."""

UNITS = {"KiB": 1024, "MiB": 1024 * 1024}


def run_block(number: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> types.ModuleType:
    """Run a block as a program of its own in an empty folder."""
    module = types.ModuleType(f"readme_block_{number}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(folder)
    exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), module.__dict__)
    return module


def test_the_manual_has_code_to_run() -> None:
    """The extraction finds the blocks, the first of which is the tour of at most 40 lines."""
    assert len(BLOCKS) >= 8
    assert "class Payment(Task[" in BLOCKS[0]
    assert len(BLOCKS[0].splitlines()) <= 40
    assert README.count("```python") == len(BLOCKS)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_manual_runs(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each Python block runs offline, alone, in an empty folder."""
    run_block(number, monkeypatch, tmp_path)


def test_the_tour_charges_once_when_it_is_run_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run finds the task under its key, and charges nothing."""
    run_block(0, monkeypatch, tmp_path)
    run_block(0, monkeypatch, tmp_path)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["charging", "completed", "completed"]


def _number(text: str) -> float | None:
    if text == "none":
        return None
    amount, _, unit = text.replace(",", "").partition(" ")
    return float(amount) * UNITS.get(unit, 1)


def _default(value: object) -> float | None:
    return None if value is None or value == {} else float(str(value))


def test_the_table_of_limits_is_that_of_the_code() -> None:
    """Every limit stands in the manual with its value, and nothing else does."""
    limits = README.partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`( \*setting\*)? \| ([^|]+) \|", limits, re.MULTILINE)
    told = {name: (bool(setting), _number(value.strip())) for name, setting, value in rows}

    constants = {
        name.lower(): (False, float(value))
        for name, value in vars(_limits).items()
        if name.isupper() and name not in ("KIB", "MIB")
    }
    defaults = Settings()
    settings = {
        field.name: (True, _default(getattr(defaults, field.name)))
        for field in attrs.fields(Settings)
        if field.name not in NO_LIMITS
    }
    assert told == {**constants, **settings}


def test_the_rules_of_values_are_those_of_the_code() -> None:
    """Every rule stands in the manual with its sentence, and every door with its path."""
    rules = re.search(r"^\| rule \| \|\n\|---\|---\|\n((?:\|.*\n)+)", README, re.MULTILINE)
    doors = re.search(r"^\| door \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert rules is not None
    assert doors is not None

    assert rules[1] == "".join(f"| `{rule.name}` | {rule.statement} |\n" for rule in VALUE_RULES)
    assert doors[1] == "".join(
        f"| `{door.call}` | `{door.path}` | {'yes' if door.typed else ''} |\n"
        for door in VALUE_DOORS
    )


def test_the_examples_are_all_in_the_table_of_the_manual() -> None:
    """An example that nobody finds teaches nothing."""
    there = {path.name for path in (CHECKOUT / "examples").glob("[0-9]*.py")}

    assert set(re.findall(r"^\| `examples/(\w+\.py)` \|", README, re.MULTILINE)) == there


def test_a_limit_that_the_manual_calls_idle_is_read_nowhere() -> None:
    """`not in force yet` stands at exactly those limits that no code reads."""
    idle = set(re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| not in force yet \|$", README, re.MULTILINE))

    code = "\n".join(
        path.read_text()
        for path in (CHECKOUT / "pidurable").rglob("*.py")
        if path.name != "_limits.py"
    )
    words, read = set(re.findall(r"\w+", code)), set(re.findall(r"\.(\w+)", code))
    constants = {name for name in vars(_limits) if name.isupper() and name not in ("KIB", "MIB")}
    unread = {name.lower() for name in constants - words}
    settings = {field.name for field in attrs.fields(Settings) if field.name not in NO_LIMITS}
    unread |= settings - read
    assert idle == unread


def test_the_commands_of_the_manual_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command of the list answers to --help."""
    main = pytest.importorskip("pidurable.cli", reason="the cli extra is not installed").main
    from one_application import build_the_application_once

    build_the_application_once(monkeypatch)
    listed = re.search(r"```text\n(pidurable run.*?)```", README, re.DOTALL)
    assert listed is not None
    commands = []
    for line in listed[1].splitlines():
        words = [word for word in line.split("  ")[0].split() if word[0].islower()][1:]
        last = words[-1].split("|") if words else []
        commands += [[*words[:-1], each] for each in last]
    assert ["task", "tree"] in commands
    assert ["explain"] in commands

    for command in commands:
        assert main([*command, "--help"]) == 0, command
        assert f"Usage: pidurable {' '.join(command)}" in capsys.readouterr().out


def test_the_make_targets_of_the_manual_exist() -> None:
    """Each `make` line names a target, and its plain lines are what the target runs."""
    makefile = (CHECKOUT / "Makefile").read_text()

    for target in set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for extras in (".[demo]", ".[all,test]"):
        assert f"--editable '{extras}'" in README
        assert f"--editable '{extras}'" in makefile
    assert "-m pidurable.cli demo" in makefile


def test_every_link_of_the_manual_leads_somewhere() -> None:
    """Files that the manual names are there."""
    named = set(re.findall(r"\]\(([^)#:]+)\)", README))
    named |= set(re.findall(r"`((?:examples|benchmarks|tests)/[\w./]+)`", README))
    assert named

    for name in named:
        assert (CHECKOUT / name).exists(), name
