"""The strict provider stands behind every test: what it refuses unplanned fails the test.

Every request that the scripted model or the strict server judges is counted, and every refusal is
told, in this process and in all that it starts. A test that plans a refusal says so with
`@pytest.mark.refuses`; to refuse is what the checks of the provider themselves are tested for.
Processes find this module by `sitecustomize` beside it, and write to the file that the environment
names; so nothing of the product knows that it is watched.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "STRICT_GUARD"
"""Names the file to which every judgement is a line: `ok`, or why it was refused."""
FOLDER = str(Path(__file__).parent)


def tell(refusal: object) -> None:
    """Note one judgement; a line of less than a page is never torn."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    line = "ok" if refusal is None else " ".join(ascii(str(refusal)).split())[:2000]
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def _watch_scripted(module: ModuleType) -> None:
    inner = module._refusal

    def refusal(request: Any) -> Any:
        found = inner(request)
        tell(found)
        return found

    module._refusal = refusal  # type: ignore[attr-defined]


def _watch_server(module: ModuleType) -> None:
    inner = module.check_chat_body

    def check_chat_body(body: Any) -> None:
        try:
            inner(body)
        except Exception as refused:
            tell(refused)
            raise
        tell(None)

    module.check_chat_body = check_chat_body  # type: ignore[attr-defined]


WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "pidurable.agent._scripted": _watch_scripted,
    "pidurable.testing._strict_server": _watch_server,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Puts the watch into the two modules that judge, when they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        watch = WATCHED.get(fullname)
        if watch is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            inner = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                inner(module)
                watch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Watch what judges requests in this process, from its import on; once."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        assert not any(name in sys.modules for name in WATCHED)
        sys.meta_path.insert(0, _Finder())


def verdict(refused: Sequence[str], *, planned: bool) -> str | None:
    """What is wrong with a test whose providers refused these requests."""
    if planned and not refused:
        return "it plans that a request is refused, and none was"
    if refused and not planned:
        return f"a strict provider refused {len(refused)} requests: {refused[0]}"
    return None


def inherited_path() -> str:
    """What PYTHONPATH must begin with, so that a process is watched."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([FOLDER, *(part for part in given.split(os.pathsep) if part)])
