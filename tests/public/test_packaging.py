"""The wheel: what it holds, that it works when it is installed, that the sdist builds the same."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from sources import CHECKOUT

needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="hatchling is not installed; the test extra brings it",
)

PROGRAM = """
import sys
from pathlib import Path
import pidurable, pidurable.extensions.coding as coding
from pidurable import ExtensionLoader, Registry
from pidurable.cli import main
assert Path(pidurable.__file__).is_relative_to(sys.argv[1]), pidurable.__file__
assert Path(coding.__file__).is_relative_to(sys.argv[1]), coding.__file__
registry = Registry()
loader = ExtensionLoader(registry)
loader.load(str(Path(coding.__file__).parent))
print(*[tool.name for tool in registry.snapshot.tools(None)])
try:
    import extensions
except ImportError:
    print("no top-level extensions")
"""


def build(target: str, source: Path, folder: Path) -> Path:
    """Build a wheel or an sdist as a front end would, but without downloading the back end."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        capture_output=True,
        check=True,
    )
    (made,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout."""
    return build("wheel", CHECKOUT, tmp_path_factory.mktemp("wheel"))


@needs_hatchling
@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel: Path) -> None:
    """Code, types marker, schema and bundled extensions; no tests, caches or second package."""
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0].split("-")[0] for name in names} == {"pidurable"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    for needed in (
        "pidurable/py.typed",
        "pidurable/extensions/__init__.py",
        "pidurable/extensions/coding/__init__.py",
    ):
        assert names.count(needed) == 1, needed
    held = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "pidurable").rglob("*.sql")}
    held |= {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "pidurable").rglob("*.yaml")}
    assert held <= set(names)


@needs_hatchling
@pytest.mark.slow
def test_what_is_installed_from_the_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """From an unpacked wheel alone the extensions import by name and load by path."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(site)!r})\n{PROGRAM}")

    # -P and -S would also take the dependencies away; an editable install of the checkout comes
    # after the unpacked wheel on the path, and must not be needed.
    done = subprocess.run(
        [sys.executable, str(program), str(site)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "read write edit bash"


@needs_hatchling
@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path, slow_run: bool) -> None:
    """Whoever builds from the source archive gets the same files with the same content."""
    if not slow_run:
        pytest.skip("builds two archives more; run it with -m slow")
    archive = build("sdist", CHECKOUT, tmp_path / "sdist")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build("wheel", source, tmp_path / "again")

    def contents(path: Path) -> dict[str, bytes]:
        opened = zipfile.ZipFile(path)
        return {name: opened.read(name) for name in opened.namelist()}

    assert contents(again) == contents(wheel)


def test_the_console_script_leads_to_the_command_line() -> None:
    """`pidurable` calls a function that exists and takes no arguments it needs."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["pidurable"].partition(":")

    loaded = importlib.import_module(module)
    assert callable(getattr(loaded, function))


def test_every_dependency_states_a_lower_bound() -> None:
    """A bound is what was tested; without one anything may be installed."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}

    for group, needed in groups.items():
        for line in needed:
            assert ">=" in line or line.startswith("pidurable["), (group, line)
    assert set(groups) == {"", "agent", "llm", "cli", "demo", "all", "test", "dev"}


def test_the_kernel_needs_only_its_four_dependencies() -> None:
    """Everything else is an extra, imported where it is used."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

    names = {line.split(">=")[0] for line in project["dependencies"]}
    assert names == {"trio", "attrs", "cattrs", "apsw", "typing-extensions"}
