"""Documents: typed mutable JSON state beside the transcript, stored as bases and deltas.

A document lives at an address: (name, scope, scope id, key). Its committed value is immutable JSON
that shares structure with its predecessor. A change is a list of patch operations; a whole base
is written at creation, on a version change, and when the deltas since the last base would be more
than `DELTAS_MAX` or larger than the base, so that reading replays a bounded tail. `latest`
documents drop what is before their newest base; `rewindable` ones keep everything for ever.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import attrs

from pidurable.errors import (
    DocumentTooLargeError,
    DocumentTooNewError,
    InvalidArgumentError,
    MigrationError,
    NotFoundError,
    NotJsonError,
    StorageCorruptError,
    show,
)
from pidurable.records import _json, _patch
from pidurable.records._checks import check_name, is_id
from pidurable.records._limits import DELTA_BYTES_MIN, DELTAS_MAX, Settings
from pidurable.session._grown import plain
from pidurable.session._seams import logger
from pidurable.storage import DocumentRow, Op, RevisionRow, Storage

DocT = TypeVar("DocT")

Scope = Literal["session", "conversation", "task"]
SCOPES: dict[str, int] = {"session": 0, "conversation": 1, "task": 2}


class Terms(NamedTuple):
    """What is stored beside a value, so that it can be kept and forked without its class."""

    version: int
    history: str
    fork: str


def _terms_of(definition: DocumentDefinition) -> Terms:
    return Terms(definition.version, definition.history, definition.fork)


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

    terms: Terms = attrs.field(init=False, default=attrs.Factory(_terms_of, takes_self=True))
    """What a document is stored with that this class writes."""


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

    The version, history and fork policy are stored beside the value, so that documents are kept,
    rewound and forked without their class. A new history or fork policy counts for a document from
    its next change on: what was not kept until then stays lost. Under another name or scope, or as
    a family, it is another document.

    Args:
        name: Stored name, dotted, unique over the program.
        version: One more at every change of the stored shape; older values pass through the
            class's static `migrate(value, from_version)` on access.
        scope: What an instance belongs to. A task's documents end with the task.
        history: `latest` keeps what is needed to read the value of now; `rewindable` keeps the
            value at every past entry readable, for ever (conversations only).
        fork: What a fork starts with: nothing, the parent's value now, or as of the fork entry
            (which needs `rewindable`).
        family: One instance per string key instead of one.

    Raises:
        InvalidArgumentError: An argument is none of these, two of them do not go together, or the
            class is neither an attrs class nor a dataclass: `@document` stands above what makes it
            one.
    """
    name = check_name(name, "name")
    for argument, value, choices in (
        ("scope", scope, tuple(SCOPES)),
        ("history", history, ("latest", "rewindable")),
        ("fork", fork, ("initial", "current", "as_of")),
    ):
        if value not in choices:
            raise InvalidArgumentError(
                argument, f"expected one of {', '.join(choices)}", show(value)
            )
    if history == "rewindable" and scope != "conversation":
        raise InvalidArgumentError("history", "only conversation documents can be rewindable")
    if fork == "as_of" and history != "rewindable":
        raise InvalidArgumentError("fork", "as_of needs history='rewindable'")
    if type(version) is not int or not 0 < version < 2**63:
        raise InvalidArgumentError("version", "expected an int of at least 1", show(version))

    def declare(cls: type[DocT]) -> type[DocT]:
        if not _has_fields(cls):
            raise InvalidArgumentError(
                name,
                "its class is neither an attrs class nor a dataclass; put @document(...) above "
                "@attrs.define",
                show(cls),
            )
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


def _has_fields(cls: Any) -> bool:
    return isinstance(cls, type) and (attrs.has(cls) or dataclasses.is_dataclass(cls))


def definition_of(cls: type) -> DocumentDefinition:
    """The declaration of a document class."""
    found = vars(cls).get("__pidurable_document__") if isinstance(cls, type) else None
    if not isinstance(found, DocumentDefinition):
        raise InvalidArgumentError(
            getattr(cls, "__name__", "cls"),
            "is not a document class; declare it with @document(name)",
            "" if isinstance(cls, type) else show(cls),
        )
    return found


class Address(NamedTuple):
    """Where a document lives. At most one living document is at an address."""

    name: str
    scope: int
    scope_id: int
    key: str


class DocState(NamedTuple):
    """A document as committed (or staged): its value and where its stored tail stands."""

    id: int
    address: Address
    terms: Terms
    """What it is stored with."""
    held: Any
    """The value, or what it has grown to."""
    base_bytes: int
    delta_bytes: int
    deltas: int
    bytes_bound: int
    """The value takes at most so many bytes: its size when it was last measured, and what was added
    to it since."""
    drafted_by: DocumentDefinition | None = None
    """Whose class has written the whole value in this process, so that reading it and writing it
    again gives the same JSON; None where that is not known."""

    @property
    def value(self) -> Any:
        """The value as JSON, which must not be changed."""
        return plain(self.held)

    @property
    def version(self) -> int:
        """The version of the class that wrote it."""
        return self.terms.version

    @property
    def history(self) -> str:
        """Whether its past is kept."""
        return self.terms.history

    @property
    def fork(self) -> str:
        """What a fork does with it."""
        return self.terms.fork


class DocChange(NamedTuple):
    """One document changed by a commit: what it held before and after, or None for nothing."""

    address: Address
    held_before: Any
    held_after: Any
    ops: list[Any]

    @property
    def before(self) -> Any:
        """The value before; None where the document is new."""
        return plain(self.held_before)

    @property
    def after(self) -> Any:
        """The value after; None when it was retired."""
        return plain(self.held_after)


def address(definition: DocumentDefinition, scope_id: int, key: str = "") -> Address:
    """The address of an instance of a document class.

    Raises:
        InvalidArgumentError: A family needs a key, other documents take none.
    """
    if definition.family:
        key = check_name(key, "key")
    elif type(key) is not str or key:
        raise InvalidArgumentError("key", "only a family of documents takes a key", show(key))
    if definition.scope == "session":
        scope_id = 0
    return Address(definition.name, SCOPES[definition.scope], scope_id, key)


def readable_address(definition: DocumentDefinition, scope_id: int, key: str) -> Address:
    """The address that somebody outside of a commit asks for.

    Raises:
        InvalidArgumentError: The scope id is no id, or a key is missing or not wanted.
    """
    if definition.scope != "session" and not is_id(scope_id):
        problem = f"document {definition.name!r} belongs to a {definition.scope}; give its id"
        raise InvalidArgumentError("scope_id", problem, show(scope_id))
    return address(definition, scope_id, key)


def missing(address: Address, hint: str = "") -> NotFoundError:
    """The error that says that no document stands at an address."""
    scope = next(name for name, number in SCOPES.items() if number == address.scope)
    place = "this session" if scope == "session" else f"{scope} {address.scope_id}"
    key = f" under key {show(address.key)}" if address.key else ""
    return NotFoundError("document", f"{address.name}{key}", hint, place=place)


def check_rewindable(definition: DocumentDefinition) -> None:
    """Refuse to look into the past of a document that does not keep it."""
    if definition.history != "rewindable":
        raise InvalidArgumentError(
            definition.cls.__name__, "only a document with history='rewindable' has a past"
        )


def load(storage: Storage, address: Address) -> DocState | None:
    """Read a document from the storage: its newest base and the deltas behind it."""
    row = storage.document(*address)
    if row is None:
        return None
    return _materialised(storage, row, address, storage.revisions(row.id))


def load_as_of(storage: Storage, address: Address, seq: int, *, moment: str) -> DocState | None:
    """Read a document of a conversation as it was after a commit; None if none was there then.

    Args:
        moment: What a message calls the commit.

    Raises:
        NotFoundError: It was there, and what it held was not kept: it was not rewindable then.
    """
    row = storage.document_as_of(address.scope_id, address.name, address.key, seq=seq)
    if row is None:
        return None
    revisions = storage.revisions(row.id, upto_seq=seq)
    if not revisions and storage.revisions(row.id):
        raise NotFoundError(
            "past value",
            f"of document {row.name!r} as of {moment}",
            f"Document {row.id} (conversation {row.scope_id}) was written with history='latest' "
            "then, which keeps no past; what has been written since its class says 'rewindable' "
            "can be read.",
        )
    return _materialised(storage, row, address, revisions)


def _materialised(
    storage: Storage, row: DocumentRow, address: Address, revisions: list[RevisionRow]
) -> DocState:
    try:
        return materialise(row, address, revisions)
    except NotJsonError as error:
        scope = ("the session", f"conversation {row.scope_id}", f"task {row.scope_id}")[row.scope]
        raise StorageCorruptError(
            storage.store,
            f"document {row.id}, {address.name!r} of {scope}, cannot be read: {error}",
        ) from error


def materialise(row: DocumentRow, address: Address, revisions: list[RevisionRow]) -> DocState:
    """Replay revisions, a base first.

    Raises:
        NotJsonError: What is stored is damaged.
    """
    value: Any = None
    base_bytes = delta_bytes = deltas = 0
    version = 1
    ops: list[Any] = []
    path = f"$<{address.name}>"
    if not revisions or not revisions[0].base:
        raise NotJsonError(path, "nothing is stored that its changes could begin with")
    for revision in revisions:
        parsed = _json.loads_stored(revision.value)
        version = revision.version
        if revision.base:
            value, ops = parsed, []
            base_bytes = _bytes_of(revision.value)
            delta_bytes = deltas = 0
        else:
            if type(parsed) is not list:
                raise NotJsonError(path, "a change is a list of operations", show(parsed))
            ops += parsed
            delta_bytes += _bytes_of(revision.value)
            deltas += 1
    # All at once, so that what many of them change is copied once.
    value = _patch.apply(value, ops)
    bound = base_bytes + delta_bytes
    if _copies(ops):
        # What a copy adds is not in the operations.
        bound = _bytes_of(_json.dumps(value, path=path))
    terms = Terms(version, row.history, row.fork)
    return DocState(row.id, address, terms, value, base_bytes, delta_bytes, deltas, bound)


Rows = list[tuple[Op, tuple[Any, ...]]]


def create(
    id: int,
    address: Address,
    terms: Terms,
    value: Any,
    *,
    seq: int,
    settings: Settings,
) -> tuple[DocState, Rows]:
    """A new document with its first base."""
    text = _json.dumps(value, path=f"$<{address.name}>")
    size = _bytes_of(text)
    _check_size(address, size, settings)
    _report_size(address, 0, size, settings)
    state = DocState(id, address, terms, value, size, 0, 0, size)
    row = DocumentRow(
        id,
        address.name,
        address.scope,
        address.scope_id,
        address.key,
        state.history,
        state.fork,
        seq,
        None,
    )
    return state, [
        (Op.DOCUMENT, row),
        (Op.REVISION, RevisionRow(id, seq, 1, terms.version, text)),
    ]


def change(
    state: DocState,
    ops: list[Any],
    held: Any,
    *,
    terms: Terms,
    seq: int,
    settings: Settings,
    has_from: bool,
) -> tuple[DocState, Rows]:
    """The document after `ops`, by which it holds `held`, and the rows that store the step.

    It is stored with the terms of the class that changed it, so that a new history or fork policy
    counts from the next change on.
    """
    path = f"$<{state.address.name}>"
    rows: Rows = []
    if terms is not state.terms and terms[1:] != state.terms[1:]:
        rows.append((Op.DOCUMENT_TERMS, (state.id, terms.history, terms.fork)))
    if terms.version == state.version and state.deltas < DELTAS_MAX:
        text = _delta_text(ops, path, checked=not has_from)
        text_bytes = 0 if text is None else _bytes_of(text)
        delta_bytes = state.delta_bytes + text_bytes
        if text is not None and delta_bytes <= max(state.base_bytes, DELTA_BYTES_MIN):
            # What was added is in the operations, so this bounds the size from above; a copy
            # within the value is the exception.
            bound = state.bytes_bound + text_bytes
            if bound > settings.document_bytes_max or (has_from and _copies(ops)):
                bound = _bytes_of(_json.dumps(plain(held), path=path))
                _check_size(state.address, bound, settings)
            after = DocState(
                state.id,
                state.address,
                terms,
                held,
                state.base_bytes,
                delta_bytes,
                state.deltas + 1,
                bound,
            )
            rows.append((Op.REVISION, RevisionRow(state.id, seq, 0, terms.version, text)))
            return after, rows
    value = plain(held)
    base = _json.dumps(value, path=path)
    size = _bytes_of(base)
    _check_size(state.address, size, settings)
    _report_size(state.address, state.base_bytes, size, settings)
    after = DocState(state.id, state.address, terms, value, size, 0, 0, size)
    rows.append((Op.REVISION, RevisionRow(state.id, seq, 1, terms.version, base)))
    if terms.history == "latest":
        rows.append((Op.REVISIONS_DELETE, (state.id, seq)))
    return after, rows


def _copies(ops: list[Any]) -> bool:
    return any(op["op"] == "copy" for op in ops)


def _delta_text(ops: list[Any], path: str, *, checked: bool) -> str | None:
    """Write operations as text, or None where only a whole value can be stored.

    A value that is as deep as it may be is two levels too deep within a list of operations.
    """
    try:
        return _json.dumps(ops, path=path, checked=checked)
    except NotJsonError:
        for index, op in enumerate(ops):
            for name, member in op.items():
                _json.check_json(member, f"{path}[{index}].{name}")
        return None


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _check_size(address: Address, size: int, settings: Settings) -> None:
    if size > settings.document_bytes_max:
        raise DocumentTooLargeError(address.name, size, settings.document_bytes_max)


def _report_size(address: Address, before: int, size: int, settings: Settings) -> None:
    """Say once that a document has grown large: at the first base beyond the threshold."""
    if size > settings.document_report_bytes >= before:
        logger.warning(
            "document %s (scope id %d) has grown to %d bytes; every comparison of it costs that",
            address.name,
            address.scope_id,
            size,
        )


def begun(definition: DocumentDefinition, cls: type[DocT]) -> DocT:
    """What a document begins with that does not exist yet: the defaults of its class.

    Raises:
        InvalidArgumentError: The class has fields without a default.
    """
    try:
        return cls()
    except TypeError:
        made: Any = cls
        if attrs.has(made):
            without = [each.alias for each in attrs.fields(made) if each.default is attrs.NOTHING]
        else:
            without = [
                each.name
                for each in dataclasses.fields(made)
                if each.default is each.default_factory is dataclasses.MISSING
            ]
        if not without:
            raise
        problem = f"document {definition.name!r} does not exist yet and begins with the defaults of"
        raise InvalidArgumentError(
            "cls",
            f"{problem} {cls.__name__}; give these fields one",
            ", ".join(str(each) for each in without),
        ) from None


def migrated(definition: DocumentDefinition, value: Any, version: int) -> Any:
    """JSON that was stored with a version, in the shape that the definition's class reads."""
    if version == definition.version:
        return value
    if version > definition.version:
        raise DocumentTooNewError(definition.name, version, definition.version)
    migrate = getattr(definition.cls, "migrate", None)
    if migrate is None:
        raise MigrationError(
            f"document {definition.name!r}",
            f"it has version {version} and {definition.cls.__name__} has no migrate()",
        )
    path = f"$<{definition.name}>"
    place = f"migrate() of {definition.cls.__name__}, from version {version},"
    try:
        returned = migrate(copy.deepcopy(value), version)
    except Exception as error:  # the code of an extension may raise anything
        problem = f"{place} raised {show(error)}"
        raise MigrationError(f"document {definition.name!r}", problem) from error
    if inspect.iscoroutine(returned):
        returned.close()
    if not isinstance(returned, dict):
        problem = f"{place} returned {show(returned)}; expected the new value, a dict"
        raise MigrationError(f"document {definition.name!r}", problem)
    try:
        # Copied, so that what the code keeps of it can be changed there.
        checked = _json.check_json(returned, path)
    except NotJsonError as error:
        problem = f"{place} returned what cannot be stored: {error}"
        raise MigrationError(f"document {definition.name!r}", problem) from error
    return checked
