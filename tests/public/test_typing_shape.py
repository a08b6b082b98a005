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


def _mypy_errors(sample: Path, cache: Path) -> dict[int, str]:
    output = _run(
        "mypy",
        "--config-file=",
        "--strict",
        "--no-error-summary",
        "--follow-imports=silent",
        "--show-absolute-path",
        f"--cache-dir={cache}",
        str(sample),
    )
    found: dict[int, str] = {}
    for line in output.splitlines():
        place, _, text = line.partition(": error: ")
        if text:
            path, _, number = place.rpartition(":")
            key = int(number) if Path(path) == sample else 0
            found[key] = line
    return found


def _pyright_errors(sample: Path, folder: Path) -> dict[int, str]:
    # Only files below the configuration are reported, so the package is read, but not judged.
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
    assert report["summary"]["filesAnalyzed"] >= 1, output
    found = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    return {
        each["range"]["start"]["line"] + 1 if Path(each["file"]).name == sample.name else 0: (
            each["message"]
        )
        for each in found
    }


@pytest.fixture(scope="module")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module: the package itself is read once."""
    return tmp_path_factory.mktemp("mypy-cache")


def _errors(checker: str, sample: Path, folder: Path, cache: Path) -> dict[int, str]:
    # The checkers belong to the dev extra; who only runs the tests need not have them.
    pytest.importorskip(checker, reason=f"{checker} is not installed; the dev extra brings it")
    if checker == "mypy":
        return _mypy_errors(sample, cache)
    return _pyright_errors(sample, folder)


def _marked_lines(sample: Path) -> set[int]:
    lines = sample.read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if "# error:" in line}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.parametrize("name", RIGHT)
def test_the_manuals_shape_checks_without_casts(
    checker: str, name: str, tmp_path: Path, mypy_cache: Path
) -> None:
    """The right samples have no error in strict mode, and need no cast or ignore for that."""
    sample = SAMPLES / name
    source = sample.read_text()

    assert _errors(checker, sample, tmp_path, mypy_cache) == {}

    assert "cast" not in source.replace("without casts", "")
    assert "ignore" not in source


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_errors_in_the_editor(
    checker: str, name: str, tmp_path: Path, mypy_cache: Path
) -> None:
    """Exactly the marked lines of the wrong samples are errors, in both checkers."""
    sample = SAMPLES / name
    expected = _marked_lines(sample)

    errors = _errors(checker, sample, tmp_path, mypy_cache)

    assert len(expected) > 5
    assert expected == set(errors), errors
