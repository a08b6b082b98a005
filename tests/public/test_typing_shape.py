"""The public API keeps its types: right code checks without casts, wrong code is an error.

The samples are checked with mypy --strict and pyright in a process of their own, against the
package as users import it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent / "typing_samples"
CHECKOUT = Path(__file__).parents[2]
RIGHT = sorted(path.name for path in SAMPLES.glob("*.py") if not path.stem.endswith("_wrong"))
WRONG = sorted(path.name for path in SAMPLES.glob("*_wrong.py"))

Found = dict[str, dict[int, str]]
"""Errors by sample and line."""


def _run(*command: str) -> str:
    """Run a checker in the checkout and return what it printed."""
    environ = {**os.environ, "MYPYPATH": str(CHECKOUT), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=CHECKOUT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def _mypy_errors(folder: Path) -> Found:
    output = _run(
        "mypy",
        "--config-file=",
        "--strict",
        "--no-error-summary",
        "--follow-imports=silent",
        "--show-absolute-path",
        f"--cache-dir={folder}",
        *map(str, sorted(SAMPLES.glob("*.py"))),
    )
    found: Found = {}
    for line in output.splitlines():
        place, _, text = line.partition(": error: ")
        if text:
            path, _, number = place.rpartition(":")
            key = int(number) if Path(path).parent == SAMPLES else 0
            found.setdefault(Path(path).name, {})[key] = line
    return found


def _pyright_errors(folder: Path) -> Found:
    # Only files below the configuration are reported, so the package is read, but not judged.
    for sample in SAMPLES.glob("*.py"):
        (folder / sample.name).write_text(sample.read_text())
    settings = {
        "include": ["."],
        "extraPaths": [str(CHECKOUT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "strict",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    output = _run("pyright", "--outputjson", "-p", str(folder), "--pythonpath", sys.executable)
    report = json.loads(output)
    assert report["summary"]["filesAnalyzed"] >= len(RIGHT + WRONG), output
    found: Found = {}
    for each in report["generalDiagnostics"]:
        if each["severity"] == "error":
            lines = found.setdefault(Path(each["file"]).name, {})
            lines[each["range"]["start"]["line"] + 1] = each["message"]
    return found


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, slow_run: bool
) -> Found:
    """What a checker says of all samples, which it reads in one run: starting takes the time."""
    if not slow_run:
        pytest.skip("takes half a minute; run it with -m slow")
    # The checkers belong to the dev extra; who only runs the tests need not have them.
    checker = request.param
    pytest.importorskip(checker, reason=f"{checker} is not installed; the dev extra brings it")
    folder = tmp_path_factory.mktemp(checker)
    return _mypy_errors(folder) if checker == "mypy" else _pyright_errors(folder)


def _marked_lines(source: str) -> set[int]:
    return {
        number for number, line in enumerate(source.splitlines(), start=1) if "# error:" in line
    }


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", RIGHT)
def test_the_manuals_shape_checks_without_casts(name: str, found: Found) -> None:
    """The right samples have no error in strict mode, and need no cast or ignore for that."""
    source = (SAMPLES / name).read_text()

    assert found.get(name, {}) == {}

    assert "cast" not in source.replace("without casts", "")
    assert "ignore" not in source


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_errors_in_the_editor(name: str, found: Found) -> None:
    """Exactly the marked lines of the wrong samples are errors, in both checkers."""
    expected = _marked_lines((SAMPLES / name).read_text())

    errors = found.get(name, {})

    assert len(expected) > 5
    assert expected == set(errors), errors


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_else_is_judged(found: Found) -> None:
    """Every error is one of the samples' own: the package is read, and not judged."""
    assert set(found) <= set(WRONG)
