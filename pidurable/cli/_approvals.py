"""`pidurable approval`: what calls ask a person, deciding it, and what was allowed for later calls.

Looking needs no holder. A decision is one commit, made here by holding the store for a moment or by
the process that holds it; whichever decision is first counts, and a late one is told so. What is
shown was written by a model: everything that is not plainly printed is shown as an escape, a cut is
marked, and the digest names what a yes covers, so that nobody says yes to what they did not see.
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import attrs

from pidurable.agent._decisions import Decision, Pattern, encode_decision
from pidurable.agent._grants import Grant
from pidurable.agent._permissions import PermissionRequest, encode_request
from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._forms import show_list, show_records, show_sheets
from pidurable.cli._host import Host
from pidurable.cli._options import Options, check_text
from pidurable.cli._outside import change
from pidurable.cli._render import (
    CELL_CHARS_MAX,
    clean_line,
    compact_json,
    duration,
    escaped,
    holder_lines,
    moment,
)
from pidurable.cli._sessions import BUNDLED, bring_up_to_date
from pidurable.cli._task_writes import say_how_to_go_on
from pidurable.cli._tasks import check_store
from pidurable.errors import AlreadyDecidedError, InvalidArgumentError, NotFoundError
from pidurable.harness._client import Client
from pidurable.harness._open import Harness
from pidurable.harness._reader import Reader, open_reader

__all__ = [
    "asked_lines",
    "decide_requests",
    "list_grants",
    "list_requests",
    "revoke_grants",
    "show_requests",
    "who_decides",
]

ARGUMENTS_CHARS_MAX = 4_000
"""Of the arguments on a sheet; `-o json` shows them whole."""
_LIST_HINT = "`pidurable approval list` shows what waits."
_GRANTS_HINT = "`pidurable approval grants` shows what is allowed."


def who_decides() -> str:
    """The name of this user, for the record."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"  # a user id without a name, as in a container


# --- looking ----------------------------------------------------------------------------------


async def list_requests(host: Host, options: Options, *, below: int | None) -> int:
    """List what waits for a person, oldest first."""
    check_store(options.store)
    async with open_reader(options.store) as reader:
        if below is not None:
            await reader.tree(below, limit=1)  # refuses what is neither a task nor a conversation
        requests = await reader.permissions(below)
        holder = await reader.holder()
    now = host.now_us()
    header = ("ID", "RISK", "ASKS", "TOOL", "TASK", "WAITS", "EXPIRES", "WHAT")
    if not show_list(
        *(host, options, requests),
        id=_id,
        json=encode_request,
        header=header,
        row=lambda request: _row(request, now),
    ):
        return Exit.DONE
    if not requests:
        host.err("nothing waits for a person")
    else:
        host.err(f"  next: `{options.command('approval', 'show', 'ID')}` shows all of one, then")
        host.err(f"        `{options.command('approval', 'approve', 'ID')}` or deny")
    host.say(holder_lines(holder))
    return Exit.DONE


def _id(shown: PermissionRequest | Grant) -> int:
    return shown.id


def _row(request: PermissionRequest, now_us: int) -> tuple[str, ...]:
    expires = "-"
    if request.expires_us is not None:
        left = (request.expires_us - now_us) / 1e6
        expires = f"in {duration(left)}" if left > 0 else f"{duration(-left)} ago"
    return (
        str(request.id),
        request.risk,
        request.subject,
        request.tool,
        str(request.task),
        duration((now_us - request.created_us) / 1e6),
        expires,
        compact_json(request.text, chars_max=CELL_CHARS_MAX),
    )


async def show_requests(host: Host, options: Options, ids: Sequence[int]) -> int:
    """Show all of some requests, open or not."""
    check_store(options.store)
    async with open_reader(options.store) as reader:
        requests = [await _found(reader, id) for id in ids]
        holder = await reader.holder()
    now = host.now_us()
    if show_sheets(
        *(host, options, requests),
        id=_id,
        json=encode_request,
        sheet=lambda request: _sheet(request, options, now),
    ):
        host.say(holder_lines(holder))
    return Exit.DONE


async def _found(reader: Reader, id: int) -> PermissionRequest:
    try:
        return await reader.permission(id)
    except NotFoundError as error:
        raise NotFoundError(error.kind, error.id, _LIST_HINT) from error


def _sheet(request: PermissionRequest, options: Options, now_us: int) -> list[str]:
    """The lines of one request, a fact a line."""
    facts: list[tuple[str, str]] = [
        ("state", _overdue(request, now_us) or _state(request)),
        ("asks", _question(request)),
        ("risk", _risk(request)),
        ("tool", f"{request.tool} of {request.extension}" if request.extension else request.tool),
        ("text", compact_json(request.text, chars_max=ARGUMENTS_CHARS_MAX)),
        ("arguments", compact_json(request.arguments, chars_max=ARGUMENTS_CHARS_MAX)),
        ("digest", request.digest),
        ("directory", compact_json(request.directory)),
        ("boundary", request.boundary),
        ("call", f"task {request.task}, in conversation {request.conversation}"),
        ("below", " > ".join(f"{kind} {id}" for kind, id in request.path)),
        ("asked", f"{moment(request.created_us)}, {_ago(request.created_us, now_us)} ago"),
    ]
    if request.expires_us is not None:
        facts.append(("expires", moment(request.expires_us)))
    if request.principal:
        facts.append(("principal", compact_json(request.principal)))
    if request.decided_us is not None:
        by = "" if request.decided_by is None else f" by {clean_line(request.decided_by)}"
        facts.append(("decided", f"{moment(request.decided_us)}{by}"))
    if request.decision is not None:
        facts.append(("decision", compact_json(encode_decision(request.decision))))
    lines = [f"permission {request.id}"]
    most = 2 * ARGUMENTS_CHARS_MAX
    lines += [f"  {name:<10} {clean_line(value, chars_max=most)}" for name, value in facts]
    if request.state == "open" and _overdue(request, now_us) is None:
        lines += _next_lines(request, options)
    return lines


def _overdue(request: PermissionRequest, now_us: int) -> str | None:
    """What to say of an open request that is too late to decide: nobody has looked at it since."""
    expires_us = request.expires_us
    if request.state != "open" or expires_us is None or now_us < expires_us:
        return None
    late = _ago(expires_us, now_us)
    return f"open, but its time was over {late} ago: it expires when the session is run again"


def _ago(at_us: int, now_us: int) -> str:
    return duration((now_us - at_us) / 1e6)


def _state(request: PermissionRequest) -> str:
    reason = f" ({request.closed_reason})" if request.closed_reason else ""
    return f"{request.state}{reason}"


def _risk(request: PermissionRequest) -> str:
    """How risky it is, and why: a hook says so, and may quote what a model wrote."""
    return (
        f"{request.risk}: {clean_line(escaped(request.reason))}" if request.reason else request.risk
    )


def _question(request: PermissionRequest) -> str:
    if request.subject == "call":
        return "may this call run?"
    return "the process died while this ran: what became of it?"


def asked_lines(
    request: PermissionRequest, options: Options, *, with_commands: bool = True
) -> list[str]:
    """What is said where a call begins to wait: what it wants, and what decides it."""
    where = ""
    below = [id for kind, id in request.path if kind == "conversation"]
    if len(below) > 1:
        where = f", in conversation {request.conversation} below {', '.join(map(str, below[:-1]))}"
    tool = clean_line(request.tool, chars_max=64)
    return [
        f"permission {request.id}: task {request.task} ({tool}) waits for a person{where}",
        f"  asks       {_question(request)}",
        f"  arguments  {compact_json(request.arguments)}",
        f"  risk       {_risk(request)}",
        f"  digest     {request.digest[:16]}",
        *(_next_lines(request, options) if with_commands else ()),
    ]


def _next_lines(request: PermissionRequest, options: Options) -> list[str]:
    id = str(request.id)
    ways: list[tuple[str, ...]] = [("approve", id), ("deny", id, "TEXT")]
    if request.subject == "effect":
        happened = ("decide", id, "happened", "--result", "TEXT")
        ways = [("decide", id, "rerun"), happened, ("decide", id, "interrupted")]
    commands = [f"`{clean_line(options.command('approval', *way))}`" for way in ways]
    return [
        f"  {'next:' if number == 0 else '  or '} {command}"
        for number, command in enumerate(commands)
    ]


# --- deciding ---------------------------------------------------------------------------------


async def decide_requests(
    host: Host, options: Options, ids: Sequence[int], decision: Decision, *, by: str | None
) -> int:
    """Decide some requests alike, each in a commit of its own, in the order given.

    One that cannot be decided so is told, and the others are decided; what was is always shown.
    """
    by = who_decides() if by is None else check_text(by, "--by")
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        requests = [await _found(reader, id) for id in ids]
    for request in requests:
        _check_subject(request, decision, options)
    decided: list[PermissionRequest] = []
    stored_here = False
    try:
        for request in requests:
            try:
                made, here = await _decide(host, options, request.id, decision, by)
            except (AlreadyDecidedError, InvalidArgumentError) as error:
                if len(requests) == 1:
                    raise
                host.err(f"permission {request.id} was not decided: {error}", "yellow")
                continue
            decided.append(made)
            stored_here = stored_here or here
    except BaseException:
        # Whatever ends this: who decided something is to know that it counts.
        if decided:
            _show_decided(host, options, decided, stored_here=stored_here)
        raise
    _show_decided(host, options, decided, stored_here=stored_here)
    return Exit.DONE if len(decided) == len(requests) else Exit.FAILED


def _show_decided(
    host: Host, options: Options, decided: Sequence[PermissionRequest], *, stored_here: bool
) -> None:
    for_people = show_records(
        host, options, decided, id=_id, json=encode_request, lines=_decided_line
    )
    if for_people and stored_here:
        say_how_to_go_on(host, options)
        _say_what_to_load(host, options, decided)


def _say_what_to_load(host: Host, options: Options, decided: Sequence[PermissionRequest]) -> None:
    """Name the extensions without whose tools what was granted does not run."""
    named = {request.extension for request in decided if request.state == "granted"}
    missing = sorted(named - {"", BUNDLED.rpartition(".")[2]})
    if missing and not options.extensions:
        names = ", ".join(compact_json(name, chars_max=64) for name in missing)
        host.err(f"  load {names} with it (`--extension PATH`): without its tool no call is run")


async def _decide(
    host: Host, options: Options, id: int, decision: Decision, by: str
) -> tuple[PermissionRequest, bool]:
    async def own(harness: Harness) -> tuple[PermissionRequest, bool]:
        return await harness.decide(id, decision, by=by), True

    async def ask(client: Client, command: str) -> tuple[PermissionRequest, bool]:
        decided = await client.decide(id, decision, by=by, key=command, timeout=options.timeout)
        return decided, False

    return await change(host, options, own=own, ask=ask)


def _check_subject(request: PermissionRequest, decision: Decision, options: Options) -> None:
    """Point at the verb that fits, where a request is about something else."""
    kind = encode_decision(decision)["kind"]
    fits = kind in ("once", "pattern", "deny")
    if fits and request.subject != "call":
        raise UsageError(
            f"permission {request.id} is about a call that a crash interrupted, so a yes or a no "
            "says nothing",
            f"`{options.command('approval', 'decide', str(request.id), 'rerun')}`, or "
            "`happened --result TEXT`, or `interrupted`",
        )
    if not fits and request.subject == "call":
        raise UsageError(
            f"permission {request.id} is about a call that has not begun",
            f"`{options.command('approval', 'approve', str(request.id))}`, or `deny`",
        )


def _decided_line(request: PermissionRequest) -> str:
    tool = clean_line(request.tool, chars_max=64)
    what = f"permission {request.id} ({tool}, task {request.task}) {request.state}"
    decision = request.decision
    if isinstance(decision, Pattern):
        until = "until it is revoked"
        if decision.expires is not None:
            until = f"until {decision.expires.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
        pattern = compact_json(decision.pattern, chars_max=CELL_CHARS_MAX)
        what += f", and later calls that match {pattern}, {until}"
    return f"{what}; digest {request.digest[:16]}"


def expiry(host: Host, age: timedelta | None) -> datetime | None:
    """The moment at which a grant ends that is given now."""
    if age is None:
        return None
    return datetime.fromtimestamp(host.now_us() / 1e6, UTC) + age


# --- grants -----------------------------------------------------------------------------------


async def list_grants(host: Host, options: Options) -> int:
    """List what was allowed for later calls."""
    check_store(options.store)
    async with open_reader(options.store) as reader:
        grants = await reader.grants()
    header = ("ID", "TOOL", "RISK", "USES", "EXPIRES", "DIRECTORY", "PATTERN")
    for_people = show_list(
        host, options, grants, id=_id, json=attrs.asdict, header=header, row=_grant_row
    )
    if for_people and not grants:
        host.err("nothing is allowed for later calls")
    return Exit.DONE


def _grant_row(grant: Grant) -> tuple[str, ...]:
    return (
        str(grant.id),
        grant.tool,
        f"up to {grant.risk}",
        str(grant.uses),
        moment(grant.expires_us),
        compact_json(grant.directory, chars_max=CELL_CHARS_MAX),
        compact_json(grant.pattern, chars_max=CELL_CHARS_MAX),
    )


async def revoke_grants(host: Host, options: Options, ids: Sequence[int]) -> int:
    """Take some grants back, each in a commit of its own."""
    check_store(options.store)
    await bring_up_to_date(options.store)
    async with open_reader(options.store) as reader:
        known = {grant.id for grant in await reader.grants()}
    for id in ids:
        if id not in known:
            raise NotFoundError("grant", id, _GRANTS_HINT)
    revoked: list[Grant] = []
    try:
        for id in ids:
            revoked.append(await _revoke(host, options, id))
    except BaseException:
        if revoked:
            _show_revoked(host, options, revoked)
        raise
    _show_revoked(host, options, revoked)
    return Exit.DONE


def _show_revoked(host: Host, options: Options, revoked: Sequence[Grant]) -> None:
    show_records(host, options, revoked, id=_id, json=attrs.asdict, lines=_revoked_line)


def _revoked_line(grant: Grant) -> str:
    tool = clean_line(grant.tool, chars_max=64)
    return f"grant {grant.id} of {tool} revoked, after {grant.uses} uses"


async def _revoke(host: Host, options: Options, id: int) -> Grant:
    async def own(harness: Harness) -> Grant:
        return await harness.revoke(id)

    async def ask(client: Client, command: str) -> Grant:
        return await client.revoke(id, key=command, timeout=options.timeout)

    return await change(host, options, own=own, ask=ask)
