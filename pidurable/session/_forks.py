"""Forks: what a new conversation starts with, besides the history that it shares.

A fork is a row that names its parent and the last entry of the parent's history that counts. The
documents are copied by what is stored beside them, never by their classes: `initial` ones are left
behind, `current` ones as the parent has them when the forking body ends, `as_of` ones as they were
after the commit of the entry that was asked for, in the conversation that it stands in, or as now,
where a fork of now was asked for. What stands at an
address when the fork commits decides which of the three it is; where nothing stands there any more,
what stood there then decides. Holds at all times:

* a document of a fork is copied once: at the end of the body, or when the body first looks at it,
  so that a body may go on to work on its own fork;
* what is copied is stored as a first base with the version that it had, so that its class, if it is
  ever there, migrates the copy as it would have migrated the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set

import attrs

from pidurable.errors import NotFoundError
from pidurable.records._entries import Conversation
from pidurable.session._documents import Address, DocState, load, load_as_of
from pidurable.storage import DocumentRow, Storage

CONVERSATION_SCOPE = 1

Lineage = list[tuple[int, int | None]]
"""(conversation, first entry id that no longer counts), from the newest up."""


@attrs.define(eq=False)
class Fork:
    """A fork that a body has made, until its documents are copied."""

    id: int
    parent: int
    home: int
    """The conversation that the fork entry stands in: the parent, or one that it was forked from"""
    seq: int | None
    """The commit of the entry that was asked for; None where none was, so that `as_of` is now."""
    settled: set[Address] = attrs.Factory(set)
    """Which of its addresses have what they start with."""
    sources: Sources | None = None
    """What was read for it, if it was read beforehand."""


@attrs.define(eq=False)
class Sources:
    """What the storage has of the documents that a fork may start with. Read at one commit."""

    policies: dict[Address, str] | None = None
    """Of the parent's living documents; None: not read."""
    past_policies: dict[Address, str] | None = None
    """Of what lived at the fork entry, in the conversation that this stands in; None: not read."""
    living: dict[Address, DocState | None] = attrs.Factory(dict)
    past: dict[Address, DocState | None] = attrs.Factory(dict)


def read_sources(storage: Storage, fork: Fork, known: Set[Address]) -> Sources:
    """Read what a fork copies, but for the documents that are known already. Runs in a thread.

    What was not kept of the past is left out: whoever asks for it is told.
    """
    policies = policies_of(storage.documents(CONVERSATION_SCOPE, fork.parent))
    found = Sources(policies=policies)
    now = ("current",) if fork.seq is not None else ("current", "as_of")
    for address, policy in policies.items():
        if policy in now and address not in known:
            found.living[address] = load(storage, address)
    if fork.seq is not None:
        found.past_policies = policies_of(storage.documents_as_of(fork.home, seq=fork.seq))
        for address, policy in found.past_policies.items():
            if policies.get(address._replace(scope_id=fork.parent), policy) == "as_of":
                with contextlib.suppress(NotFoundError):
                    found.past[address] = load_as_of(
                        storage, address, fork.seq, moment=f"commit {fork.seq}"
                    )
    return found


def lineage(conversation_id: int, find: Callable[[int], Conversation]) -> Lineage:
    """The conversations whose entries make up a history, and how far each one counts.

    Args:
        conversation_id: Whose history.
        find: Gives the record of a conversation, and raises where there is none.
    """
    chain: Lineage = [(conversation_id, None)]
    current = find(conversation_id)
    bound: int | None = None
    # A fork of a conversation that had no history names no entry, and shares nothing with it.
    while current.parent is not None and current.parent_entry is not None:
        # A fork of a fork counts its grandparent only as far as both forks do.
        cut = current.parent_entry + 1
        bound = cut if bound is None else min(bound, cut)
        chain.append((current.parent, bound))
        current = find(current.parent)
    return chain


def is_counted(chain: Lineage, entry_id: int, home: int) -> bool:
    """Whether an entry, which stands in `home`, belongs to a history."""
    return any(member == home and (cut is None or entry_id < cut) for member, cut in chain)


def policies_of(rows: Sequence[DocumentRow]) -> dict[Address, str]:
    """What a fork does with each of some documents, by their rows."""
    return {Address(row.name, row.scope, row.scope_id, row.key): row.fork for row in rows}
