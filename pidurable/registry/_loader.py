"""Loading extensions from files, folders, modules and entry points.

A file or folder is compiled from its text, every time, into a module namespace of its own. So two
versions live side by side while old work ends, and stale bytecode is never met: comparing time and
size, as importing does, misses an edit within the same second. Holds at all times:

* A load changes the registry as a whole or not at all. What fails leaves nothing behind in
  `sys.modules`; effects that the file had on the outside (a thread it started) cannot be undone.
* Once a version is out of use, its modules and the cached source of its classes are dropped.

Inside a folder, relative imports (`from ._files import read`) reach the same version; an absolute
import of its own name would reach whatever is installed under that name.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import linecache
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

import attrs

from pidurable.errors import ExtensionError, PidurableError, show
from pidurable.registry._extension import Extension
from pidurable.registry._registry import Registry

__all__ = ["ENTRY_POINT_GROUP", "ExtensionLoader"]

ENTRY_POINT_GROUP = "pidurable.extensions"
_PREFIX = "_pidurable_extension_"
_numbers = itertools.count(1)


@attrs.define(eq=False)
class ExtensionLoader:
    """Loads extensions into a registry, again and again.

    Loading runs the code of the file in this thread: what an import takes long for, it takes here.
    """

    registry: Registry
    _sources: dict[str, tuple[str, ...]] = attrs.field(factory=dict, init=False)
    """What each source defined when it was last loaded."""

    def load(self, source: str | os.PathLike[str]) -> tuple[Extension, ...]:
        """Load what a source defines and install it; on a reload, remove what it defined before.

        Args:
            source: A file `x.py` or a folder with an `__init__.py`; the name of an entry point of
                the group `pidurable.extensions`; or the name of an importable module. It defines
                `extension`, or `extensions` for several.

        Raises:
            ExtensionError: It cannot be found, imported, or installed. Nothing changed. The text
                holds the traceback with the file's own lines.
        """
        name = os.fspath(source)
        found = self._find_path(source)
        module_name: str | None = None
        if found is not None:
            module_name = f"{_PREFIX}{next(_numbers)}_{_identifier(found.stem)}"
            key, extensions = str(found), _load_path(found, module_name)
        else:
            key, extensions = name, _load_name(name)
        try:
            if module_name is not None:
                extensions = _forget_after(extensions, module_name)
            before = self._sources.get(key, ())
            self.registry.replace(install=extensions, remove=before)
        except BaseException:
            if module_name is not None:
                _forget(module_name)
            raise
        self._sources[key] = tuple(extension.name for extension in extensions)
        return extensions

    def _find_path(self, source: str | os.PathLike[str]) -> Path | None:
        """Return the file to compile, or None if the source is a name."""
        text = os.fspath(source)
        path = Path(os.path.abspath(text))
        looks_like_path = isinstance(source, os.PathLike) or os.sep in text or path.suffix == ".py"
        if not looks_like_path:
            return None
        if path.is_dir():
            if not (path / "__init__.py").is_file():
                raise ExtensionError(
                    text, "the folder has no __init__.py", "Add one, or name the file."
                )
        elif not path.is_file():
            raise ExtensionError(text, "there is no such file or folder", "Check the path.")
        _check_trusted(path, text)
        return path


def _check_trusted(path: Path, text: str) -> None:
    """Refuse code that another user of the machine could have written."""
    for place in (path, path / "__init__.py" if path.is_dir() else path, path.parent):
        info = place.stat()
        # In a sticky folder (/tmp) others can add files, but not replace this one.
        open_to_all = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
        if open_to_all or (place != path.parent and info.st_uid not in (os.getuid(), 0)):
            raise ExtensionError(
                text,
                f"{place} belongs to another user or may be written by everybody",
                "Take that right away (chmod o-w) or copy the extension to a folder of yours.",
            )


def _load_path(path: Path, module_name: str) -> tuple[Extension, ...]:
    _install_finder()
    file = path / "__init__.py" if path.is_dir() else path
    spec = _spec(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except Exception as error:
        _forget(module_name)
        raise ExtensionError(
            str(path), f"it could not be loaded:\n{_own_traceback(error, file.parent)}"
        ) from error
    except BaseException:
        _forget(module_name)
        raise
    try:
        return _extensions_of(module, str(path))
    except ExtensionError:
        _forget(module_name)
        raise


def _load_name(name: str) -> tuple[Extension, ...]:
    """Load an entry point or module of an installed package, by ordinary import."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
    try:
        for point in points:
            loaded = point.load()
            if isinstance(loaded, ModuleType):
                return _extensions_of(loaded, name)
            return _as_extensions(loaded, name, f"the entry point {point.value}")
        return _extensions_of(importlib.import_module(name), name)
    except PidurableError:
        raise
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        if missing:
            known = sorted(
                point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
            )
            raise ExtensionError(
                name,
                "there is no module and no entry point of that name",
                f"Entry points are: {', '.join(known) or 'none'}. A path needs a `/` or `.py`.",
            ) from error
        raise ExtensionError(
            name, f"it could not be loaded:\n{_own_traceback(error, None)}"
        ) from error


def _extensions_of(module: ModuleType, name: str) -> tuple[Extension, ...]:
    one, several = (getattr(module, each, None) for each in ("extension", "extensions"))
    if isinstance(several, ModuleType):
        # It came by an import, as of `pidurable.extensions`.
        several = None
    if (one is None) == (several is None):
        raise ExtensionError(
            name,
            "it defines neither `extension` nor `extensions`"
            if one is None
            else "it defines both `extension` and `extensions`",
            "Write `extension = Extension(...)`, or `extensions = [...]` for several.",
        )
    if one is not None:
        return _as_extensions(one, name, "`extension`")
    return _as_extensions(several, name, "`extensions`")


def _as_extensions(value: object, name: str, what: str) -> tuple[Extension, ...]:
    several: list[Extension] = []
    for extension in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(extension, Extension):
            raise ExtensionError(
                name, f"{what} is or holds {show(extension)}", "Give objects of Extension."
            )
        several.append(extension)
    names = [extension.name for extension in several]
    if len(set(names)) != len(names):
        raise ExtensionError(name, f"{what} holds two of one name: {names}", "Rename one.")
    return tuple(several)


def _own_traceback(error: Exception, folder: Path | None) -> str:
    """Render a traceback from the extension's first line on, without the machinery of importing."""
    linecache.checkcache()
    full = traceback.TracebackException.from_exception(error)
    if folder is not None:
        inside = f"{folder}{os.sep}"
        for index, frame in enumerate(full.stack):
            if frame.filename.startswith(inside):
                full.stack[:] = full.stack[index:]
                break
        else:
            full.stack[:] = []  # A syntax error: it names file and line itself.
    return "".join(full.format(chain=False)).rstrip()


def _forget_after(extensions: tuple[Extension, ...], module_name: str) -> tuple[Extension, ...]:
    """Make the modules of a load go when the last of its extensions went out of use."""
    left = len(extensions)

    def unload(own: Callable[[], object] | None) -> Callable[[], object]:
        def on_unload() -> None:
            nonlocal left
            try:
                if own is not None:
                    own()
            finally:
                left -= 1
                if left == 0:
                    _forget(module_name)

        return on_unload

    return tuple(
        attrs.evolve(extension, on_unload=unload(extension.on_unload)) for extension in extensions
    )


def _forget(module_name: str) -> None:
    """Drop the modules of a load, and the source that attrs keeps of each generated class."""
    for name in [name for name in sys.modules if _belongs(name, module_name)]:
        del sys.modules[name]
    marks = (f" {module_name}.", f"<{module_name}")
    for filename in list(linecache.cache):
        if filename.startswith("<") and any(mark in filename for mark in marks):
            del linecache.cache[filename]


def _belongs(name: str, module_name: str) -> bool:
    return name == module_name or name.startswith(f"{module_name}.")


def _identifier(stem: str) -> str:
    return "".join(char if char.isalnum() and char.isascii() else "_" for char in stem)


class _TextLoader(importlib.machinery.SourceFileLoader):
    """Compiles the text that is there now; reads and writes no bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)


def _spec(name: str, file: Path) -> importlib.machinery.ModuleSpec:
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(
        name, file, loader=_TextLoader(name, str(file)), submodule_search_locations=folders
    )
    assert spec is not None
    return spec


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules inside of a loaded folder, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PREFIX) or path is None:
            return None
        stem = fullname.rpartition(".")[2]
        for file in _candidates(path, stem):
            if file.is_file():
                return _spec(fullname, file)
        return None


def _candidates(folders: Iterable[str], stem: str) -> Iterable[Path]:
    for folder in folders:
        yield Path(folder, stem, "__init__.py")
        yield Path(folder, f"{stem}.py")


def _install_finder() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
