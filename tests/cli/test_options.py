"""Options: the command line over variables over pyproject.toml over defaults, checked alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pidurable.cli._errors import UsageError
from pidurable.cli._options import DEFAULT_STORE, Sources, find_sources, resolve_options


def sources(folder: Path, environ: dict[str, str] | None = None, table: str = "") -> Sources:
    if table:
        (folder / "pyproject.toml").write_text(f"[tool.pidurable]\n{table}\n")
    return find_sources(environ or {}, folder)


def test_nothing_given_gives_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options, variables and table the documented defaults count."""
    monkeypatch.chdir(tmp_path)
    options = resolve_options(sources(tmp_path))

    assert options.store == DEFAULT_STORE
    assert options.model is None
    assert options.cwd == str(tmp_path)
    assert not options.cwd_given
    assert (options.output, options.timeout, options.extensions) == ("table", None, ())


def test_each_place_counts_over_the_next(tmp_path: Path) -> None:
    """An option beats a variable, which beats the project's table."""
    table = 'store = "table.sqlite"\noutput = "json"\ntimeout = 3'
    found = sources(tmp_path, {"PIDURABLE_STORE": "env.sqlite", "PIDURABLE_TIMEOUT": "2.5"}, table)

    assert resolve_options(found, store="given.sqlite").store == "given.sqlite"
    assert resolve_options(found).store == "env.sqlite"
    assert resolve_options(found).timeout == 2.5
    assert resolve_options(found).output == "json"
    only_table = sources(tmp_path, {}, table)
    assert resolve_options(only_table).store == str(tmp_path / "table.sqlite")


def test_the_table_is_found_from_a_folder_below(tmp_path: Path) -> None:
    """The nearest pyproject.toml with a table of ours counts, and its paths begin at its folder."""
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    sources(tmp_path, {}, 'extensions = ["tools.py", "module"]')

    found = resolve_options(find_sources({}, below))

    assert found.extensions == (str(tmp_path / "tools.py"), "module")


def test_an_extension_path_in_the_table_begins_at_its_folder(tmp_path: Path) -> None:
    """A path to code means the same from wherever the command is started."""
    found = resolve_options(sources(tmp_path, {}, 'extensions = ["./x.py", "y.py", "module"]'))

    assert found.extensions == (f"{tmp_path}/./x.py", f"{tmp_path}/y.py", "module")


def test_extensions_in_a_variable_are_separated_like_a_path(tmp_path: Path) -> None:
    """PIDURABLE_EXTENSIONS holds several, with the separator of PATH."""
    found = sources(tmp_path, {"PIDURABLE_EXTENSIONS": os.pathsep.join(["a.py", "", "b"])})

    assert resolve_options(found).extensions == ("a.py", "b")


def test_a_script_becomes_a_model_by_its_absolute_path(tmp_path: Path) -> None:
    """A script is a model of the scripted provider, found again from any folder."""
    script = tmp_path / "s.yaml"
    script.write_text("- hello\n")

    found = resolve_options(sources(tmp_path), script=str(script))

    assert found.model == f"scripted/{script}"


def test_a_model_on_the_command_line_beats_a_script_in_a_variable(tmp_path: Path) -> None:
    """Model and script are one choice: the first place that names either of them decides."""
    found = sources(tmp_path, {"PIDURABLE_SCRIPT": "nowhere.yaml"}, 'model = "a/table"')

    assert resolve_options(found, model="a/b").model == "a/b"
    assert resolve_options(sources(tmp_path, {}), model=None).model == "a/table"


@pytest.mark.parametrize(
    ("environ", "table", "given", "message"),
    [
        ({"PIDURABLE_TIMEOUT": "soon"}, "", {}, "PIDURABLE_TIMEOUT: expected seconds"),
        ({"PIDURABLE_TIMEOUT": "nan"}, "", {}, "PIDURABLE_TIMEOUT: expected seconds"),
        ({}, "", {"timeout": -1.0}, "--timeout: expected seconds, at least 0, got -1.0"),
        ({}, "", {"timeout": float("inf")}, "--timeout: expected seconds"),
        ({}, "timeout = true", {}, "tool.pidurable.timeout: expected seconds"),
        ({}, "store = 3", {}, "tool.pidurable.store: expected a text, got 3"),
        ({}, "stoer = 'x'", {}, "unknown key 'stoer'.*Did you mean 'store'"),
        ({}, "zzz = 1", {}, "unknown key 'zzz'.*Known: store"),
        ({}, "extensions = [3]", {}, "expected a list of texts"),
        ({"PIDURABLE_OUTPUT": "xml"}, "", {}, "PIDURABLE_OUTPUT: 'xml' is not one of table, json"),
        ({}, "", {"store": ""}, "--store: expected a text"),
        ({}, "", {"store": "a\0b"}, "--store: expected a text"),
        ({}, "", {"store": "a\udcff"}, "--store: .*bytes that are not UTF-8"),
        ({}, "", {"model": "\udcff/x"}, "--model: .*bytes that are not UTF-8"),
        ({}, "", {"cwd": "/no/such/folder"}, "is not a folder"),
        ({}, "", {"script": "no.yaml"}, "--script: there is no script"),
        ({}, "", {"script": "no.txt"}, "is not a .yaml file"),
        ({}, "", {"script": "a.yaml", "model": "a/b"}, "--model and --script both name a model"),
        ({}, "", {"extensions": [""]}, "'' is no extension"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(
    tmp_path: Path,
    environ: dict[str, str],
    table: str,
    given: dict[str, object],
    message: str,
) -> None:
    """A value that is not possible is refused, and the message names where it stands."""
    with pytest.raises(UsageError, match=message):
        resolve_options(sources(tmp_path, environ, table), **given)  # type: ignore[arg-type]


def test_the_resume_command_can_be_typed_as_it_is(tmp_path: Path) -> None:
    """It names the store and the extensions, quoted, unless they are the usual ones."""
    plain = resolve_options(sources(tmp_path))
    special = resolve_options(sources(tmp_path), store="my store", extensions=["./x.py"])

    assert plain.resume_command == "pidurable resume"
    assert special.resume_command == "pidurable resume --store 'my store' --extension ./x.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool\n", "is not TOML"),
        ("[tool]\npidurable = 3\n", "tool.pidurable is 3"),
    ],
)
def test_a_project_file_that_cannot_be_used_is_named(
    tmp_path: Path, text: str, message: str
) -> None:
    """A broken project file is an error, and not taken for an absent one."""
    (tmp_path / "pyproject.toml").write_text(text)

    with pytest.raises(UsageError, match=message):
        find_sources({}, tmp_path)


def test_a_project_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are reported with the file's name."""
    (tmp_path / "pyproject.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(UsageError, match=r"pyproject\.toml cannot be read"):
        find_sources({}, tmp_path)
