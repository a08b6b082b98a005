"""The approval phase of `pi.tool`: what is asked, whether an answer covers it, how a call waits.

A call that needs a person parks with a request that has all of what it would do: the digest covers
the tool (extension, name, schema, description, replay policy, version), the final arguments, the
principal, and where it would work. On a yes everything is found out anew, and the yes counts only
for the same digest, at no higher risk. So what runs is what was shown, whatever was reloaded,
restarted or rewritten in between.

A grant that was given with a pattern is looked for in the commit that would store the intent; its
use is stored there too, as a request that was granted at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import attrs

from pidurable.agent._call_records import Approval, Execute
from pidurable.agent._decisions import Deny
from pidurable.agent._grants import RISKS, place_of, use_grant
from pidurable.agent._hooks import Ask
from pidurable.agent._output import clean_output
from pidurable.agent._permissions import (
    NOBODY_WAITS,
    Asked,
    PermissionRequest,
    Subject,
    has_returned_above,
    note_use,
    open_request,
    supersede,
)
from pidurable.agent._tool_result import FinalResult, error_result
from pidurable.errors import show
from pidurable.records import _json
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX, MIB
from pidurable.records._moments import LAST_US
from pidurable.records._readonly import copied_json
from pidurable.tasks._errors import bounded, error_info

if TYPE_CHECKING:
    from pidurable.agent._services import Agent, AgentServices
    from pidurable.registry._tool import Tool
    from pidurable.tasks._context import TaskContext
    from pidurable.tasks._transaction import TaskTransaction

SHOWN_BYTES_MAX: Final = MIB
"""Of the arguments as JSON, and of their text: what is larger is shown to nobody in full."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def describe(
    services: AgentServices,
    ctx: TaskContext[Any, Any, Any],
    *,
    subject: Subject,
    agent: Agent,
    tool: Tool[..., Any] | None,
    arguments: Any,
    ask: Ask,
) -> Asked | FinalResult:
    """All that a person is asked about a call; a result for the model where that is impossible.

    Of an effect that was found, also the tool and its directory may be gone.
    """
    directory = boundary = ""
    try:
        env = services.env_for(ctx.conversation_id, agent)
        directory, boundary = _named(env.root), _boundary(env)
    except Exception as raised:
        if ctx.passes(raised):
            raise
        if subject == "call":
            info = error_info(raised)
            why = f"{info.type}: {info.message}"
            return error_result("blocked", f"The call was not run: it has no place to work. {why}")
    text, matchable = _permission_text(ctx, tool, arguments)
    size = max(len(_dumps(arguments)), len(_dumps(text)))
    if size > SHOWN_BYTES_MAX:
        return not_shown(
            f"its arguments take {size} bytes, of which {SHOWN_BYTES_MAX} can be shown"
        )
    principal = services.session.conversation(ctx.conversation_id).principal
    limits = (ctx.settings.permission_seconds_max, ask.seconds)
    tool_digest = "" if tool is None else tool.digest()
    return Asked(
        subject=subject,
        tool=ctx.input.name,
        extension="" if tool is None else tool.extension,
        arguments=arguments,
        text=text,
        matchable=matchable,
        digest=_digest(tool_digest, arguments, principal, directory, boundary),
        place=place_of(tool=tool_digest, directory=directory, boundary=boundary),
        directory=directory,
        boundary=boundary,
        risk=ask.risk,
        reason=bounded(clean_output(ask.reason), ERROR_MESSAGE_BYTES_MAX),
        principal=principal,
        expires_us=_expiry(services.session.clock.now_us(), limits),
    )


def not_shown(why: str) -> FinalResult:
    """The result of a call that nobody can be asked for."""
    text = f"The call was not run: it needs a person's permission, and {why}."
    return error_result("invalid_arguments", f"{text} Make it smaller.")


def _named(root: object) -> str:
    """A working directory as it is stored, also where its name is no text."""
    return os.fsencode(str(root)).decode(errors="backslashreplace").replace("\0", "")


def _expiry(now_us: int, limits: Iterable[float | None]) -> int | None:
    """The moment at which the shortest of some times is over; None where there is none."""
    seconds = min((each for each in limits if each is not None), default=math.inf)
    if seconds > (LAST_US - now_us) / 1e6:
        return None
    return now_us + round(seconds * 1e6)


def _boundary(env: Any) -> str:
    """What keeps an environment in: as it says itself, else its class."""
    said = getattr(env, "boundary", None)
    if isinstance(said, str):
        return clean_output(said)
    cls = type(env)
    return f"{cls.__module__}.{cls.__qualname__}"


def _permission_text(
    ctx: TaskContext[Any, Any, Any], tool: Tool[..., Any] | None, arguments: Mapping[str, Any]
) -> tuple[str, bool]:
    """The text that patterns match; where the tool's own code fails, none matches."""
    if tool is None:
        return _dumps(arguments), False
    try:
        # Copied: whatever it does to them, what is shown is what runs.
        text = tool.permission_for(copied_json(arguments))
        if not isinstance(text, str):
            raise TypeError(f"permission_text returned {show(text)}, not a str")
        # What cannot be stored as it is was never seen as it is.
        if _json.check_json(text, "$.text") == text:
            return text, True
    except Exception as raised:
        if ctx.passes(raised):
            raise
        info = error_info(raised)
        ctx.report(f"permission_text of tool {tool.name!r} raised {info.type}: {info.message}")
    return _dumps(arguments), False


def _digest(tool: str, arguments: Any, principal: str, directory: str, boundary: str) -> str:
    facts = {
        "tool": tool,
        "arguments": arguments,
        "principal": principal,
        "directory": directory,
        "boundary": boundary,
    }
    return hashlib.sha256(_dumps(facts).encode()).hexdigest()


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def covers(given: PermissionRequest, asked: Asked) -> bool:
    """Whether a yes holds for what would run now: the same digest, at no higher risk."""
    return (
        given.state == "granted"
        and given.subject == asked.subject
        and given.digest == asked.digest
        and RISKS[asked.risk] <= RISKS[given.risk]
    )


async def ask(
    ctx: TaskContext[Any, Any, Any],
    asked: Asked,
    *,
    intent: Execute,
    before: PermissionRequest | None = None,
) -> bool:
    """Let a stored grant answer, or park the call until a person does. One commit either way.

    Args:
        ctx: The call's.
        asked: What is asked.
        intent: The checkpoint of the call that a grant lets by.
        before: A yes that does not cover the call as it is now.

    Returns:
        True: a grant covers the call, and its intent is stored. False: it is parked, or it is to be
        aborted because nobody waits for it any more.

    Raises:
        NotJsonError, DocumentTooLargeError: The request cannot be stored: too deep, or too large
            for the settings of the host.
    """
    task, conversation = int(ctx.task_id), ctx.conversation_id
    async with ctx.commit() as tx:
        if before is not None:
            asked = _asked_again(asked, before)
            supersede(tx, before)
        grant = None
        if asked.matchable:
            grant = use_grant(
                tx,
                principal=asked.principal,
                tool=asked.tool,
                place=asked.place,
                risk=asked.risk,
                text=asked.text,
            )
        if grant is not None:
            note_use(tx, task=task, conversation=conversation, asked=asked, grant=grant)
            tx.goto(intent)
            return True
        if has_returned_above(tx, task):
            # Not even an answer would come to anybody; what a grant lets run goes on.
            tx.mark(task, NOBODY_WAITS)
            return False
        _park(tx, task=task, conversation=conversation, asked=asked)
        return False


async def park(
    ctx: TaskContext[Any, Any, Any],
    asked: Asked,
    *,
    effect: Execute,
    before: PermissionRequest | None = None,
) -> None:
    """Ask a person what became of an effect that was found after a crash. No grant answers that."""
    async with ctx.commit() as tx:
        if before is not None:
            asked = _asked_again(asked, before)
            supersede(tx, before)
        _park(
            tx,
            task=int(ctx.task_id),
            conversation=ctx.conversation_id,
            asked=asked,
            effect=effect,
        )


def _asked_again(asked: Asked, before: PermissionRequest) -> Asked:
    """The same with why a person is asked once more: what is not as it was when they said yes."""
    facts = ("arguments", "principal", "directory", "boundary")
    changed = [name for name in facts if getattr(asked, name) != getattr(before, name)]
    if RISKS[asked.risk] > RISKS[before.risk]:
        changed.append("risk")
    why = f"Asked again after permission {before.id}: changed is {', '.join(changed or ['tool'])}."
    reason = bounded(f"{asked.reason}\n{why}".lstrip(), ERROR_MESSAGE_BYTES_MAX)
    return attrs.evolve(asked, reason=reason)


def _park(
    tx: TaskTransaction[Any, Any],
    *,
    task: int,
    conversation: int,
    asked: Asked,
    effect: Execute | None = None,
) -> None:
    id = open_request(tx, task=task, conversation=conversation, asked=asked)
    tx.wait(
        then=Approval(request=id, effect=effect),
        on=[id],
        deadline=_moment(asked.expires_us),
    )


async def answered(
    services: AgentServices, ctx: TaskContext[Any, Any, Any], at: Approval
) -> PermissionRequest | None:
    """The request of a call that has woken, decided or expired; None where it waits on.

    It expires here, in a commit that looks at it once more: a decision that came first counts.
    """
    permissions = services.permissions
    request = await permissions.find(at.request)
    if request.state != "open":
        return request
    expires = request.expires_us
    if expires is None or services.session.clock.now_us() < expires:
        # The clock was set back meanwhile.
        await ctx.wait(then=at, on=[at.request], deadline=_moment(expires))
        return None
    async with ctx.commit() as tx:
        permissions.expire(tx, request)
    return await permissions.find(at.request)


def denied(request: PermissionRequest) -> FinalResult:
    """What the model is told of a call that may not run."""
    if request.state == "expired":
        text = "The call was not run: nobody decided the request for permission in time."
        return error_result("permission_expired", text)
    if request.state == "closed":
        why = request.closed_reason
        text = f"The call was not run: its request for permission was closed ({why})."
        return error_result("denied", text)
    said = request.decision.text.strip() if isinstance(request.decision, Deny) else ""
    text = "A person denied this call, and it was not run."
    return error_result("denied", f"{text} They said: {said}" if said else text)


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else _EPOCH + timedelta(microseconds=at_us)


__all__ = ["answered", "ask", "covers", "denied", "describe", "not_shown", "park"]
