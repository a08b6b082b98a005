"""What a commit does to documents: drafts, patches, retirements, and the rows they become.

Drafts are compared when the body has returned; patches are applied at once. Both end in one list of
operations per document, so a commit writes one revision of it however often it was changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from pidurable.errors import (
    InternalError,
    InvalidArgumentError,
    NotJsonError,
    TransactionClosedError,
    UnknownTaskError,
    check,
    show,
)
from pidurable.records import _json, _patch
from pidurable.records._checks import is_id
from pidurable.records._entries import Conversation
from pidurable.records._limits import KIB
from pidurable.session import _documents, _grown
from pidurable.session._documents import (
    Address,
    DocChange,
    DocState,
    DocumentDefinition,
    Terms,
)
from pidurable.session._drafts import end_draft
from pidurable.session._forks import Fork
from pidurable.storage import Op

if TYPE_CHECKING:
    from pidurable.session._session import Session

DocT = TypeVar("DocT")

NO_LIST: Any = ()
NO_DICT: Any = MappingProxyType({})
"""What a transaction has of everything that it does not use: a real one is begun by the first write
to it. A commit uses few of them, and there are many commits."""

_LOOP_BYTES_MAX = 256 * KIB
"""Documents up to this size are compared in the loop."""


@attrs.define(eq=False)
class _DocDraft:
    """A mutable copy of a document that a body works on."""

    definition: DocumentDefinition
    address: Address
    before: Any
    """The staged value in today's shape, when the draft was last compared; None for a new one."""
    value: Any
    exact: bool
    """Whether the class is known to write `before` as it stands, so that any difference from it is
    a change. Of what was stored by other code, or patched, that is not known."""
    compared: tuple[Any, list[Any]] | None = None
    """Its JSON and the operations that lead there, where a thread has compared it already."""


@attrs.define(eq=False)
class _DocPending:
    """What a body has done to one document so far. Its rows are made when the body ends."""

    terms: Terms
    """What the value will be stored with."""
    state: DocState | None
    """As before this commit; None for a new document."""
    held: Any
    """What it holds by now: the value, or what it has grown to."""
    ops: list[Any] = attrs.Factory(list)
    has_from: bool = False
    """Whether an operation has a `from`: a copy adds what is not in the operations, and in any
    other one but a move it may be anything. Values of all of them are checked by now."""
    drafted_by: DocumentDefinition | None = None
    """Whose class wrote the whole value, if nothing was patched since."""
    id: int | None = None
    """Of a new document, where it was drawn before; None draws it with the rows."""

    @property
    def value(self) -> Any:
        """The value as JSON, which must not be changed."""
        return _grown.plain(self.held)


class DocumentWork:
    """The part of a transaction that is about documents.

    What a transaction begins with stands in the classes, here and in those that derive from it: an
    object of more than 30 attributes costs several times as much.
    """

    open = True
    broken: BaseException | None = None
    """A read of the body that failed."""
    doc_changes: list[DocChange] = NO_LIST
    docs: dict[Address, DocState | None] = NO_DICT
    _pending: dict[Address, _DocPending] = NO_DICT
    _retired: dict[Address, DocState] = NO_DICT
    """What stood at an address before this commit and was retired by it."""
    _drafts: list[_DocDraft] = NO_LIST
    _handed_out: list[_DocDraft] = NO_LIST
    """All drafts that the body was given, also of what it retired."""
    _forks: dict[int, Fork] = NO_DICT
    """The forks that this body has made, by their ids."""

    def __init__(self, session: Session) -> None:
        self.seq = 0
        self.writes: list[tuple[Op, tuple[Any, ...]]] = []
        """Only ever appended to, or replaced in its place: who stages a row may keep its place."""
        self._session = session

    def _check_open(self) -> None:
        if not self.open:
            raise TransactionClosedError

    def conversation(self, conversation_id: int) -> Conversation:
        """The record of a conversation; see the transaction."""
        raise NotImplementedError

    def check_task(self, task_id: int) -> None:
        """Refuse the id of what is no live task; the tasks layer knows which are."""
        if not is_id(task_id):
            raise UnknownTaskError(show(task_id))

    # --- reading -------------------------------------------------------------------------

    def doc_value(self, address: Address) -> Any:
        """The JSON value at an address as staged so far; None where there is no document.

        Drafts are not looked at: they count when the body ends.
        """
        standing = self._pended(address) or self._doc_state(address)
        return None if standing is None else _grown.plain(standing.held)

    def _standing(self, address: Address) -> tuple[Terms, Any] | None:
        """What stands at an address as staged so far, with what it is stored with."""
        pending = self._pended(address)
        if pending is not None:
            return pending.terms, pending.value
        state = self._doc_state(address)
        return None if state is None else (state.terms, state.value)

    def _pended(self, address: Address) -> _DocPending | None:
        """What this commit has done to a document so far."""
        if self._forks:
            self._settle(address)
        return self._pending.get(address)

    def _settle(self, address: Address) -> None:
        """Give an address of a fork what it starts with; see the work on forks."""
        raise NotImplementedError

    def _doc_state(self, address: Address) -> DocState | None:
        """What stands at an address, apart from the changes of this commit that are pending."""
        if address in self._retired:
            return None
        return self._session.staged_doc(address)

    def _address(self, cls: type, scope_id: int | None, key: str) -> Address:
        definition = _documents.definition_of(cls)
        if definition.scope == "session":
            scope_id = 0
        elif scope_id is None:
            raise InvalidArgumentError(
                "scope_id",
                f"document {definition.name!r} belongs to a {definition.scope}; give the id of one",
            )
        if definition.scope == "conversation":
            self.conversation(scope_id)
        elif definition.scope == "task":
            self.check_task(scope_id)
        return _documents.address(definition, scope_id, key)

    def _today(self, definition: DocumentDefinition, address: Address) -> Any:
        """The staged JSON at an address in today's shape, or None."""
        standing = self._standing(address)
        if standing is None:
            return None
        terms, value = standing
        return _documents.migrated(definition, value, terms.version)

    # --- changing ------------------------------------------------------------------------

    async def document(
        self, cls: type[DocT], scope_id: int | None = None, *, key: str = ""
    ) -> DocT:
        """Get or create a mutable draft of a document; the commit stores what changed.

        Comparing costs the size of the document. Streams use `append_text` and `patch`. What is
        assigned into the draft is copied when the body ends; whoever touches the draft after that
        is told so (`TransactionClosedError`).

        Args:
            cls: A class declared with `@document`.
            scope_id: The conversation or task it belongs to; not needed for the session's.
            key: Which one of a family.

        Raises:
            DocumentTooNewError: It was written by a newer version of the class.
            MigrationError: `migrate` could not read what is stored.
            NotJsonError: What is stored does not fit the class. It can still be patched or retired.
            InvalidArgumentError: This commit has a draft of it already, as another class; or there
                is no document yet, and the class has fields without a default to begin it with.
            NotFoundError: There is no such conversation to have it.
            UnknownTaskError: There is no such task to have it.
            TaskEndedError: The task has ended, and its documents with it.
        """
        self._check_open()
        address = self._address(cls, scope_id, key)
        definition = _documents.definition_of(cls)
        if self._draft_at(address) is None:
            await self._fetch(address)
            self._check_open()
        # Another task of the body may have asked for it meanwhile.
        standing_draft = self._draft_at(address)
        if standing_draft is not None:
            if standing_draft.definition is not definition:
                _refuse_second_class(definition, standing_draft.definition)
            return standing_draft.value  # type: ignore[no-any-return]
        before = self._today(definition, address)
        value = (
            _documents.begun(definition, cls)
            if before is None
            else self._session.codec.decode(before, cls, path=f"$<{definition.name}>")
        )
        if not self._handed_out:
            self._handed_out = []
        self._drafts = self._drafts or []
        standing = self._pending.get(address) or self._doc_state(address)
        exact = standing is None or standing.drafted_by is definition
        draft = _DocDraft(definition, address, before, value, exact)
        self._drafts.append(draft)
        self._handed_out.append(draft)
        return value

    def _draft_at(self, address: Address) -> _DocDraft | None:
        return next((draft for draft in self._drafts if draft.address == address), None)

    async def _fetch(self, address: Address) -> None:
        """Have what stands at an address in memory."""
        await self._session.fetch_doc(address)

    def append_text(
        self, cls: type, scope_id: int | None, path: str, text: str, *, key: str = ""
    ) -> None:
        """Grow the string at `path` (a JSON pointer) of a document. Costs the size of `text`."""
        self.patch(cls, scope_id, [{"op": "append", "path": path, "value": text}], key=key)

    def patch(self, cls: type, scope_id: int | None, ops: Sequence[Any], *, key: str = "") -> None:
        """Apply JSON Patch operations (RFC 6902 and `append`) to a document. O(change).

        Where the commit has a draft of it too, what the draft holds by now is applied first; the
        draft does not see the patch, and what is changed in it later is applied after it.

        Raises:
            NotFoundError: The document does not exist; create it with `document` first.
            NotJsonError: An operation does not fit the value; the path says where.
        """
        self._check_open()
        address = self._address(cls, scope_id, key)
        for draft in self._drafts:
            if draft.address == address:
                self._compare(draft)
        if self._pended(address) is None and self._doc_state(address) is None:
            raise _documents.missing(address, "Create it with tx.document first.")
        if not ops:
            return
        own = _copied(ops, address)
        has_from = any("from" in op for op in own)
        self._patch(_documents.definition_of(cls), address, own, has_from=has_from)

    def retire(self, cls: type, scope_id: int | None = None, *, key: str = "") -> None:
        """End a document. A new one at the same address is a new incarnation, with a new id.

        Raises:
            NotFoundError: There is none.
        """
        self._check_open()
        address = self._address(cls, scope_id, key)
        drafted = any(draft.address == address for draft in self._drafts)
        if self.doc_value(address) is None and not drafted:
            raise _documents.missing(address)
        self._retire(address)

    def touches(self, scope: int, scope_id: int) -> bool:
        """Whether this commit has changed, or may have changed, a document of a scope."""
        addresses = (*self._pending, *self._retired, *(draft.address for draft in self._drafts))
        return any(each.scope == scope and each.scope_id == scope_id for each in addresses)

    def retire_scope(self, scope: int, scope_id: int) -> None:
        """End every document of a scope (a task that ended)."""
        for address in self._session.staged_docs_of(scope, scope_id):
            self._retire(address)
        for address in list(self._pending):
            if address.scope == scope and address.scope_id == scope_id:
                self._retire(address)
        self._drafts = [
            draft
            for draft in self._drafts
            if (draft.address.scope, draft.address.scope_id) != (scope, scope_id)
        ]

    def _retire(self, address: Address) -> None:
        self._drafts = [draft for draft in self._drafts if draft.address != address]
        pending = self._pended(address)
        if pending is not None:
            del self._pending[address]
        if address not in self._retired:
            state = pending.state if pending is not None else self._doc_state(address)
            if state is not None:
                self._retired = self._retired or {}
                self._retired[address] = state

    def put_doc(
        self,
        definition: DocumentDefinition,
        address: Address,
        value: Any,
        *,
        id: int | None = None,
    ) -> None:
        """Create a document from JSON, which must not be changed afterwards.

        Args:
            definition: What its class declares.
            address: Where it will stand.
            value: What it holds.
            id: An id that the session has drawn for it, by which it can be found; None draws one.
        """
        self._check_open()
        check(self._standing(address) is None, f"document {address} was to be created and exists")
        self._put(address, definition.terms, value)
        self._pending[address].id = id

    def _put(self, address: Address, terms: Terms, value: Any) -> None:
        self._pending = self._pending or {}
        self._pending[address] = _DocPending(terms, None, value)

    def patch_doc(
        self, definition: DocumentDefinition, address: Address, ops: Sequence[Any]
    ) -> None:
        """Change a document that exists by operations on its JSON, in today's shape.

        Neither the operations nor what is in them may be changed afterwards.
        """
        self._check_open()
        if not ops:
            return
        if not _are_plain(ops):
            ops = _copied(ops, address)
        self._patch(definition, address, ops)

    def set_fields(
        self,
        definition: DocumentDefinition,
        address: Address,
        fields: Mapping[str, Any],
        *,
        checked: bool = False,
    ) -> bool:
        """Set fields of a document; those that have their value already are left out.

        Args:
            definition: What its class declares.
            address: Where it stands.
            fields: By names that a JSON pointer has as they are. What is in the values may not be
                changed afterwards.
            checked: Whether the values are known to be plain JSON, without tuples.

        Returns:
            Whether there is such a document.
        """
        self._check_open()
        pending = self._begun(address)
        if pending is None:
            return False
        value = pending.value
        # What equals a value and is of another type, as 1 is of 1.0, is not stored, so not held.
        differ = {
            name: new for name, new in fields.items() if name not in value or value[name] != new
        }
        if not differ:
            return True
        ops = [
            {"op": "replace" if name in value else "add", "path": f"/{name}", "value": new}
            for name, new in differ.items()
        ]
        if pending.terms.version == definition.version and (checked or _are_plain(ops)):
            self._stage(definition, address, pending, {**value, **differ}, ops)
        else:
            self.patch_doc(definition, address, ops)
        return True

    def _begun(self, address: Address) -> _DocPending | None:
        """What this commit does to a document, maybe nothing yet; None where none stands there."""
        pending = self._pended(address)
        if pending is not None:
            return pending
        state = self._doc_state(address)
        return None if state is None else _DocPending(state.terms, state, state.held)

    def _patch(
        self,
        definition: DocumentDefinition,
        address: Address,
        ops: Sequence[Any],
        *,
        has_from: bool = False,
    ) -> None:
        """Do operations that nobody else has, or changes."""
        pending = self._begun(address)
        if pending is None:
            # Said only here: every change of a document comes this way.
            raise InternalError(f"document {address} was to be changed and does not exist")
        held, earlier = pending.held, pending.ops
        if pending.terms.version != definition.version:
            held = _documents.migrated(definition, pending.value, pending.terms.version)
            earlier = [{"op": "replace", "path": "", "value": held}]
        before = pending.state
        if before is not None and before.bytes_bound >= _grown.LONG_CHARACTERS_MIN:
            held = _grown.changed(held, ops)
        else:
            held = _patch.apply(_grown.plain(held), ops)
        if type(held) is not dict and type(held) is not _grown.Grown:
            raise NotJsonError(f"$<{address.name}>", "a document is an object", show(held))
        # Nothing has been changed until here: a body may go on after a patch that was refused.
        pending.ops = earlier
        self._stage(definition, address, pending, held, ops, has_from=has_from)

    def _stage(
        self,
        definition: DocumentDefinition,
        address: Address,
        pending: _DocPending,
        held: Any,
        ops: Sequence[Any],
        *,
        has_from: bool = False,
    ) -> None:
        """Note what a document holds after operations on it."""
        pending.terms = definition.terms
        pending.held = held
        pending.drafted_by = None
        if pending.state is not None:
            pending.ops += ops
            pending.has_from = pending.has_from or has_from
        self._pending = self._pending or {}
        self._pending[address] = pending

    # --- the end of the body -------------------------------------------------------------

    def compare_drafts(self) -> None:
        """Stage what the drafts have become. The body has ended, and makes no more of them."""
        for draft in self._drafts:
            self._compare(draft)

    def seal_documents(self) -> None:
        """Make the rows of every document that changed."""
        for fork in self._forks.values():
            self._copy_documents(fork)
        if not self._retired and not self._pending:
            return
        self.docs, self.doc_changes = {}, []
        for address, state in self._retired.items():
            self.docs[address] = None
            self.doc_changes.append(DocChange(address, state.held, None, []))
            self.writes.append((Op.DOCUMENT_RETIRE, (state.id, self.seq)))
        for address, pending in self._pending.items():
            self._store(address, pending)

    def end_drafts(self) -> None:
        """Let nobody touch the drafts any more: what is done to them would be stored nowhere."""
        for draft in self._handed_out:
            end_draft(draft.value, draft.definition)
        self._drafts = self._handed_out = NO_LIST

    def _copy_documents(self, fork: Fork) -> None:
        """Settle all of a fork that is not settled yet; see the work on forks."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """Compare large drafts in a thread, before `seal`, so that the loop can go on meanwhile.

        The body has returned and the line is held, so nobody changes them.
        """
        for draft in self._drafts:
            state = self._doc_state(draft.address)
            if state is not None and state.base_bytes + state.delta_bytes > _LOOP_BYTES_MAX:
                draft.compared = await self._session.blocking.run(self._difference, draft)

    def _difference(self, draft: _DocDraft) -> tuple[Any, list[Any]]:
        """What a draft has become, as JSON, and the operations that lead there."""
        codec, cls = self._session.codec, draft.definition.cls
        path = f"$<{draft.definition.name}>"
        value = codec.encode(draft.value, cls, path=path)
        if draft.before is None:
            return value, []
        ops = _patch.diff(draft.before, value)
        if ops and not draft.exact:
            # A field that the class has gained, or a number that it reads as a float, is no change
            # of whoever only looked.
            untouched = codec.encode(codec.decode(draft.before, cls, path=path), cls, path=path)
            if _patch.same(untouched, value):
                return draft.before, []
        return value, ops

    def _compare(self, draft: _DocDraft) -> None:
        """Turn what a draft has become since it was last compared into operations."""
        value, ops = draft.compared or self._difference(draft)
        draft.compared = None
        standing = self._pending.get(draft.address)
        is_all_of_it = standing is None or standing.drafted_by is draft.definition
        if draft.before is None:
            self.put_doc(draft.definition, draft.address, value)
        elif ops:
            self._patch(draft.definition, draft.address, ops)
        else:
            return
        draft.before = value
        draft.exact = True
        if is_all_of_it:
            self._pending[draft.address].drafted_by = draft.definition

    def _store(self, address: Address, pending: _DocPending) -> None:
        """Make the rows of one document: a first base, or one revision."""
        session = self._session
        state = pending.state
        if state is None:
            after, rows = _documents.create(
                pending.id or session.line.draw_id(),
                address,
                pending.terms,
                pending.value,
                seq=self.seq,
                settings=session.settings,
            )
            self.doc_changes.append(DocChange(address, None, after.held, []))
        else:
            after, rows = _documents.change(
                state,
                pending.ops,
                pending.held,
                terms=pending.terms,
                seq=self.seq,
                settings=session.settings,
                has_from=pending.has_from,
            )
            self.doc_changes.append(DocChange(address, state.held, after.held, pending.ops))
        if pending.drafted_by is not None:
            after = after._replace(drafted_by=pending.drafted_by)
        self.docs[address] = after
        self.writes += rows


_SCALARS = frozenset({str, bool, type(None)})
_MEMBERS = frozenset({"op", "path", "from", "value"})


def _are_plain(ops: Sequence[Any]) -> bool:
    """Whether the values of operations are plain JSON, their strings apart."""
    for op in ops:
        value = op.get("value")
        kind = type(value)
        if kind in _SCALARS or (kind is int and 0 <= value < 2**63):
            continue  # the usual case
        # What is written as a list is read as one, so it is one at once.
        if not _json.is_plain(value, _json.VALUE_BYTES_MAX, tuples=False):
            return False
    return True


def _copied(ops: Sequence[Any], address: Address) -> list[Any]:
    """Check and copy operations: what is done to the caller's own must not reach the store.

    Other members of an operation mean nothing (RFC 6902, section 4) and are left out. Each value is
    checked by itself, as its depth counts from where it goes and not from the list of operations.
    """
    copied: list[Any] = []
    for op in ops:
        if not isinstance(op, dict):
            raise NotJsonError("op", "an operation is an object with op and path", show(op))
        if op.keys() <= _MEMBERS:
            fields = {**op}
        else:
            fields = {name: value for name, value in op.items() if name in _MEMBERS}
        # What is in the strings is checked when the row is made.
        value = fields.get("value")
        if type(value) not in _SCALARS and not (type(value) is int and 0 <= value < 2**63):
            path = f"$<{address.name}>[{len(copied)}].value"
            fields["value"] = _json.owned_json(value, path)
        copied.append(fields)
    return copied


def _refuse_second_class(asked: DocumentDefinition, held: DocumentDefinition) -> None:
    """Two drafts of one document would each overwrite what the other changed."""
    raise InvalidArgumentError(
        "cls",
        f"this commit has a draft of document {held.name!r} as {held.cls.__qualname__} "
        f"(version {held.version}); ask for it as that, or in another commit",
        f"{asked.cls.__qualname__} (version {asked.version})",
    )
