"""Permission requests: what a call asks a person, and the one commit that decides it.

A request is a document of its own in the conversation of its call, under its id as key, so that it
can be read for as long as the conversation is there, and no fork has it. Its states::

    open --> granted | denied       a person decided
         --> expired                nobody did in time; written by the call itself
         --> closed                 aborted, or gone (its call ended without code of its own)
    granted --> closed              superseded: the call is not what was granted any more, and
                                    asks again

Holds at all times:

* it leaves `open` once, in one commit that looks at it on the line of commits: whichever commits
  first wins, and who comes later is told;
* nothing is decided below a live owner that is to be aborted, after the expiry, for another
  principal, or by what is no decision;
* a call with an open request waits for it, durably; whatever settles the request wakes it;
* a call with a slot in `pi.live` is shown as held by the oldest open request of its own or of what
  is below it: nested calls, and conversations that it owns, however deep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from pidurable.agent._decisions import (
    GRANTING,
    Decision,
    Happened,
    Pattern,
    check_decision,
    check_fits,
    check_result,
    decode_decision,
    encode_decision,
)
from pidurable.agent._documents import LiveDocument, find_call, patch_live, read_doc
from pidurable.agent._grants import Grant, add_grant, chains, matches
from pidurable.agent._hooks import Risk
from pidurable.errors import (
    AlreadyDecidedError,
    InvalidArgumentError,
    NotFoundError,
    NotJsonError,
    StorageCorruptError,
    show,
)
from pidurable.records import _codec, _json
from pidurable.records._checks import check_name, check_text, is_id
from pidurable.records._messages import JsonValue
from pidurable.records._readonly import copied_json
from pidurable.session import _documents
from pidurable.session._documents import Address, definition_of, document
from pidurable.session._transaction import PRINCIPAL_CHARACTERS_MAX
from pidurable.storage import DocumentRow, RecordKind, Storage
from pidurable.tasks._tree import WAITING, Node
from pidurable.tasks._tree_transaction import TreeTransaction, to_us

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pidurable.agent._services import AgentServices
    from pidurable.errors import SessionPoisonedError
    from pidurable.session._transaction import Transaction
    from pidurable.tasks._runtime import Runtime

Subject = Literal["call", "effect"]
RequestState = Literal["open", "granted", "denied", "expired", "closed"]
ClosedReason = Literal["aborted", "superseded", "gone"]

_NAME: Final = "pi.permission"
_CONVERSATION: Final = 1
_WAITS_PAGE: Final = 10_000


@document(_NAME, family=True)
@attrs.define(kw_only=True)
class PermissionDocument:
    """A permission request as it is stored; see `PermissionRequest`, whose fields these are."""

    id: int
    task: int
    conversation: int
    subject: str
    tool: str
    extension: str
    arguments: Any
    text: str
    matchable: bool
    """Whether patterns may match the text at all."""
    digest: str
    place: str
    """What a grant that is given here is bound to."""
    directory: str
    boundary: str
    risk: str
    reason: str
    principal: str
    path: list[Any]
    created_us: int
    expires_us: int | None
    state: str
    closed_reason: str | None
    decision: Any
    decided_us: int | None
    decided_by: str | None
    grant: int | None


@attrs.frozen(kw_only=True)
class PermissionRequest:
    """What a call asks a person, and what became of it."""

    id: int
    task: int
    """The call."""
    conversation: int
    subject: Subject
    """`call`: may it run? `effect`: a crash was found in the middle of it; what became of it?"""
    tool: str
    extension: str
    arguments: JsonValue
    """What the tool would get, as JSON. Written by a model: show it escaped."""
    text: str
    """What patterns match, `permission_text` of the tool. Written by a model: show it escaped."""
    digest: str
    """Of all that a yes covers: tool, schema, description, replay policy, version, arguments,
    principal, directory and boundary."""
    directory: str
    boundary: str
    """What keeps the tool's files and processes in; by default the class of the environment."""
    risk: Risk
    reason: str
    principal: str
    path: tuple[tuple[str, int], ...]
    """Kind and id of everything above the call, from the root conversation down."""
    created_us: int
    expires_us: int | None
    state: RequestState
    closed_reason: ClosedReason | None = None
    decision: Decision | None = None
    decided_us: int | None = None
    """When it left `open`."""
    decided_by: str | None = None
    grant: int | None = None
    """The grant that let the call through; nobody was asked then."""


@attrs.frozen(kw_only=True)
class Asked:
    """What is asked for: all of a request that is known before it is made."""

    subject: Subject
    tool: str
    extension: str
    arguments: Any
    text: str
    matchable: bool
    digest: str
    place: str
    directory: str
    boundary: str
    risk: Risk
    reason: str
    principal: str
    expires_us: int | None


def request_of(value: dict[str, Any]) -> PermissionRequest:
    """The record of a stored request; what is JSON in it is a copy."""
    known = {field.name for field in attrs.fields(PermissionRequest)}
    fields = {name: given for name, given in value.items() if name in known}
    decision = value["decision"]
    return PermissionRequest(
        **{
            **fields,
            "arguments": copied_json(value["arguments"]),
            "path": tuple((kind, id) for kind, id in value["path"]),
            "decision": None if decision is None else decode_decision(decision),
        }
    )


def encode_request(request: PermissionRequest) -> dict[str, Any]:
    """The JSON form of a request, for whoever is not Python."""
    value = attrs.asdict(request, recurse=False)
    decision = request.decision
    return {
        **value,
        "path": [[kind, id] for kind, id in request.path],
        "decision": None if decision is None else encode_decision(decision),
    }


def address_of_request(conversation_id: int, request_id: int) -> Address:
    """Where a request is stored."""
    return Address(_NAME, _CONVERSATION, conversation_id, str(request_id))


# --- opening and closing ----------------------------------------------------------------------


def open_request(tx: TreeTransaction, *, task: int, conversation: int, asked: Asked) -> int:
    """Stage an open request of a call and return its id; the caller waits for it."""
    id = _put_request(tx, task=task, conversation=conversation, asked=asked)
    # Ids only grow, so whoever is held already is held by an older request.
    for home, call in _held_by_request(tx, tx.doc_value(address_of_request(conversation, id))):
        _hold_slot(tx, home, call, before=None, after=id)
    return id


def note_use(tx: TreeTransaction, *, task: int, conversation: int, asked: Asked, grant: int) -> int:
    """Stage the record of a call that a grant lets through: granted at once, nobody was asked."""
    return _put_request(
        tx,
        task=task,
        conversation=conversation,
        asked=asked,
        state="granted",
        decided_us=tx.now_us(),
        decided_by=f"grant {grant}",
        grant=grant,
    )


def _put_request(
    tx: TreeTransaction, *, task: int, conversation: int, asked: Asked, **fields: Any
) -> int:
    id = tx.draw_id()
    value = {
        "id": id,
        "task": task,
        "conversation": conversation,
        **attrs.asdict(asked, recurse=False),
        "path": _path(tx, task, conversation),
        "created_us": tx.now_us(),
        "state": "open",
        "closed_reason": None,
        "decision": None,
        "decided_us": None,
        "decided_by": None,
        "grant": None,
        **fields,
    }
    # Copied: the document keeps what it is given.
    whole = _json.check_json(value, f"$<{_NAME}>")
    address = address_of_request(conversation, id)
    tx.put_doc(definition_of(PermissionDocument), address, whole, id=id)
    tx.unique["permission", id] = conversation
    if value["state"] == "open":
        tx.unique["permission of", task] = id
    return id


def _path(tx: TreeTransaction, task: int, conversation: int) -> list[list[Any]]:
    """Kind and id of what is above a task, ended tasks too, from the root down."""
    path: list[list[Any]] = []
    at: int | None = task
    while at is not None:
        node = tx.view.task(at)
        row = None if node is not None else tx.stored_task(at)
        owner = node.owner if node is not None else None if row is None else row.owner
        if node is None and row is None:
            break
        if at != task:
            kind = node.kind if node is not None else row.kind  # type: ignore[union-attr]
            path.append([kind, int(at)])
        if owner is not None:
            at = owner
            continue
        home = node.conversation if node is not None else row.conversation  # type: ignore[union-attr]
        path.append(["conversation", int(home)])
        at = tx.conversation(home).owner
    return path[::-1]


def leave_open(
    tx: TreeTransaction,
    address: Address,
    state: RequestState,
    *,
    others: Collection[Address],
    closed_reason: ClosedReason | None = None,
    decision: Any = None,
    by: str | None = None,
) -> None:
    """Stage the one step of a request out of `open`. The caller has looked that it is.

    The calls above it that are held by it are held by the next one below them, if there is one.

    Args:
        tx: The commit.
        address: Where the request is.
        state: What it becomes.
        others: Where requests are that may be open too.
        closed_reason: Why it is closed, if it is.
        decision: What was decided, as JSON.
        by: Who has decided.
    """
    fields = {
        "state": state,
        "closed_reason": closed_reason,
        "decision": decision,
        "decided_us": tx.now_us(),
        "decided_by": by,
    }
    ops = [{"op": "replace", "path": f"/{name}", "value": new} for name, new in fields.items()]
    value = tx.doc_value(address)
    tx.patch_doc(definition_of(PermissionDocument), address, ops)
    for home, call in _held_by_request(tx, value):
        live = read_doc(tx, LiveDocument, home)
        place = find_call(live, call)
        if place is not None and live["calls"][place]["held_by"] == f"permission {value['id']}":
            after = _oldest_open(tx, others, call)
            _hold_slot(tx, home, call, before=value["id"], after=after)


def supersede(tx: TreeTransaction, request: PermissionRequest) -> None:
    """Stage that a yes does not count: what would run now is not what was granted."""
    ops = [
        {"op": "replace", "path": "/state", "value": "closed"},
        {"op": "replace", "path": "/closed_reason", "value": "superseded"},
    ]
    address = address_of_request(request.conversation, request.id)
    tx.patch_doc(definition_of(PermissionDocument), address, ops)


def is_open(tx: Transaction, address: Address) -> bool:
    """Whether a request is open, as staged so far."""
    value = tx.doc_value(address)
    return value is not None and value["state"] == "open"


def _held_by_request(tx: TreeTransaction, value: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Conversation and task of each call that a request holds up: its own, and those above."""
    yield value["conversation"], value["task"]
    for kind, id in reversed(value["path"]):
        node = tx.view.task(id) if kind == "pi.tool" else None
        if node is not None:
            yield int(node.conversation), id


def _oldest_open(tx: TreeTransaction, others: Collection[Address], call: int) -> int | None:
    """The oldest open request of a call or of what is below it."""
    for address in sorted(others, key=lambda each: int(each.key)):
        value = tx.doc_value(address)
        if value is None or value["state"] != "open":
            continue
        if call == value["task"] or ["pi.tool", call] in value["path"]:
            return int(value["id"])
    return None


def _hold_slot(
    tx: Transaction, conversation: int, task: int, *, before: int | None, after: int | None
) -> None:
    """Show in `pi.live` what a call waits for; nested calls and closed rounds have no slot.

    One that is held by another request, or that has ended, stays as it is.
    """
    live = read_doc(tx, LiveDocument, conversation)
    place = find_call(live, task)
    if place is None or live["calls"][place]["held_by"] != _holder(before):
        return
    status = "running" if after is None else "waiting"
    ops = [{"op": "replace", "path": f"/calls/{place}/held_by", "value": _holder(after)}]
    if live["calls"][place]["status"] in ("running", "waiting"):
        ops.append({"op": "replace", "path": f"/calls/{place}/status", "value": status})
    patch_live(tx, conversation, ops)


def _holder(request: int | None) -> str | None:
    return None if request is None else f"permission {request}"


# --- all requests of a session ----------------------------------------------------------------


class Permissions:
    """The requests of a session: which are open, deciding them, and tasks that wait for them.

    A participant, and one of the kinds that tasks can wait for.
    """

    kind = "permission"

    def __init__(self, services: AgentServices) -> None:
        runtime = services.runtime
        self._services = services
        self._runtime: Runtime = runtime
        self._session = runtime.session
        self._open: dict[int, Address] = {}
        """Those that may be open by what is published; what is stored decides."""
        self._by_task: dict[int, int] = {}
        self._staged: dict[int, Address] = {}
        """Those that were opened in commits that are being stored."""
        runtime.kinds.add(self)
        runtime.session.participants.append(self)
        runtime.on_intent.append(self._close_of)

    def load(self) -> None:
        """Find those that are open when a session begins: their calls wait for them."""
        for node in self._runtime.published.nodes.values():
            if isinstance(node, Node) and node.kind == "pi.tool":
                for id in self._asked_by(node):
                    self._open[id] = address_of_request(node.conversation, id)
                    self._by_task[node.id] = id

    def _asked_by(self, node: Node) -> Iterable[int]:
        """The request of a call, also where the process died while the call stored its expiry."""
        if node.status is WAITING:
            return () if node.wait is None else node.wait.others
        stored = None
        if node.live and node.woken_by == "deadline":
            stored = self._session.storage.task_checkpoint(node.id)
        if stored is None or stored[0] != "approval":
            return ()
        return (_json.loads_stored(stored[1])["request"],)

    # --- looking -------------------------------------------------------------------------

    def listed(self, below: int | None = None) -> list[PermissionRequest]:
        """The open requests, oldest first; only those below a task or conversation if given."""
        if below is not None and not self._is_known(below):
            raise NotFoundError("task or conversation", show(below))
        found = []
        for id in sorted(self._open):
            value = self._session.doc_value(self._open[id])
            if value is not None and value["state"] == "open":
                request = request_of(value)
                if below is None or is_below(request, below):
                    found.append(request)
        return found

    def _is_known(self, id: int) -> bool:
        storage = self._session.storage
        return is_id(id) and (storage.conversation(id) is not None or storage.task(id) is not None)

    async def find(self, request_id: int) -> PermissionRequest:
        """Any request, by its id.

        Raises:
            NotFoundError: This session has no such request.
        """
        session = self._session
        session.check_readable()
        address = self._open.get(request_id) if is_id(request_id) else None
        if address is None:
            address = await session.blocking.run(stored_address, session.storage, request_id)
        value = None if address is None else session.doc_value(address)
        if value is None:
            raise NotFoundError("permission request", show(request_id))
        return request_of(value)

    # --- deciding ------------------------------------------------------------------------

    def decide(
        self,
        tx: TreeTransaction,
        request_id: int,
        decision: Decision,
        *,
        by: str | None = None,
        principal: str | None = None,
    ) -> PermissionRequest:
        """Stage a decision, if the request can still be decided; else nothing is changed.

        Raises:
            InvalidArgumentError: It is no decision, or none about this subject.
            NotFoundError: There is no such request, or none of this principal.
            AlreadyDecidedError: It is not open any more, or about to be closed.
        """
        decision = check_decision(decision)
        by = None if by is None else check_name(by, "by")
        if principal is not None:
            most = PRINCIPAL_CHARACTERS_MAX
            principal = check_text(principal, "principal", characters_max=most)
        address = self._address(request_id, tx)
        value = None if address is None else tx.doc_value(address)
        if address is None or value is None or principal not in (None, value["principal"]):
            raise NotFoundError("permission request", show(request_id))
        check_fits(decision, value["subject"])
        self._check_open(tx, value)
        if isinstance(decision, Pattern):
            self._give_grant(tx, value, decision, by)
        elif isinstance(decision, Happened):
            self._check_result(value, decision)
        state: RequestState = "granted" if isinstance(decision, GRANTING) else "denied"
        said = encode_decision(decision)
        leave_open(tx, address, state, others=self._maybe_open(), decision=said, by=by)
        return request_of(tx.doc_value(address))

    def _check_open(self, tx: TreeTransaction, value: dict[str, Any]) -> None:
        id, state, reason = value["id"], value["state"], value["closed_reason"]
        expires = value["expires_us"]
        node = tx.view.task(value["task"])
        if state == "open":
            if node is None or not node.live:
                state, reason = "closed", "gone"
            elif node.marked or self._runtime.under_intent(tx.view, node):
                state, reason = "closed", "aborted"
            elif expires is not None and tx.now_us() >= expires:
                state = "expired"
        if state != "open":
            raise AlreadyDecidedError(id, state, reason, value["decided_by"])

    def _give_grant(
        self, tx: TreeTransaction, value: dict[str, Any], decision: Pattern, by: str | None
    ) -> None:
        text = value["text"]
        if not value["matchable"] or chains(text):
            problem = (
                "this call's text chains or substitutes commands, or cannot be shown on one line; "
                "no pattern matches such a text. Decide it with Once() or Deny(text)"
            )
            raise InvalidArgumentError("pattern", problem, show(text))
        if not matches(decision.pattern, text):
            problem = f"it does not match the text of this call, {show(text)}"
            raise InvalidArgumentError("pattern", problem, show(decision.pattern))
        now = tx.now_us()
        expires = None if decision.expires is None else to_us(decision.expires, "expires")
        if expires is not None and expires <= now:
            raise InvalidArgumentError("expires", "it has passed", show(decision.expires))
        grant = Grant(
            id=tx.draw_id(),
            principal=value["principal"],
            tool=value["tool"],
            extension=value["extension"],
            pattern=decision.pattern,
            risk=value["risk"],
            directory=value["directory"],
            request=value["id"],
            by=by,
            created_us=now,
            expires_us=expires,
        )
        add_grant(tx, grant, place=value["place"])

    def _check_result(self, value: dict[str, Any], decision: Happened) -> None:
        """By the tool as it is now; one that is gone declares nothing any more."""
        tool = self._services.resolve(value["conversation"]).tool(value["tool"])
        declared = (lambda _: None) if tool is None else tool.check_structured
        check_result(decision.result, check_structured=declared)

    def expire(self, tx: TreeTransaction, request: PermissionRequest) -> bool:
        """Stage the end of a request that nobody decided in time; False if it was decided."""
        address = address_of_request(request.conversation, request.id)
        if not is_open(tx, address):
            return False
        leave_open(tx, address, "expired", others=self._maybe_open())
        return True

    def _close_of(self, tx: TreeTransaction, node: Node) -> None:
        """The call of a request is to be aborted: whoever decides comes too late."""
        self.close_of(tx, node, "aborted")

    def close_of(self, tx: TreeTransaction, node: Node, reason: ClosedReason) -> None:
        """Close the open request of a call, if it has one."""
        if node.kind != "pi.tool":
            return
        id = self._by_task.get(node.id) or tx.claimed(("permission of", node.id))
        if id is None:
            return
        address = address_of_request(node.conversation, id)
        if is_open(tx, address):
            others = self._maybe_open()
            leave_open(tx, address, "closed", others=others, closed_reason=reason)

    def _maybe_open(self) -> Collection[Address]:
        """Where all requests are that may be open, those of commits that are being stored too."""
        return {**self._open, **self._staged}.values()

    # --- asked by the tasks layer --------------------------------------------------------

    def is_open(self, id: int, tx: TreeTransaction | None) -> bool | None:
        """Whether a request is open; None if there is none of this id."""
        address = self._address(id, tx)
        if address is None:
            return None
        if tx is not None:
            return is_open(tx, address)
        state = self._session.staged_doc(address)
        return state is not None and state.value["state"] == "open"

    def _address(self, id: int, tx: TreeTransaction | None) -> Address | None:
        if not is_id(id):
            return None
        address = self._open.get(id)
        if address is not None:
            return address
        claim = ("permission", id)
        claimed = self._session.staged_claim(claim) if tx is None else tx.claimed(claim)
        if claimed is not None:
            return address_of_request(claimed, id)
        return stored_address(self._session.storage, id)

    def was_settled(self, id: int) -> bool:
        """Whether a stored request is not open any more."""
        storage = self._session.storage
        address = stored_address(storage, id)
        state = None if address is None else _documents.load(storage, address)
        return state is not None and state.value["state"] != "open"

    def needs(self, id: int, tx: TreeTransaction | None) -> Iterable[int]:
        """A person decides, and no task."""
        return ()

    def needed_by(self, task: Node, tx: TreeTransaction | None) -> Iterable[int]:
        """None settles with the end of a task."""
        return ()

    def asks(self, id: int) -> tuple[str, str] | None:
        """What an open request is, and how it is decided."""
        address = self._open.get(id)
        value = None if address is None else self._session.doc_value(address)
        if value is None or value["state"] != "open":
            return None
        return asked_words(request_of(value))

    # --- participant ---------------------------------------------------------------------

    def check_staged(self, tx: Any) -> None:
        """Refuses nothing."""

    def joined(self, tx: Any) -> None:
        """Know what it opens, for the commits that follow it before it is stored."""
        for address, state in tx.docs.items():
            if address.name == _NAME and state is not None and state.value["state"] == "open":
                self._staged[int(address.key)] = address

    def reverted(self) -> None:
        """What was staged is not stored."""
        self._staged.clear()

    def committed(self, tx: Any) -> None:
        settled: list[int] = []
        for address, state in tx.docs.items():
            if address.name != _NAME:
                continue
            id = int(address.key)
            self._staged.pop(id, None)
            value = None if state is None else state.value
            if value is not None and value["state"] == "open":
                self._open[id] = address
                self._by_task[value["task"]] = id
                continue
            self._open.pop(id, None)
            if value is not None and self._by_task.get(value["task"]) == id:
                del self._by_task[value["task"]]
            settled.append(id)
        if settled:
            self._runtime.settled(settled)

    def poisoned(self, error: SessionPoisonedError) -> None:
        """Nobody waits here in memory."""

    def refusing(self, refusing: bool) -> None:
        """The scheduler reports it."""


def asked_words(request: PermissionRequest) -> tuple[str, str]:
    """What an open request is, and how somebody decides it."""
    what = "whether it may run"
    if request.subject == "effect":
        what = "what became of what it had begun"
    text = f"a person, who decides {what} (permission {request.id}, risk {request.risk})"
    return text, f"`pidurable approval show {request.id}` says how to decide it"


def is_below(request: PermissionRequest, id: int) -> bool:
    """Whether a request belongs to a task or conversation, or to what is below it."""
    return id == request.task or any(id == each for _, each in request.path)


# --- as stored, without a session -------------------------------------------------------------


def stored_address(storage: Storage, request_id: object) -> Address | None:
    """Where a request lies, by its id, which is the id of its document; None if there is none."""
    if not is_id(request_id):
        return None
    assert isinstance(request_id, int)
    rows = storage.scan(RecordKind.DOCUMENT, after=(request_id - 1,), limit=1)
    row = DocumentRow(*rows[0]) if rows else None
    if row is None or row.id != request_id or row.name != _NAME:
        return None
    return Address(row.name, row.scope, row.scope_id, row.key)


def stored_request(storage: Storage, request_id: object) -> PermissionRequest | None:
    """A request as it is stored, or None."""
    address = stored_address(storage, request_id)
    state = None if address is None else _documents.load(storage, address)
    return None if state is None else request_of(state.value)


def stored_open_requests(storage: Storage) -> list[PermissionRequest]:
    """The open requests by what is stored, oldest first: the calls that wait tell which."""
    found: dict[int, PermissionRequest] = {}
    for id in _awaited(storage):
        request = stored_request(storage, id)
        if request is not None and request.state == "open":
            found[id] = request
    return [found[id] for id in sorted(found)]


def _awaited(storage: Storage) -> Iterator[int]:
    """What is awaited besides tasks and conversations, by anybody."""
    after = 0
    while waits := storage.waits(after=after, limit=_WAITS_PAGE):
        for task, text in waits:
            try:
                yield from _codec.decode_wait(_json.loads_stored(text)).others
            except NotJsonError as error:
                problem = f"what task {task} waits for cannot be read: {error}"
                raise StorageCorruptError(storage.store, problem) from error
        after = waits[-1][0]
