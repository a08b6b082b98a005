"""The documents of the histories: every scope, history, fork policy and family, in three versions.

The versions of one name are classes side by side, as a reloaded program has them. A migration loses
nothing, so that a change of the stored value is a change of every shape that it is shown in.
"""

from __future__ import annotations

import copy
from typing import Any

import attrs

from pidurable.agent._documents import AgentDocument
from pidurable.session._documents import document

VERSIONS = 3


@attrs.frozen(kw_only=True)
class Kind:
    """What the histories know of a document name: what `@document` is told, and its classes."""

    name: str
    scope: str = "conversation"
    history: str = "latest"
    forks: tuple[str, ...] = ("initial",) * VERSIONS
    """The fork policy of each version's class: what is written goes by that of its writer."""
    family: bool = False
    classes: tuple[type, ...] = ()
    """By version, the first is version 1."""

    @property
    def newest(self) -> int:
        """Its newest version."""
        return len(self.classes)

    @property
    def rewindable(self) -> bool:
        return self.history == "rewindable"


def initial(version: int) -> dict[str, Any]:
    """What a new document of a version holds."""
    return [
        {"value": None, "log": []},
        {"body": None, "log": [], "seen": []},
        {"body": None, "log": {"lines": []}, "seen": []},
    ][version - 1]


def body_name(version: int) -> str:
    return "value" if version == 1 else "body"


def log_pointer(version: int) -> str:
    return "/log" if version < 3 else "/log/lines"


def log_of(value: dict[str, Any], version: int) -> list[str]:
    log: Any = value["log"] if version < 3 else value["log"]["lines"]
    return log


def migrated(value: dict[str, Any], version: int, wanted: int) -> dict[str, Any]:
    """The same document as a later version holds it."""
    value = copy.deepcopy(value)
    first = version
    if version == 1 and wanted > 1:
        value = {"body": value["value"], "log": value["log"], "seen": []}
        version = 2
    if version == 2 and wanted > 2:
        value["log"] = {"lines": value["log"]}
    if wanted > first:
        value["seen"] = [*value["seen"], first]
    return value


def _lines() -> dict[str, Any]:
    return {"lines": []}


def _kind(name: str, *forks: str, **options: Any) -> Kind:
    """A document in all its versions; `forks` are their policies, one for all or one for each."""
    policies = forks if len(forks) == VERSIONS else forks * VERSIONS or ("initial",) * VERSIONS

    def migrate_second(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        # In place, as many would write it: what is stored must not notice.
        value["body"] = value.pop("value")
        value["seen"] = [from_version]
        return value

    def migrate_third(value: dict[str, Any], from_version: int) -> dict[str, Any]:
        if from_version == 1:
            value = {"body": value["value"], "log": value["log"], "seen": []}
        value["log"] = {"lines": value["log"]}
        value["seen"].append(from_version)
        return value

    @attrs.define
    class First:
        value: Any = None
        log: list[str] = attrs.Factory(list)

    @attrs.define
    class Second:
        body: Any = None
        log: list[str] = attrs.Factory(list)
        seen: list[int] = attrs.Factory(list)
        migrate = staticmethod(migrate_second)

    @attrs.define
    class Third:
        body: Any = None
        log: dict[str, list[str]] = attrs.Factory(_lines)
        seen: list[int] = attrs.Factory(list)
        migrate = staticmethod(migrate_third)

    classes = tuple(
        document(f"histories.{name}", version=number, fork=policies[number - 1], **options)(cls)
        for number, cls in enumerate((First, Second, Third), start=1)
    )
    return Kind(name=f"histories.{name}", classes=classes, forks=policies, **options)


KINDS = (
    _kind("page", "as_of", history="rewindable"),
    _kind("note", "current", "as_of", "current", history="rewindable"),
    _kind("slate", "initial", history="rewindable"),
    _kind("part", "as_of", "as_of", "initial", history="rewindable", family=True),
    _kind("todo", "current", family=True),
    _kind("flag", "initial", "current", "initial"),
    _kind("total", scope="session"),
    _kind("desk", scope="task", family=True),
)
FAMILY_KEYS = ("one", "two/three")
AGENT = Kind(name="pi.agent", history="rewindable", forks=("as_of",), classes=(AgentDocument,))
"""One of the product's own, which a conversation's view shows; of one version."""
AGENT_FIELDS = ("model", "thinking", "extensions", "tools", "instructions", "cwd", "turns_max")
ALL_KINDS = (*KINDS, AGENT)
BY_NAME = {kind.name: kind for kind in ALL_KINDS}


def plain(value: Any) -> Any:
    """A document of any of the classes as the JSON that it stands for; None stays None."""
    return None if value is None else attrs.asdict(value)
