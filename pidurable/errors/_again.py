"""Errors after which the same is tried again, waited for, or done on a store opened anew."""

from __future__ import annotations

import attrs
import trio

from pidurable.errors._root import PidurableError


@attrs.define(eq=False)
class WaitTimeoutError(PidurableError, trio.TooSlowError):
    """The time ran out. Nothing durable changed; waiting again is fine."""

    what: str
    timeout: float  # seconds
    hint: str = ""
    key: str = ""
    """Of the command that was not answered: under it one can wait again, or withdraw it."""

    def __str__(self) -> str:
        tail = f". {self.hint}" if self.hint else ""
        return f"{self.what} had not happened after {self.timeout:g} s{tail}"


@attrs.define(eq=False)
class StorageRefusedError(PidurableError):
    """The storage refused the commit for certain (disk full, busy). Nothing of it was stored."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} refused the commit: {self.problem}. Nothing of it was stored."


@attrs.define(eq=False)
class StorageHeldError(PidurableError):
    """Another process holds this store. Nothing was changed; opening again is safe."""

    store: str
    pid: int
    host: str
    heartbeat_age: float  # seconds

    def __str__(self) -> str:
        return (
            f"{self.store} is held by process {self.pid} on {self.host} (last heartbeat "
            f"{self.heartbeat_age:.1f} s ago). Stop it, or open with takeover=True if it hangs."
        )


@attrs.define(eq=False)
class CommitBodyTimeoutError(PidurableError):
    """The body of a commit took too long and was cancelled. It was not stored."""

    seconds: float
    place: str = ""

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return (
            f"a commit body took longer than {self.seconds:g} s{where} and was cancelled. "
            "Do slow work before the commit."
        )


@attrs.define(eq=False)
class SessionPoisonedError(PidurableError):
    """The session cannot tell what is stored and serves nothing more. Reopen the store."""

    store: str
    cause: str

    def __str__(self) -> str:
        cause = self.cause.rstrip(".")
        return f"the session on {self.store} is unusable: {cause}. Close it and open it again."


@attrs.define(eq=False)
class HolderLostError(SessionPoisonedError):
    """Another process took this store over. Nothing of this one can be stored any more."""

    store: str
    cause: str = attrs.field(init=False)
    epoch: int = 0
    current: int = 0

    def __attrs_post_init__(self) -> None:
        self.cause = (
            f"another process took it over (epoch {self.epoch} was replaced by {self.current})"
        )


@attrs.define(eq=False)
class SessionClosedError(PidurableError):
    """The session is closed or closing. Open the store again."""

    store: str = "the session"

    def __str__(self) -> str:
        return f"{self.store} is closed"
