"""The registry: what is installed in this process, published as one immutable snapshot at a time.

Holds at all times:

* What is published is valid as a whole. A change is checked as it would be, first; if it is not
  valid, `ExtensionError` says what and where, and nothing changes.
* A publication is one assignment. Whoever took the snapshot before goes on with it.
* Publication itself runs no code of an extension; it tells the subscribers, which kick schedulers.
* `on_unload` of a version runs once, and only after the last snapshot, tool, section or hook of it
  was let go: when `run_unloads` is called, never out of the garbage collector.

A registry belongs to one thread, the one that runs trio.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import attrs

from pidurable.errors import DefinitionError, ExtensionError, NotJsonError
from pidurable.records._codec import Codec
from pidurable.registry._extension import CodecPair, Extension
from pidurable.registry._snapshot import (
    Installed,
    RegistrySnapshot,
    freeze,
    install_parts,
)
from pidurable.tasks._definition import Task, definition_info

__all__ = ["Registry"]

BUILT_IN = "pi"
_RESERVED_KINDS = {"pi.": BUILT_IN, "taskrun.": "taskrun"}
"""Prefixes of task kinds, each with the one extension that may use it."""


@attrs.define(eq=False, init=False)
class Registry:
    """What is installed in this process. One registry may serve several harnesses."""

    _snapshot: RegistrySnapshot
    _installed: tuple[Installed, ...]
    _subscribers: list[Callable[[], object]]
    _unloads: deque[Callable[[], object]]

    def __init__(self) -> None:
        self._installed = ()
        self._subscribers = []
        self._unloads = deque()
        self._snapshot = _validate((), version=0)

    @property
    def snapshot(self) -> RegistrySnapshot:
        """What is installed now; it never changes, a publication makes another one."""
        return self._snapshot

    def install(self, extension: Extension, *, _built_in: bool = False) -> None:
        """Install an extension: in its place if its name is installed, else at the end.

        Work that runs keeps the code it took; new code takes over at the next safe point.

        Args:
            extension: The extension.

        Raises:
            ExtensionError: It is not valid, or does not fit with the others. Nothing changed.
            MissingExtraError: It has tools, and the extra `agent` is not installed.
        """
        if not isinstance(extension, Extension):
            name = type(extension).__name__
            parts = f"'shop', tasks=[{name}(...)]" if isinstance(extension, Task) else "name, ..."
            raise ExtensionError(name, "it is not an Extension", f"Write Extension({parts}).")
        if extension.name == BUILT_IN and not _built_in:
            raise ExtensionError(extension.name, "the name is reserved", "Choose another name.")
        self.replace(install=[extension])

    def uninstall(self, name: str) -> None:
        """Remove an extension. Work that runs keeps the code it took.

        Tasks of its kinds are blocked with `missing_definition` when they would run next.

        Raises:
            ExtensionError: Nothing of that name is installed.
        """
        if name not in self._snapshot.extensions or name == BUILT_IN:
            known = ", ".join(each for each in self._snapshot.extensions if each != BUILT_IN)
            raise ExtensionError(name, "it is not installed", f"Installed are: {known or 'none'}.")
        self.replace(remove=[name])

    def replace(self, *, install: Iterable[Extension] = (), remove: Iterable[str] = ()) -> None:
        """Remove and install several extensions in one publication: all of it, or nothing.

        Args:
            install: Each takes the place of the installed one of its name, or the end.
            remove: Names; one that is not installed, or is in `install`, is left alone.

        Raises:
            ExtensionError: The whole would not be valid. Nothing changed.
        """
        new: dict[str, Extension] = {}
        for extension in install:
            if extension.name in new:
                raise ExtensionError(
                    extension.name, "it is to be installed twice at once", "Rename one of the two."
                )
            new[extension.name] = extension
        gone = set(remove) - new.keys()
        parts: list[Installed] = []
        for part in self._installed:
            name = part.extension.name
            if name in new:
                parts.append(install_parts(new.pop(name)))
            elif name not in gone:
                parts.append(part)
        parts.extend(install_parts(extension) for extension in new.values())
        snapshot = _validate(tuple(parts), version=self._snapshot.version + 1)
        self._publish(tuple(parts), snapshot)

    def _publish(self, parts: tuple[Installed, ...], snapshot: RegistrySnapshot) -> None:
        before = {part.anchor for part in self._installed}
        self._installed, self._snapshot = parts, snapshot
        for part in parts:
            on_unload = part.extension.on_unload
            if part.anchor not in before and on_unload is not None:
                # The finalizer only queues: the garbage collector is no place to run code in.
                finalizer = weakref.finalize(part.anchor, self._unloads.append, on_unload)
                finalizer.atexit = False
        for callback in tuple(self._subscribers):
            callback()

    def subscribe(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` after every publication, in the publishing thread; it must not raise.

        Returns:
            A function that ends the subscription; calling it again does nothing.
        """
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def run_unloads(self) -> tuple[Exception, ...]:
        """Run `on_unload` of every version that went out of use since the last call.

        A harness calls it when it is idle and when it closes. What they raise is returned, for the
        report; one that raises does not keep the others from running.
        """
        errors = []
        while self._unloads:
            on_unload = self._unloads.popleft()
            try:
                on_unload()
            except Exception as error:
                errors.append(error)
        return tuple(errors)


def _validate(parts: tuple[Installed, ...], *, version: int) -> RegistrySnapshot:
    """Check the registry as it would be and return its snapshot."""
    codec = Codec(_merge_codecs(parts))
    definitions: dict[str, Task[Any, Any, Any]] = {}
    origin: dict[str, str] = {}
    for part in parts:
        extension = part.extension
        _check_names_once(extension)
        for tool in part.tools:
            tool.build()
        for task in extension.tasks:
            kind = _check_task(extension.name, task, codec)
            if kind in definitions:
                _refuse_kind(extension.name, task, definitions[kind], origin[kind])
            definitions[kind], origin[kind] = task, extension.name
    snapshot = RegistrySnapshot(
        version=version, codec=codec, definitions=freeze(definitions), installed=parts
    )
    for tool in snapshot.tools():  # A wrapper may have made another schema.
        tool.build()
    snapshot.sections()
    return snapshot


def _refuse_kind(
    extension: str, task: Task[Any, Any, Any], other: Task[Any, Any, Any], origin: str
) -> NoReturn:
    """Two definitions of one kind: a stored task would not know which of them is its own."""
    kind = definition_info(task).name
    one, two = type(other).__name__, type(task).__name__
    if origin != extension:
        raise ExtensionError(
            extension,
            f"its {two} defines the task kind {kind!r}, as {one} of the extension {origin!r} does",
            "Task kinds are unique; give it another `name`, or uninstall the other extension.",
        )
    if one == two:
        raise ExtensionError(
            extension, f"it has the task {two} ({kind!r}) twice", "Remove one of them."
        )
    raise ExtensionError(
        extension,
        f"{one} and {two} both define the task kind {kind!r}",
        "Task kinds are unique; give one of them another `name`.",
    )


def _merge_codecs(parts: tuple[Installed, ...]) -> dict[type, CodecPair]:
    codecs: dict[type, CodecPair] = {}
    origin: dict[type, str] = {}
    for part in parts:
        for type_, pair in part.extension.codecs.items():
            if type_ in codecs:
                raise ExtensionError(
                    part.extension.name,
                    f"it has a codec for {type_.__name__}, as {origin[type_]!r} has",
                    "One type has one form in a store; remove one of them.",
                )
            codecs[type_], origin[type_] = pair, part.extension.name
    return codecs


def _check_names_once(extension: Extension) -> None:
    """Within one extension, nothing may hide something else."""
    for what, names in (
        ("tool", [tool.name for tool in extension.tools]),
        ("section", [section.key for section in extension.sections]),
        ("hook", [f"{hook.kind}.{name}" for hook in extension.hooks for name in hook.handlers]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ExtensionError(
                extension.name, f"it has the {what} {twice[0]!r} twice", "Rename one of them."
            )


def _check_task(extension: str, task: Task[Any, Any, Any], codec: Codec) -> str:
    """Check that a definition may be installed and its values stored; return its kind."""
    try:
        info = definition_info(task)
    except DefinitionError as error:
        problem = f"a task is not well formed: {error.definition}: {error.problem}"
        raise ExtensionError(extension, problem, error.remedy) from error
    for prefix, allowed in _RESERVED_KINDS.items():
        if info.name.startswith(prefix) and extension != allowed:
            raise ExtensionError(
                extension,
                f"the task kind {info.name!r} begins with {prefix!r}, which is reserved",
                "Choose another name.",
            )
    cls = type(task).__name__
    checked = [("input", info.input_type), ("result", info.result_type)]
    checked += [(f"checkpoint {member.__name__}", member) for member in info.checkpoint_types]
    for what, type_ in checked:
        try:
            codec.check_type(type_, what=f"{cls} {what}")
        except NotJsonError as error:
            remedy = "Use records of plain values, or give the extension a codec for the type."
            if "cannot be read" in error.problem:
                remedy = (
                    "Define or import that name at the top of the module, where it can be found: "
                    "not in a function, and not below TYPE_CHECKING."
                )
            raise ExtensionError(
                extension,
                f"the {what} of the task {info.name!r} cannot be stored: {error}",
                remedy,
            ) from error
    return info.name
