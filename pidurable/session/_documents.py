"""Documents: typed mutable JSON state beside the transcript, stored as bases and deltas.

A document lives at an address: (name, scope, scope id, key). Its committed value is immutable JSON
that shares structure with its predecessor. A change is a list of patch operations; a whole base
is written at creation, on a version change, and when the deltas since the last base are more than
`DELTAS_MAX` or larger than the base, so that reading replays a bounded tail. `latest` documents
drop what is before their newest base; `rewindable` ones keep everything for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import attrs

from pidurable.errors import (
    DocumentTooLargeError,
    DocumentTooNewError,
    InvalidArgumentError,
    MigrationError,
)
from pidurable.records import _json, _patch
from pidurable.records._limits import DELTA_BYTES_MIN, DELTAS_MAX, Settings
from pidurable.session._seams import logger
from pidurable.storage import DocumentRow, Op, RevisionRow, Storage

DocT = TypeVar("DocT")

Scope = Literal["session", "conversation", "task"]
SCOPES: dict[str, int] = {"session": 0, "conversation": 1, "task": 2}


@attrs.frozen(kw_only=True)
class DocumentDefinition:
    """What `@document` says of a class."""

    cls: type
    name: str
    version: int
    scope: Scope
    history: Literal["latest", "rewindable"]
    fork: Literal["initial", "current", "as_of"]
    family: bool


def document(
    name: str,
    *,
    version: int = 1,
    scope: Scope = "conversation",
    history: Literal["latest", "rewindable"] = "latest",
    fork: Literal["initial", "current", "as_of"] = "initial",
    family: bool = False,
) -> Callable[[type[DocT]], type[DocT]]:
    """Declare a mutable attrs class as a document.

    Args:
        name: Stored name, dotted, unique over the program.
        version: One more at every change of the stored shape; older values pass through the
            class's static `migrate(value, from_version)` on access.
        scope: What an instance belongs to. A task's documents end with the task.
        history: `rewindable` keeps the value at every past entry readable (conversations only).
        fork: What a fork starts with: nothing, the parent's value now, or as of the fork entry
            (which needs `rewindable`).
        family: One instance per string key instead of one.
    """
    if history == "rewindable" and scope != "conversation":
        raise InvalidArgumentError("history", "only conversation documents can be rewindable")
    if fork == "as_of" and history != "rewindable":
        raise InvalidArgumentError("fork", "as_of needs history='rewindable'")
    if version < 1:
        raise InvalidArgumentError("version", "expected at least 1", repr(version))

    def declare(cls: type[DocT]) -> type[DocT]:
        cls.__pidurable_document__ = DocumentDefinition(  # type: ignore[attr-defined]
            cls=cls,
            name=name,
            version=version,
            scope=scope,
            history=history,
            fork=fork,
            family=family,
        )
        return cls

    return declare


def definition_of(cls: type) -> DocumentDefinition:
    """The declaration of a document class."""
    found = cls.__dict__.get("__pidurable_document__")
    if not isinstance(found, DocumentDefinition):
        raise InvalidArgumentError(
            cls.__name__, "is not a document class; declare it with @document(name)"
        )
    return found


class Address(NamedTuple):
    name: str
    scope: int
    scope_id: int
    key: str


@attrs.frozen
class DocState:
    """A document as committed (or staged): its value and where its stored tail stands."""

    id: int
    address: Address
    version: int
    history: str
    fork: str
    value: Any
    base_bytes: int
    delta_bytes: int
    deltas: int


class DocChange(NamedTuple):
    """One document changed by a commit. `after` is None when it was retired."""

    address: Address
    before: Any
    after: Any
    ops: list[Any]


def load(storage: Storage, address: Address) -> DocState | None:
    """Read a document from the storage: its newest base and the deltas behind it."""
    row = storage.document(*address)
    if row is None:
        return None
    return materialise(row, address, storage.revisions(row.id))


def materialise(row: DocumentRow, address: Address, revisions: list[RevisionRow]) -> DocState:
    """Replay revisions, a base first."""
    value: Any = None
    base_bytes = delta_bytes = deltas = 0
    version = 1
    for revision in revisions:
        parsed = _json.loads_stored(revision.value)
        version = revision.version
        if revision.base:
            value = parsed
            base_bytes = len(revision.value)
            delta_bytes = deltas = 0
        else:
            value = _patch.apply(value, parsed)
            delta_bytes += len(revision.value)
            deltas += 1
    return DocState(
        row.id, address, version, row.history, row.fork, value, base_bytes, delta_bytes, deltas
    )


def create(
    id: int, address: Address, definition: DocumentDefinition, value: Any, seq: int
) -> tuple[DocState, list[tuple[Op, tuple[Any, ...]]]]:
    """A new document with its first base."""
    text = _json.dumps(value)
    state = DocState(
        id,
        address,
        definition.version,
        definition.history,
        definition.fork,
        value,
        len(text),
        0,
        0,
    )
    row = DocumentRow(
        id,
        address.name,
        address.scope,
        address.scope_id,
        address.key,
        state.history,
        state.fork,
        seq,
    )
    return state, [
        (Op.DOCUMENT, row),
        (Op.REVISION, RevisionRow(id, seq, 1, definition.version, text)),
    ]


def change(
    state: DocState, ops: list[Any], value: Any, *, version: int, seq: int, settings: Settings
) -> tuple[DocState, list[tuple[Op, tuple[Any, ...]]]]:
    """The document after `ops`, which made `value` of it, and the rows that store the step."""
    text = _json.dumps(ops, path=f"$<{state.address.name}>")
    delta_bytes = state.delta_bytes + len(text)
    deltas = state.deltas + 1
    if (
        version == state.version
        and deltas <= DELTAS_MAX
        and delta_bytes <= max(state.base_bytes, DELTA_BYTES_MIN)
    ):
        # A lower bound of the size is enough here: the next base measures it exactly.
        _check_size(state, state.base_bytes + delta_bytes, settings, exact=False, value=value)
        after = attrs.evolve(state, value=value, delta_bytes=delta_bytes, deltas=deltas)
        return after, [(Op.REVISION, RevisionRow(state.id, seq, 0, version, text))]
    base = _json.dumps(value)
    _check_size(state, len(base), settings, exact=True, value=value)
    after = attrs.evolve(
        state, value=value, version=version, base_bytes=len(base), delta_bytes=0, deltas=0
    )
    rows: list[tuple[Op, tuple[Any, ...]]] = [
        (Op.REVISION, RevisionRow(state.id, seq, 1, version, base))
    ]
    if state.history == "latest":
        rows.append((Op.REVISIONS_DELETE, (state.id, seq)))
    return after, rows


def _check_size(state: DocState, size: int, settings: Settings, *, exact: bool, value: Any) -> None:
    if size > settings.document_bytes_max:
        actual = size if exact else len(_json.dumps(value))
        if actual > settings.document_bytes_max:
            raise DocumentTooLargeError(state.address.name, actual, settings.document_bytes_max)
    elif exact and size > settings.document_report_bytes >= state.base_bytes:
        logger.warning("document %s has grown to %d bytes", state.address.name, size)


def migrated(definition: DocumentDefinition, state: DocState) -> Any:
    """The committed JSON in today's shape."""
    if state.version == definition.version:
        return state.value
    if state.version > definition.version:
        raise DocumentTooNewError(definition.name, state.version, definition.version)
    migrate = getattr(definition.cls, "migrate", None)
    if migrate is None:
        raise MigrationError(
            f"document {definition.name!r}",
            f"it has version {state.version} and {definition.cls.__name__} has no migrate()",
        )
    try:
        return migrate(copy.deepcopy(state.value), state.version)
    except Exception as error:
        raise MigrationError(f"document {definition.name!r}", str(error)) from error
