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
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # two and three character escapes
    r"|(?P<open>\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)\Z)"  # not at its end yet
)
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
        self._held = ""
        parts, position = [], 0
        for found in _SEQUENCE.finditer(text):
            parts.append(text[position : found.start()])
            position = found.end()
            if found["open"] is None:
                continue
            if final or len(found["open"]) > _HELD_MAX:
                parts.append(found["open"])
            else:
                self._held = found["open"]
        text = "".join([*parts, text[position:]])
        if text.endswith("\r") and not final:
            # It may be the first half of a line end.
            text, self._held = text[:-1], "\r" + self._held
        return mark_controls(text.replace("\r\n", "\n"))
