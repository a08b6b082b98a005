"""Commands from outside in memory: the reference for what `CommandBox` means.

Handles on the same data share what waits; each of them remembers for itself what it was given.
"""

from __future__ import annotations

import threading
from typing import final

import attrs

from pidurable.errors import StorageRefusedError
from pidurable.records._limits import COMMAND_BYTES_MAX, COMMANDS_WAITING_MAX
from pidurable.storage._contract import CommandPlace, TakenCommand


@attrs.define(eq=False)
class WaitingCommand:
    """One command that was handed in and has not been forgotten."""

    id: str
    text: str
    place: CommandPlace = "waiting"


@attrs.define(eq=False)
class Waiting:
    """What waits for a session, shared by all handles on it."""

    commands: dict[str, WaitingCommand] = attrs.Factory(dict)
    """By name, in order of arrival."""
    arrived: int = 0
    """How many ever came: names count them."""
    mutex: threading.Lock = attrs.Factory(threading.Lock)


@final
class MemoryCommandBox:
    """The commands of one session in memory. See `CommandBox`."""

    def __init__(self, store: str, waiting: Waiting) -> None:
        self._store = store
        self._waiting = waiting
        self._given: set[str] = set()
        self._seen = -1

    def hand_in(self, id: str, text: str) -> None:
        """Leave a command for the holder. See `CommandBox`."""
        size = len(text.encode())
        if size > COMMAND_BYTES_MAX:
            raise StorageRefusedError(
                self._store, f"a command of {size} bytes, at most {COMMAND_BYTES_MAX} are taken"
            )
        waiting = self._waiting
        with waiting.mutex:
            count = sum(each.place != "set_aside" for each in waiting.commands.values())
            if count >= COMMANDS_WAITING_MAX:
                raise StorageRefusedError(
                    self._store, f"{count} commands wait for a holder already, the most allowed"
                )
            waiting.arrived += 1
            waiting.commands[f"{waiting.arrived}"] = WaitingCommand(id, text)

    def withdraw(self, id: str) -> bool:
        """Take a command back. See `CommandBox`."""
        with self._waiting.mutex:
            commands = self._waiting.commands
            found = [
                name for name, each in commands.items() if each.id == id and each.place == "waiting"
            ]
            for name in found:
                del commands[name]
            return bool(found)

    def find(self, id: str) -> CommandPlace | None:
        """Tell where a command stands. See `CommandBox`."""
        with self._waiting.mutex:
            places = {each.place for each in self._waiting.commands.values() if each.id == id}
        order: tuple[CommandPlace, ...] = ("taken", "waiting", "set_aside")
        return next((place for place in order if place in places), None)

    def has_news(self) -> bool:
        """Tell cheaply whether `take` may find something. See `CommandBox`."""
        return self._waiting.arrived != self._seen

    def take(self, *, limit: int = 1_000) -> list[TakenCommand]:
        """Take what waits, in order of arrival. See `CommandBox`."""
        taken: list[TakenCommand] = []
        with self._waiting.mutex:
            for name, each in self._waiting.commands.items():
                if each.place == "set_aside" or name in self._given:
                    continue
                if len(taken) >= limit:
                    return taken
                each.place = "taken"
                self._given.add(name)
                taken.append(TakenCommand(name=name, text=each.text, problem=""))
            self._seen = self._waiting.arrived
        return taken

    def forget(self, name: str) -> None:
        """Remove a command that has its answer. See `CommandBox`."""
        with self._waiting.mutex:
            self._waiting.commands.pop(name, None)
        self._given.discard(name)

    def set_aside(self, name: str) -> str:
        """Put away what is no command. See `CommandBox`."""
        with self._waiting.mutex:
            if name in self._waiting.commands:
                self._waiting.commands[name].place = "set_aside"
        self._given.discard(name)
        return name
