"""Loading: own namespaces, fresh text, nothing half loaded, nothing kept of what is gone."""

from __future__ import annotations

import gc
import importlib.metadata
import linecache
import sys
from pathlib import Path

import pytest

from pidurable.errors import ExtensionError
from pidurable.registry import ExtensionLoader, Registry

ONE = '''
from __future__ import annotations
import attrs
from pidurable.registry import Extension, tool

@attrs.frozen
class Answer:
    text: str

@tool
async def ask() -> str:
    """Ask."""
    return Answer({answer!r}).text

extension = Extension("one", tools=[ask])
'''


@pytest.fixture
def loader() -> ExtensionLoader:
    """A loader into an empty registry."""
    return ExtensionLoader(Registry())


async def ask(loader: ExtensionLoader, name: str = "ask") -> object:
    """Call a tool of the registry."""
    found = loader.registry.snapshot.tool(name)
    assert found is not None
    return await found.invoke({}, None)  # type: ignore[arg-type]


def loaded_modules() -> set[str]:
    """The modules that loads left in the process."""
    return {name for name in sys.modules if name.startswith("_pidurable_extension_")}


async def test_a_reload_takes_the_new_text_and_old_work_keeps_the_old(
    loader: ExtensionLoader, tmp_path: Path
) -> None:
    """An edit within the same second, of the same length, is seen; both versions work."""
    file = tmp_path / "one.py"
    file.write_text(ONE.format(answer="old"))
    loader.load(file)
    old = loader.registry.snapshot.tool("ask")
    assert old is not None

    file.write_text(ONE.format(answer="new"))
    loader.load(str(file))

    assert await ask(loader) == "new"
    assert await old.invoke({}, None) == "old"  # type: ignore[arg-type]


async def test_a_folder_is_loaded_with_its_modules(loader: ExtensionLoader, tmp_path: Path) -> None:
    """Relative imports reach the same version; an edited module is seen; nothing is compiled
    to disk."""
    folder = tmp_path / "pack"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from pidurable.registry import Extension, tool\n"
        "from .deep import answer\n"
        "@tool\n"
        "async def ask() -> str:\n"
        "    '''Ask.'''\n"
        "    from .late import more\n"
        "    return answer + more\n"
        "extension = Extension('pack', tools=[ask])\n"
    )
    (folder / "deep" / "__init__.py").write_text("from ..late import more\nanswer = 'a' + more\n")
    (folder / "late.py").write_text("more = '1'\n")
    loader.load(folder)
    assert await ask(loader) == "a11"

    (folder / "late.py").write_text("more = '2'\n")
    loader.load(folder)

    assert await ask(loader) == "a22"
    assert not list(folder.rglob("*.pyc"))


def test_a_file_may_define_several(loader: ExtensionLoader, tmp_path: Path) -> None:
    """`extensions` installs all in one publication; a reload removes what it defines no more."""
    file = tmp_path / "many.py"
    text = "from pidurable.registry import Extension\nextensions = [{}]\n"
    file.write_text(text.format("Extension('a'), Extension('b')"))
    loader.load(file)
    assert loader.registry.snapshot.extensions == ("a", "b")
    assert loader.registry.snapshot.version == 1

    file.write_text(text.format("Extension('b'), Extension('c')"))
    loader.load(file)

    assert loader.registry.snapshot.extensions == ("b", "c")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("x = 1\nraise RuntimeError('here')\n", ["line 2", "raise RuntimeError('here')", "here"]),
        ("x = 1\ndef f(:\n", ["SyntaxError", "bad.py", "line 2", "def f(:"]),
        ("import no_such_module_anywhere\n", ["line 1", "no_such_module_anywhere"]),
        ("from .missing import x\n", ["line 1", "from .missing import x"]),
        ("x = 1\n", ["neither `extension` nor `extensions`"]),
        ("extension = 3\n", ["`extension` is or holds 3"]),
        ("extension = extensions = []\n", ["both `extension` and `extensions`"]),
        (
            "from pidurable.registry import Extension\n"
            "extensions = [Extension('one'), Extension('one')]\n",
            ["two of one name"],
        ),
        (
            "from pidurable.registry import Extension\n"
            "\n"
            "extension = Extension('one', tools=[print])\n",
            ["line 3", "tools[0] is <built-in function print>"],
        ),
        (
            "from pidurable.registry import Extension, tool\n"
            "async def f(x: 'Nowhere'): 'Text.'\n"
            "extensions = [Extension('new'), Extension('one', tools=[tool(f)])]\n",
            ["cannot be resolved", "Nowhere"],
        ),
    ],
)
async def test_a_broken_file_changes_nothing_and_says_why(
    loader: ExtensionLoader, tmp_path: Path, text: str, messages: list[str]
) -> None:
    """The old version goes on, the error shows the file's own line, and the fixed file loads."""
    # C096
    file = tmp_path / "bad.py"
    file.write_text(ONE.format(answer="good"))
    loader.load(file)
    before, modules = loader.registry.snapshot, loaded_modules()

    file.write_text(text)
    with pytest.raises(ExtensionError) as caught:
        loader.load(file)

    for message in messages:
        assert message in str(caught.value)
    assert "importlib" not in str(caught.value)
    assert "_loader.py" not in str(caught.value)
    assert loader.registry.snapshot is before
    assert loaded_modules() == modules
    assert await ask(loader) == "good"
    file.write_text(ONE.format(answer="fixed"))
    loader.load(file)
    assert await ask(loader) == "fixed"


def test_reloads_leave_nothing_behind(loader: ExtensionLoader, tmp_path: Path) -> None:
    """Modules and the cached source of generated classes go with the version they belong to."""
    # C100
    file = tmp_path / "one.py"

    def reload(number: int) -> tuple[int, int]:
        file.write_text(ONE.format(answer=f"{number}"))
        loader.load(file)
        gc.collect()
        assert loader.registry.run_unloads() == ()
        return len(loaded_modules()), len(linecache.cache)

    # What other tests left in memory is not looked at each time, nor by any later test.
    gc.collect()
    gc.freeze()
    reload(0)
    first = reload(1)
    for number in range(2, 20):
        last = reload(number)

    assert last == first


def test_an_extension_of_a_file_is_unloaded_once(loader: ExtensionLoader, tmp_path: Path) -> None:
    """The file's own on_unload runs, and runs before its module is dropped."""
    file = tmp_path / "one.py"
    file.write_text(
        "import sys\nfrom pidurable.registry import Extension\n"
        "calls = []\n"
        "extension = Extension('one', on_unload=lambda: calls.append(__name__ in sys.modules))\n"
    )
    before = loaded_modules()
    loader.load(file)
    (name,) = loaded_modules() - before
    calls = sys.modules[name].calls

    loader.registry.uninstall("one")
    gc.collect()
    loader.registry.run_unloads()

    assert calls == [True]
    assert name not in sys.modules


def test_modules_and_entry_points_are_found_by_name(
    loader: ExtensionLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is an entry point of the group, or an importable module."""
    loader.load("pidurable.extensions.coding")
    assert loader.registry.snapshot.extensions == ("coding",)
    point = importlib.metadata.EntryPoint(
        "mine", "pidurable.extensions.coding:extension", "pidurable.extensions"
    )
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **kwargs: [point] if kwargs.get("name") in (None, "mine") else [],
    )

    (loaded,) = loader.load("mine")

    assert loaded.name == "coding"
    with pytest.raises(ExtensionError, match=r"no module and no entry point.*mine"):
        loader.load("nothing_of_that_name")
    with pytest.raises(ExtensionError, match="neither `extension`"):
        loader.load("json")


def test_a_path_that_is_not_there_is_named(loader: ExtensionLoader, tmp_path: Path) -> None:
    """A missing file and a folder that is no package are told apart."""
    (tmp_path / "empty").mkdir()

    with pytest.raises(ExtensionError, match="there is no such file"):
        loader.load(tmp_path / "missing.py")
    with pytest.raises(ExtensionError, match=r"no __init__\.py"):
        loader.load(tmp_path / "empty")


@pytest.mark.parametrize("which", ["file", "folder"])
def test_code_that_everybody_may_write_is_not_loaded(
    loader: ExtensionLoader, tmp_path: Path, which: str
) -> None:
    """A file, or its folder, that other users may change is refused before it runs."""
    file = tmp_path / "one.py"
    file.write_text("raise SystemExit('ran')\n")
    (file if which == "file" else tmp_path).chmod(0o777)

    with pytest.raises(ExtensionError, match="may be written by everybody"):
        loader.load(file)


def test_an_exit_out_of_a_file_is_not_swallowed(loader: ExtensionLoader, tmp_path: Path) -> None:
    """SystemExit and KeyboardInterrupt pass, and leave no module behind."""
    file = tmp_path / "one.py"
    file.write_text("raise SystemExit(3)\n")
    before = loaded_modules()

    with pytest.raises(SystemExit):
        loader.load(file)

    assert loaded_modules() == before


def test_an_imported_module_is_no_list_of_extensions(
    loader: ExtensionLoader, tmp_path: Path
) -> None:
    """`from pidurable import extensions` brings a module of that name, which defines nothing."""
    file = tmp_path / "star.py"
    file.write_text("from pidurable import Extension, extensions\nextension = Extension('star')\n")

    loader.load(file)

    assert loader.registry.snapshot.extensions == ("star",)
