"""What a commit does to the documents of the forks that it makes: see `_forks` for the rules.

An address of a fork is settled when the body first looks at it, else when the body has ended. What
has to be read for that is read in a thread where the body may await; a body that awaits nothing has
it read when it is needed.
"""

from __future__ import annotations

from typing import Any

from pidurable.errors import NotFoundError
from pidurable.session._document_work import DocumentWork
from pidurable.session._documents import Address, DocState, Terms
from pidurable.session._forks import (
    CONVERSATION_SCOPE,
    Fork,
    Sources,
    policies_of,
    read_sources,
)
from pidurable.session._seams import logger


class ForkWork(DocumentWork):
    """The part of a transaction that gives forks their documents."""

    async def prepare(self) -> None:
        for fork in self._forks.values():
            await self._read_for(fork)
        await super().prepare()

    async def _read_for(self, fork: Fork) -> None:
        """Read what a fork may start with, once. The line is held, so it stays as it is."""
        if fork.sources is None and not self._is_staged(fork):
            session = self._session
            found = await session.blocking.run(
                read_sources, session.storage, fork, session.cached_docs()
            )
            session.keep_docs(found.living)
            fork.sources = found

    async def _fetch(self, address: Address) -> None:
        fork = self._forks.get(address.scope_id)
        if fork is not None and address.scope == CONVERSATION_SCOPE:
            # Nothing is stored of it yet: it begins with what the parent has, or had.
            await self._read_for(fork)
            await self._fetch(address._replace(scope_id=fork.parent))
        else:
            await super()._fetch(address)

    def _is_staged(self, fork: Fork) -> bool:
        """Whether a fork stands on what is not stored yet, so that nothing can be read for it."""
        published = self._session.line.published_seq
        return fork.parent in self._forks or (fork.seq is not None and fork.seq > published)

    def _settle(self, address: Address) -> None:
        fork = self._forks.get(address.scope_id)
        if fork is not None and address.scope == CONVERSATION_SCOPE:
            self._settle_as(fork, address, None)

    def _settle_as(self, fork: Fork, address: Address, policy: str | None) -> None:
        if address in fork.settled:
            return
        fork.settled.add(address)
        inherited = self._inherited(fork, address, policy)
        if inherited is not None:
            self._put(address, *inherited)

    def _inherited(
        self, fork: Fork, address: Address, policy: str | None
    ) -> tuple[Terms, Any] | None:
        """What an address of a fork starts with, as the parent stands in this body so far.

        Args:
            fork: The fork.
            address: One of its own.
            policy: Of what stands, or stood, at the parent's; None: look.
        """
        source = address._replace(scope_id=fork.parent)
        if policy is None:
            living = self._drafted(source)
            policy = None if living is None else living[0].fork
        if policy == "current" or (policy == "as_of" and fork.seq is None):
            return self._drafted(source)
        if policy == "initial" or fork.seq is None:
            return None
        past = self._drafted_as_of(fork, address._replace(scope_id=fork.home), fork.seq)
        if past is None or (policy is None and past[0].fork != "as_of"):
            return None
        return past

    def _drafted(self, address: Address) -> tuple[Terms, Any] | None:
        """What stands at an address, with what a draft of it holds by now."""
        for draft in self._drafts:
            if draft.address == address:
                self._compare(draft)
        return self._standing(address)

    def _drafted_as_of(self, fork: Fork, address: Address, seq: int) -> tuple[Terms, Any] | None:
        """What stood at an address after the commit of the fork entry, which may be this one."""
        if seq == self.seq:
            return self._drafted(address)
        state: DocState | None
        if fork.sources is not None and address in fork.sources.past:
            state = fork.sources.past[address]
        else:
            try:
                state = self._session.staged_doc_as_of(address, seq)
            except NotFoundError as unkept:
                # Its class had another history policy then. That is no reason to fork nothing.
                logger.warning("a fork starts without a document: %s", unkept)
                return None
        return None if state is None else (state.terms, state.value)

    def _copy_documents(self, fork: Fork) -> None:
        """Settle every address of a fork that has something to start with."""
        sources = fork.sources or Sources()
        policies = self._policies(fork.parent, sources.policies)
        if fork.seq is not None and (fork.seq, fork.home) != (self.seq, fork.parent):
            past = sources.past_policies
            if past is None:
                past = (
                    self._policies(fork.home)
                    if fork.seq == self.seq
                    else self._session.staged_policies_as_of(fork.home, fork.seq)
                )
            for address, policy in past.items():
                policies.setdefault(address._replace(scope_id=fork.parent), policy)
        # A conversation may have thousands that stay behind, as requests that are settled do.
        copied = [address for address, policy in policies.items() if policy != "initial"]
        for address in sorted(copied):
            self._settle_as(fork, address._replace(scope_id=fork.id), policies[address])

    def _policies(
        self, conversation_id: int, stored: dict[Address, str] | None = None
    ) -> dict[Address, str]:
        """What a fork does with each document of a conversation, as staged so far.

        Args:
            conversation_id: Whose documents.
            stored: What the storage says, where it has been asked already.
        """
        scope = (CONVERSATION_SCOPE, conversation_id)
        if stored is None:
            stored = policies_of(self._session.storage.documents(*scope))
        found = dict(stored)
        for address, state in self._session.staged_doc_changes(*scope):
            if state is None:
                found.pop(address, None)
            else:
                found[address] = state.fork
        for address in self._retired:
            found.pop(address, None)
        for address, pending in self._pending.items():
            if (address.scope, address.scope_id) == scope:
                found[address] = pending.terms.fork
        return found
