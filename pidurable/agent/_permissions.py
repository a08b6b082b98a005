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

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pidurable.agent._decisions import (
    GRANTING,
    Decision,
    Happened,
    Pattern,
    check_decision,
    check_fits,
    check_result,
    encode_decision,
)
from pidurable.agent._grants import Grant, add_grant, chains, matches
from pidurable.agent._permission_records import (
    PERMISSION,
    Asked as Asked,
    ClosedReason,
    PermissionDocument as PermissionDocument,
    PermissionRequest as PermissionRequest,
    RequestState,
    Subject as Subject,
    address_of_request,
    asked_words as asked_words,
    encode_request as encode_request,
    is_below as is_below,
    request_of as request_of,
)
from pidurable.agent._permission_steps import (
    is_open,
    leave_open,
    note_use as note_use,
    open_request as open_request,
    supersede as supersede,
)
from pidurable.agent._stored_permissions import (
    stored_address,
    stored_open_requests as stored_open_requests,
    stored_request as stored_request,
)
from pidurable.errors import (
    AlreadyDecidedError,
    InvalidArgumentError,
    NotFoundError,
    show,
)
from pidurable.records import _json
from pidurable.records._checks import check_name, check_text, is_id
from pidurable.records._readonly import copied_json
from pidurable.session import _documents
from pidurable.session._documents import Address
from pidurable.session._participants import Participant
from pidurable.session._transaction import PRINCIPAL_CHARACTERS_MAX
from pidurable.tasks._tree import COMPLETING, WAITING, Node
from pidurable.tasks._tree_transaction import TreeTransaction, to_us

if TYPE_CHECKING:
    from pidurable.agent._services import AgentServices
    from pidurable.tasks._runtime import Runtime


NOBODY_WAITS = "its caller has returned, and nobody waits for it"


def _is_nested_below(path: list[list[Any]], call: int) -> bool:
    """Whether nothing but calls is between a call and what is below it."""
    ids = [id for _, id in path]
    return call in ids and all(kind == "pi.tool" for kind, _ in path[ids.index(call) :])


def has_returned_above(tx: TreeTransaction, task: int) -> bool:
    """Whether a call, or a nested call that it is below of, was made by one that has returned."""
    node = tx.view.task(task)
    while node is not None and node.owner is not None:
        node = tx.view.task(node.owner)
        if node is None or node.kind != "pi.tool":
            return False
        if node.status is COMPLETING:
            return True
    return False


class Permissions(Participant):
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
        # Copied: the document keeps what it is given, and a result may hold JSON of the host's.
        said = copied_json(encode_decision(decision))
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

    def give_up_below(self, tx: TreeTransaction, call: int) -> None:
        """Abort the nested calls of a call that has returned which have only asked a person so far.

        Nobody is left to hear of them, and a yes would run them for nobody; but their caller, and
        with it the run, would wait for one.
        """
        for address in list(self._maybe_open()):
            value = tx.doc_value(address)
            if (
                value is not None
                and value["state"] == "open"
                and value["subject"] == "call"
                and _is_nested_below(value["path"], call)
            ):
                tx.mark(value["task"], NOBODY_WAITS)

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

    def joined(self, tx: Any) -> None:
        """Know what it opens, for the commits that follow it before it is stored."""
        for address, state in tx.docs.items():
            if address.name == PERMISSION and state is not None and state.value["state"] == "open":
                self._staged[int(address.key)] = address

    def reverted(self) -> None:
        """What was staged is not stored."""
        self._staged.clear()

    def committed(self, tx: Any) -> None:
        settled: list[int] = []
        for address, state in tx.docs.items():
            if address.name != PERMISSION:
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
