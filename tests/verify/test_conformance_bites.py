"""The conformance suite finds what backends do wrong, and can be run by their authors."""

from __future__ import annotations

import doctest
import functools

import pytest
from conformance_mistakes import MISTAKES, PlantedFactory, planted

from pidurable.testing import storage_conformance as suite

LONG = ("ten_thousand_rows", "a_command_has_a_size", "many_hand_in", "values_come_back")
QUICK_FIRST = sorted(suite.conformance_cases(), key=lambda case: case.name.startswith(LONG))


SAMPLE = 24
"""Every so many of the mistakes is planted every day."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % SAMPLE == 0 else pytest.mark.slow)
        for number, name in enumerate(MISTAKES)
    ],
)
def test_a_mistake_in_a_backend_fails_some_case(name: str) -> None:
    """Each of many mistakes, planted alone into the memory backend, is found by some case."""
    with planted(name) as cls:
        found = None
        for case in QUICK_FIRST:
            try:
                case.run(PlantedFactory(cls))
            except Exception as error:
                found = (case.name, error)
                break

    assert found is not None, f"no case minds it: {name}"


def test_the_guide_is_true() -> None:
    """The example backend in the docstring of the suite conforms."""
    failed, tried = doctest.testmod(suite)

    assert failed == 0
    assert tried > 5


def test_the_suite_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It counts what holds by backend, and says PASS."""
    code = suite.main(["--backend", "memory", "--reopen"])

    said = capsys.readouterr().out
    count = len(suite.conformance_cases())
    assert code == 0
    assert said.startswith(f"conformance: memory_reopened={count} failures=0 ")
    assert said.endswith(" PASS\n")


@functools.cache
def forgetful() -> PlantedFactory:
    """A backend with a mistake; each case asks for it, and to plant it is to compile a module."""
    with planted("removals unsorted") as cls:
        return PlantedFactory(cls)


def test_a_backend_that_fails_is_told_what(capsys: pytest.CaptureFixture[str]) -> None:
    """Each case that fails is named with its claim and the difference; the status is 1."""
    code = suite.main(["--backend", f"{__name__}:forgetful"])

    said = capsys.readouterr().out.splitlines()
    assert code == 1
    assert said[-1].endswith(" FAIL")
    assert said[0].startswith(f"FAILED {__name__}.forgetful: ")
    assert "got " in said[1]


@pytest.mark.parametrize(
    "name", ["nothing", "pidurable.testing:", "no_such_module:x", "pidurable.testing:Nothing", ":"]
)
def test_a_backend_that_is_not_there_is_a_usage_error(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what was given and what is expected."""
    with pytest.raises(SystemExit) as caught:
        suite.main(["--backend", name])

    assert caught.value.code == 2
    assert repr(name) in capsys.readouterr().err
