"""Asking the holder of a session: a command is handed in, and its answer is looked for.

A command that waits already, or has its answer, is not handed in again; an answer that cannot come
any more is told apart from one that has not come yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import trio

from pidurable.errors import (
    AnswerGoneError,
    RequestIdConflictError,
    StorageRefusedError,
    WaitTimeoutError,
)
from pidurable.harness._commands import is_forgotten
from pidurable.harness._reader import Reader
from pidurable.records._checks import check_name, check_timeout
from pidurable.records._commands import Command, drawn_key, encode_command, read_answer
from pidurable.records._json import VALUE_BYTES_MAX
from pidurable.session._blobs import with_blobs
from pidurable.session._seams import Blocking, Clock, SystemRandomness
from pidurable.storage import CommandBox, CommandPlace, CommandRow, SqliteStorage, Storage

_LOOK_SECONDS_MIN = 0.01
_LOOK_SECONDS_MAX = 0.2
_LOOKS_PER_QUESTION = 5
"""So often the store is asked for an answer before the box is asked where the command is."""


class CommandAsking:
    """What every method of a client does with its command."""

    def __init__(self, storage: Storage, *, blocking: Blocking, clock: Clock) -> None:
        self._storage = with_blobs(storage)
        self._blocking = blocking
        self._clock = clock
        self.reader = Reader(cast("SqliteStorage", storage), blocking=blocking, clock=clock)
        """For looking at what the commands did."""

    def _draw_key(self) -> str:
        return drawn_key(self._clock.now_us(), SystemRandomness().uuid())

    async def _ask(
        self,
        kind: str,
        content: dict[str, Any],
        key: str | None,
        timeout: float | None,  # noqa: ASYNC109
    ) -> Any:
        key = self._draw_key() if key is None else check_name(key, "key")
        check_timeout(timeout)  # before anything is handed in
        head = await self._blocking.run(self._storage.head)
        command = Command(
            id=key,
            kind=kind,
            content=content,
            session=head.uuid,
            at_us=self._clock.now_us(),
        )
        text = encode_command(command, bytes_max=VALUE_BYTES_MAX)
        row = await self._blocking.run(self._hand_in, key, text)
        looks = 0

        async def answered() -> CommandRow | None:
            nonlocal looks
            looks += 1
            question = looks % _LOOKS_PER_QUESTION == 0
            return await self._blocking.run(self._look, key, question)

        if row is None:
            row = await looked_for(answered, timeout)
        if row is None:
            assert timeout is not None
            raise await self._not_seen(key, timeout)
        if row.digest != command.digest:
            raise RequestIdConflictError(key, 0, f"a command of the kind {row.kind!r}")
        return read_answer(key, row.answer)

    def _hand_in(self, key: str, text: str) -> CommandRow | None:
        """Hand in a command, unless it waits or has its answer, which is returned."""
        box: CommandBox = self._storage.command_box
        place = box.find(key)
        row = self._storage.command(key)
        if row is None and place in (None, "set_aside"):
            self._check_remembered(key)
            box.hand_in(key, text)
        return row

    def _check_remembered(self, key: str) -> None:
        if is_forgotten(self._storage, key):
            raise AnswerGoneError(key, False)

    def _look(self, key: str, question: bool) -> CommandRow | None:
        """The answer, if there is one; with a question also whether there can still be one."""
        row = self._storage.command(key)
        if row is not None or not question:
            return row
        place: CommandPlace | None = self._storage.command_box.find(key)
        if place in ("waiting", "taken"):
            return None
        row = self._storage.command(key)
        if row is None:
            self._check_remembered(key)
            problem = (
                f"command {key!r} was withdrawn by somebody"
                if place is None
                else f"command {key!r} cannot be read by the holder, which has set it aside"
            )
            raise StorageRefusedError(self._storage.store, problem)
        return row

    async def _not_seen(self, key: str, seconds: float) -> WaitTimeoutError:
        place = await self._blocking.run(self._storage.command_box.find, key)
        seen = (
            "It was taken up and may be applied at any moment"
            if place == "taken"
            else "It was not seen yet, and waits"
        )
        hint = await self._who_holds(f"{seen}.", f"{seen} until somebody opens the store.")
        return WaitTimeoutError(f"the answer to command {key!r}", seconds, hint, key)

    async def _who_holds(self, held: str, free: str) -> str:
        """Who could act, in words."""
        holder = await self.reader.holder()
        if holder is None or holder.state in ("released", "dead"):
            return f"No process holds {self._storage.store}. {free}"
        record = holder.record
        silent = ", which is silent" if holder.state == "silent" else ""
        return f"Process {record.pid} on {record.host} holds {self._storage.store}{silent}. {held}"


async def looked_for(look: Callable[[], Any], timeout: float | None) -> Any:  # noqa: ASYNC109
    """Look again and again until something is found; None when the time is up.

    The first look is made whatever the timeout.
    """
    until = trio.current_time() + check_timeout(timeout)
    pause = _LOOK_SECONDS_MIN
    while True:
        found = await look()
        now = trio.current_time()
        if found is not None or now >= until:
            return found
        await trio.sleep(min(pause, until - now))
        pause = min(pause * 1.5, _LOOK_SECONDS_MAX)
