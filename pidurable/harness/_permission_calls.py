"""The part of a harness that is about permission requests and grants: looking, and deciding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pidurable.agent._grants import Grant, grants_addresses, revoke_grant, stored_grants
from pidurable.agent._permissions import PermissionRequest

if TYPE_CHECKING:
    from pidurable.agent._decisions import Decision
    from pidurable.agent._services import AgentServices
    from pidurable.tasks._runtime import Runtime


class PermissionCalls:
    """What a person, or the interface that speaks for one, does about permissions."""

    def __init__(self, runtime: Runtime, services: AgentServices) -> None:
        self._runtime = runtime
        self._services = services

    def permissions(self, below: int | None = None) -> list[PermissionRequest]:
        """The open permission requests, oldest first, of sub-agents too, however deep.

        Works before `start()`, and starts nothing. Arguments and text were written by a model:
        show them escaped, whole or clearly cut, with the digest, which a decision is bound to.

        Args:
            below: Only those of this task or conversation, and of what is below it.

        Raises:
            NotFoundError: This session has no such task or conversation.
        """
        return self._services.permissions.listed(below)

    async def permission(self, request_id: int) -> PermissionRequest:
        """A permission request by its id, open or not, for as long as its conversation is there.

        Raises:
            NotFoundError: This session has no such request.
        """
        return await self._services.permissions.find(request_id)

    async def decide(
        self,
        request_id: int,
        decision: Decision,
        *,
        by: str | None = None,
        principal: str | None = None,
    ) -> PermissionRequest:
        """Decide a permission request, in one commit; whoever commits first wins.

        The call goes on with it once the harness runs; deciding starts nothing. What then runs is
        what was shown: the tool is looked up again and the hooks are asked again, and if anything
        that the digest covers is another by then, the call asks anew.

        Args:
            request_id: An open request.
            decision: `Once()`, `Pattern(pattern)` or `Deny(text)` about a call; `Rerun()`,
                `Happened(result)` or `Interrupted()` about an effect found after a crash.
            by: Who decides, for the record; 1 to 512 characters.
            principal: On whose behalf: only requests of this principal are there then. None is the
                host itself, which decides all.

        Returns:
            The request, decided.

        Raises:
            AlreadyDecidedError: It is not open any more: decided, expired, or closed because its
                call is being aborted, was asked anew, or is gone. Nothing was changed.
            InvalidArgumentError: This decides nothing, or not this; the request stays open.
            NotFoundError: There is no such request, or none of this principal.
        """
        permissions = self._services.permissions
        decided = await self._runtime.commit(
            lambda tx: permissions.decide(tx, request_id, decision, by=by, principal=principal)
        )
        self._runtime.session.failpoints.hit("CP9")
        return decided

    def grants(self) -> list[Grant]:
        """What was allowed for later calls, of all principals, oldest first; not what expired."""
        session = self._runtime.session
        session.check_readable()
        values = [session.doc_value(each) for each in grants_addresses(session.storage)]
        return stored_grants(values, session.clock.now_us())

    async def revoke(self, grant_id: int) -> Grant:
        """Take a grant back. Calls that it let through have begun; every later one is asked.

        Raises:
            NotFoundError: There is no such grant, or it was revoked before.
        """
        storage = self._runtime.session.storage
        return await self._runtime.commit(lambda tx: revoke_grant(tx, storage, grant_id))
