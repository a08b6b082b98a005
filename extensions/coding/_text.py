"""Bytes of files and programs as text for a model: nothing lost in silence, nothing that acts.

UTF-8; what is not UTF-8 becomes U+FFFD. Sequences that steer a terminal (colours, titles, links)
are dropped; single control characters become their pictures (NUL is shown as U+2400), so that they
can be seen and stored. Characters are never cut by a border between two chunks.
"""

from __future__ import annotations

import codecs
import re

_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC: titles, links, payloads
    r"|\x1b[ -/]*[0-Z\\^-~]"  # two and three character escapes
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?\Z")
_HELD_MAX = 4096
"""Longest unfinished sequence that is held back; what goes on longer is shown as it is."""

_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (0x09, 0x0A, 0x0D)}
_PICTURES[0x7F] = 0x2421


def mark_controls(text: str) -> str:
    """Replace control characters, other than tab and line ends, by their pictures."""
    return text.translate(_PICTURES)


def looks_binary(data: bytes) -> bool:
    """Return whether the start of a file shows that it holds no UTF-8 text."""
    return b"\0" in data[:8192] or data[:2] in (b"\xff\xfe", b"\xfe\xff")


class OutputText:
    """Turns the output of a program into text, chunk by chunk."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Return the text that is complete by now.

        Args:
            data: The next bytes.
            final: Nothing follows: give what was held back too.
        """
        text = self._held + self._decoder.decode(data, final)
        text = _SEQUENCE.sub("", text)
        self._held = ""
        if not final:
            # A sequence, or the line end of a terminal, may go on in the next chunk.
            start = text.rfind("\x1b", max(0, len(text) - _HELD_MAX))
            if start >= 0 and text[start - 1 : start] == "\x1b":
                start -= 1
            if start >= 0 and _UNFINISHED.match(text, start):
                text, self._held = text[:start], text[start:]
            elif text.endswith("\r"):
                text, self._held = text[:-1], "\r"
        return mark_controls(text.replace("\r\n", "\n"))
