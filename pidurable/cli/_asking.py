"""Asking the person at the terminal, while a run goes on: one open request after the other.

What is typed counts for the request on the screen and for no other: what was typed before it stood
there, or in its first half second, is thrown away, and a request that somebody else decides
meanwhile is put away with what was typed for it. End of input (Ctrl-D) stops the asking; the
requests stay open. Nothing here is durable but the decision, which is one commit.
"""

from __future__ import annotations

import contextlib
import os
import termios
from collections.abc import Callable
from typing import TextIO

import attrs
import trio
import trio.lowlevel

from pidurable.agent._decisions import Decision, Deny, Happened, Interrupted, Once, Rerun
from pidurable.agent._permissions import PermissionRequest
from pidurable.cli._approvals import who_decides
from pidurable.cli._host import Host
from pidurable.cli._render import clean_line
from pidurable.errors import AlreadyDecidedError, InvalidArgumentError, NotFoundError
from pidurable.harness._open import Harness

__all__ = ["Asking", "decision_of", "may_ask"]

DEAF_SECONDS = 0.5
LINE_BYTES_MAX = 64 * 1024
NOBODY = "Nobody can be asked: this was started with --no-questions."

NEARLY_CHARACTERS_MAX = 4
"""Of a word that may be a slip of the finger; a longer one is what somebody means to say."""

_CALL_PROMPT = "y: yes, this once; n: no; anything else is a no with that text to the model > "
_EFFECT_PROMPT = "r: run it again; i: nobody knows; h TEXT: it happened, with this result > "


def may_ask(host: Host) -> bool:
    """Whether a person is there: both what is typed and what is shown is a terminal."""
    return host.is_terminal(host.stdin) and host.is_terminal(host.stderr)


def decision_of(request: PermissionRequest, line: str) -> Decision | None:
    """What a typed line decides; None where it decides nothing.

    Any text is a no with that text, but for a short word that is nearly a yes or a no: who has
    typed `yse` has not said no.
    """
    text = line.strip()
    word = text.lower()
    if request.subject == "call":
        if word in ("y", "yes"):
            return Once()
        if word in ("n", "no"):
            return Deny()
        return None if not text or is_nearly(word) else Deny(text)
    if word in ("r", "rerun"):
        return Rerun()
    if word in ("i", "interrupted"):
        return Interrupted()
    return Happened(text[2:].strip()) if word.startswith("h ") else None


def is_nearly(word: str) -> bool:
    """Whether a lower-case word is nearly "yes" or "no", and neither."""
    bare = word.rstrip(".,!?")
    if not bare or len(bare) > NEARLY_CHARACTERS_MAX or not bare.isalpha():
        return False
    return bare[0] in "yn" or any(_one_slip(bare, meant) for meant in ("yes", "no"))


def _one_slip(typed: str, meant: str) -> bool:
    """Whether one letter too many, too few or wrong, or two that changed places, is all."""
    slips = {meant[:i] + meant[i + 1 :] for i in range(len(meant))}
    slips |= {meant[:i] + meant[i : i + 2][::-1] + meant[i + 2 :] for i in range(len(meant))}
    wrong = len(typed) == len(meant) and sum(map(str.__ne__, typed, meant)) == 1
    many = any(typed[:i] + typed[i + 1 :] == meant for i in range(len(typed)))
    return wrong or many or typed in slips


def no_answer(request: PermissionRequest) -> Decision:
    """What stands for an answer where nobody may be asked: nothing is run."""
    return Deny(NOBODY) if request.subject == "call" else Interrupted()


@attrs.define(eq=False)
class Asking:
    """Asks for the open requests of a run, at a terminal or never (`--no-questions`)."""

    host: Host
    harness: Harness
    open_requests: Callable[[], dict[int, PermissionRequest]]
    """What is open, the oldest first, as whoever follows the events knows it."""
    moved: Callable[[], trio.Event]
    """The event that is set when that changes."""
    pause: Callable[[bool], None]
    """Takes the live display away while somebody types, and gives it back."""
    asks: bool
    """Whether there is anybody. Ends with the end of input."""
    answers_itself: bool = False

    async def serve(self) -> None:
        """Ask for one after the other, for as long as somebody answers."""
        while self.asks or self.answers_itself:
            moved = self.moved()
            request = next(iter(self.open_requests().values()), None)
            if request is None:
                await moved.wait()
            elif self.answers_itself:
                await self._decide(request, no_answer(request), "--no-questions")
            else:
                await self._ask(request)

    async def _ask(self, request: PermissionRequest) -> None:
        self.pause(True)
        left = True
        try:
            decision = await self._typed(request)
            left = False
        finally:
            if left:
                self._say("\n")  # the question stands there, and nobody has ended its line
            self.pause(False)
        if decision is not None:
            await self._decide(request, decision, who_decides())

    async def _typed(self, request: PermissionRequest) -> Decision | None:
        """The decision that somebody types; None where the request went away, or nobody types."""
        found: list[Decision] = []
        async with trio.open_nursery() as nursery:

            async def gone() -> None:
                while request.id in self.open_requests():
                    await self.moved().wait()
                self._say(f"\npermission {request.id} is not open any more\n")
                nursery.cancel_scope.cancel()

            nursery.start_soon(gone)
            while not found and self.asks:
                prompt = _CALL_PROMPT if request.subject == "call" else _EFFECT_PROMPT
                self._say(f"permission {request.id}: {prompt}")
                await trio.sleep(DEAF_SECONDS)
                _forget_typed(self.host.stdin)
                line = await read_line(self.host.stdin)
                if line is None:
                    self._say("\nnot asking any more: the requests stay open\n")
                    self.asks = False
                    break
                decision = decision_of(request, line)
                if decision is not None:
                    found.append(decision)
                elif request.subject == "call" and line.strip():
                    self._say(f"{clean_line(line.strip(), chars_max=20)!r} is neither y nor n\n")
            nursery.cancel_scope.cancel()
        return found[0] if found else None

    async def _decide(self, request: PermissionRequest, decision: Decision, by: str) -> None:
        try:
            await self.harness.decide(request.id, decision, by=by)
        except (AlreadyDecidedError, NotFoundError):
            pass  # the events tell what became of it
        except InvalidArgumentError as error:
            self.host.err(f"permission {request.id} was not decided: {error}", "yellow")
            await trio.lowlevel.checkpoint()
            return
        # The events say so a moment later; until then it is not asked again.
        while request.id in self.open_requests():
            await self.moved().wait()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.host.stderr.write(text)
            self.host.stderr.flush()


async def read_line(stream: TextIO) -> str | None:
    """Read one line without a thread that could not be stopped; None at the end of input."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        line = await trio.to_thread.run_sync(stream.readline, abandon_on_cancel=True)
        return line or None
    data = b""
    while not data.endswith(b"\n") and len(data) < LINE_BYTES_MAX:
        await trio.lowlevel.wait_readable(number)
        piece = os.read(number, 4096)
        if not piece:
            return data.decode(errors="replace") if data else None
        data += piece
    return data.decode(errors="replace")


def _forget_typed(stream: TextIO) -> None:
    """Throw away what was typed and not read yet."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        termios.tcflush(stream.fileno(), termios.TCIFLUSH)
