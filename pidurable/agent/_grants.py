"""Grants: what a person has allowed for later calls, by a pattern.

A grant belongs to one principal and lies in a document of the session, so that no conversation can
carry it along, and a fork has none. It is for one tool as it was then (another digest is another
tool), in the directory and boundary it was given in, up to the risk that was shown. Whether it
counts is asked anew at each call, in the commit that would begin it: hooks that block now, or that
see a higher risk, are not overruled by what was allowed before.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

import attrs

from pidurable.agent._hooks import Risk
from pidurable.errors import NotFoundError, show
from pidurable.session._documents import Address, definition_of, document
from pidurable.session._transaction import Transaction
from pidurable.storage import Storage

RISKS: Final[dict[str, int]] = {"low": 0, "medium": 1, "high": 2}

_SESSION: Final = 0
_KEY_CHARACTERS_MAX: Final = 500

# What a shell takes for more than the words of one command, outside of quotes or in double ones. A
# text is not parsed: a character within quotes is refused too, which asks once more than needed.
_CHAINING: Final = (";", "&", "|", "`", "$(", "${", "<", ">")


@document("pi.grants", scope="session", family=True)
@attrs.define(kw_only=True)
class GrantsDocument:
    """The grants of one principal."""

    principal: str = ""
    grants: list[Any] = attrs.Factory(list)
    """One object a grant; see `Grant`, whose fields they are, with `place` besides."""


@attrs.frozen(kw_only=True)
class Grant:
    """A permission for later calls of one tool, given with a pattern decision."""

    id: int
    principal: str
    tool: str
    extension: str
    pattern: str
    risk: Risk
    """The highest risk that it covers: that of the request it was given for."""
    directory: str
    """The working directory that it is for."""
    request: int
    """The permission request whose decision gave it."""
    by: str | None
    """Who gave it."""
    created_us: int
    expires_us: int | None
    uses: int = 0
    """Calls that it let through. Each has a permission request of its own that names the grant."""
    used_us: int | None = None


def chains(text: str) -> bool:
    """Tell whether a text could be more than one command, or not be what it looks like.

    Such a text matches no pattern: it holds `;`, `&`, `|`, a backtick, `$(`, `${`, a redirect, a
    line break, or another character that is not printed.
    """
    return not text.isprintable() or any(mark in text for mark in _CHAINING)


def matches(pattern: str, text: str) -> bool:
    """Tell whether a pattern allows a text: `*` any characters, `?` one, `\\` takes the next as is.

    What stands between two stars is looked for once, from the left: an earlier place leaves no
    less to what follows. So what a model writes cannot make this slow: the line of commits waits.
    """
    if chains(text):
        return False
    first, *middle = _parts(pattern)
    if not middle:
        return len(first) == len(text) and _found(first, text, 0) == 0
    last = middle.pop()
    end = len(text) - len(last)
    if len(first) > end or _found(first, text, 0, len(first)) != 0:
        return False
    if _found(last, text, end) != end:
        return False
    at = len(first)
    for part in middle:
        place = _found(part, text, at, end)
        if place < 0:
            return False
        at = place + len(part)
    return True


def _parts(pattern: str) -> list[list[str]]:
    """What stands between the stars of a pattern: characters, and an empty text for `?`."""
    parts: list[list[str]] = [[]]
    quoted = False
    for character in pattern:
        if not quoted and character == "\\":
            quoted = True
            continue
        if not quoted and character == "*":
            parts.append([])
        else:
            parts[-1].append("" if not quoted and character == "?" else character)
        quoted = False
    if quoted:
        parts[-1].append("\\")
    return parts


def _found(part: list[str], text: str, start: int, end: int | None = None) -> int:
    """The first place of a part in a text, between two places of it; -1 where it has none."""
    if "" not in part:
        return text.find("".join(part), start, end)
    places = re.compile("".join(re.escape(each) or "." for each in part), re.DOTALL)
    found = places.search(text, start, len(text) if end is None else end)
    return -1 if found is None else found.start()


def place_of(*, tool: str, directory: str, boundary: str) -> str:
    """What a grant is bound to: the tool's digest, and where it works."""
    return hashlib.sha256("\0".join((tool, directory, boundary)).encode()).hexdigest()


# --- the document -----------------------------------------------------------------------------


def address_of_grants(principal: str) -> Address:
    """Where the grants of a principal lie."""
    key = f"principal:{principal}"
    if len(key) > _KEY_CHARACTERS_MAX:
        key = f"sha256:{hashlib.sha256(principal.encode()).hexdigest()}"
    return Address("pi.grants", _SESSION, 0, key)


def _grants(tx: Transaction, principal: str) -> list[Any]:
    value = tx.doc_value(address_of_grants(principal))
    return [] if value is None else list(value["grants"])


def _put(tx: Transaction, principal: str, grants: list[Any]) -> None:
    address = address_of_grants(principal)
    if tx.doc_value(address) is None:
        tx.put_doc(
            definition_of(GrantsDocument), address, {"principal": principal, "grants": grants}
        )
        return
    op = {"op": "replace", "path": "/grants", "value": grants}
    tx.patch_doc(definition_of(GrantsDocument), address, [op])


def add_grant(tx: Transaction, grant: Grant, *, place: str) -> None:
    """Give a grant, and forget the ones that have expired."""
    now = tx.now_us()
    kept = [each for each in _grants(tx, grant.principal) if not _expired(each, now)]
    made = {**attrs.asdict(grant), "place": place}
    _put(tx, grant.principal, [*kept, made])


def use_grant(
    tx: Transaction, *, principal: str, tool: str, place: str, risk: str, text: str
) -> int | None:
    """Find the grant that covers a call and note its use; None where there is none.

    In the commit that begins the call, so that one that was revoked a moment ago lets nothing by.
    """
    now = tx.now_us()
    for index, each in enumerate(_grants(tx, principal)):
        if (
            each["tool"] == tool
            and each["place"] == place
            and RISKS[risk] <= RISKS[each["risk"]]
            and not _expired(each, now)
            and matches(each["pattern"], text)
        ):
            path = f"/grants/{index}"
            ops = [
                {"op": "replace", "path": f"{path}/uses", "value": each["uses"] + 1},
                {"op": "replace", "path": f"{path}/used_us", "value": now},
            ]
            tx.patch_doc(definition_of(GrantsDocument), address_of_grants(principal), ops)
            found: int = each["id"]
            return found
    return None


def revoke_grant(tx: Transaction, storage: Storage, grant_id: object) -> Grant:
    """Take a grant back: no call that has not begun may use it.

    Raises:
        NotFoundError: There is no such grant, or it was revoked before.
    """
    for address in _addresses(storage):
        value = tx.doc_value(address) or {"principal": "", "grants": []}
        for each in value["grants"]:
            if each["id"] == grant_id and type(grant_id) is int:
                kept = [one for one in value["grants"] if one is not each]
                _put(tx, value["principal"], kept)
                return _grant_of(each)
    raise NotFoundError("grant", show(grant_id))


def _addresses(storage: Storage) -> list[Address]:
    return [
        Address(row.name, row.scope, row.scope_id, row.key)
        for row in storage.documents(_SESSION, 0)
        if row.name == "pi.grants"
    ]


def stored_grants(values: list[Any], now_us: int) -> list[Grant]:
    """The grants of documents that have not expired, by id."""
    found = [
        _grant_of(each)
        for value in values
        if value is not None
        for each in value["grants"]
        if not _expired(each, now_us)
    ]
    return sorted(found, key=lambda grant: grant.id)


def grants_addresses(storage: Storage) -> list[Address]:
    """Where grants lie, of all principals."""
    return _addresses(storage)


def _grant_of(value: dict[str, Any]) -> Grant:
    known = {field.name for field in attrs.fields(Grant)}
    return Grant(**{name: given for name, given in value.items() if name in known})


def _expired(value: dict[str, Any], now_us: int) -> bool:
    expires = value["expires_us"]
    return expires is not None and now_us >= expires
