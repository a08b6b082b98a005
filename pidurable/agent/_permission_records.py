"""Permission requests as records: what is stored of one, and what who asks for it gets."""

from __future__ import annotations

from typing import Any, Final, Literal

import attrs

from pidurable.agent._decisions import (
    Decision,
    decode_decision,
    encode_decision,
)
from pidurable.agent._hooks import Risk
from pidurable.records._messages import JsonValue
from pidurable.records._readonly import copied_json
from pidurable.session._documents import Address, document

Subject = Literal["call", "effect"]
RequestState = Literal["open", "granted", "denied", "expired", "closed"]
ClosedReason = Literal["aborted", "superseded", "gone"]

PERMISSION: Final = "pi.permission"
_CONVERSATION: Final = 1


@document(PERMISSION, family=True)
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
    decision = copied_json(value["decision"])
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
    return Address(PERMISSION, _CONVERSATION, conversation_id, str(request_id))


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
