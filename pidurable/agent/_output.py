"""Output: text from tools, made storable and bounded before anything keeps it.

Holds for whatever comes in: no control characters but tab and newline, no lone surrogates, at most
so many bytes and lines. What is dropped is counted, and the kept text says so.
"""

from __future__ import annotations

from typing import Literal

Keep = Literal["head", "tail"]

_NOT_SHOWN = "[more output is not shown while so many calls run]"

_KEPT_CONTROLS = {9, 10}
_REMOVED = {code: None for code in (*range(32), *range(127, 160)) if code not in _KEPT_CONTROLS}


def clean_output(text: str) -> str:
    """Text that can be stored and shown: no control characters, no lone surrogates."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n").translate(_REMOVED)
    try:
        plain.encode()
    except UnicodeEncodeError:
        # By way of UTF-16, so that the two halves of a pair become the character they stand for.
        return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return plain


def _surely_fits(text: str, bytes_max: int, lines_max: int) -> bool:
    """Whether a text is within limits, however its characters are encoded.

    Four bytes a character at most: the exact count is taken only where it may matter.
    """
    return len(text) <= bytes_max // 4 and text.count("\n") < lines_max


class OutputCollector:
    """Keeps the head or the tail of an output, bounded in bytes and lines, and counts the rest."""

    def __init__(self, *, bytes_max: int, lines_max: int, keep: Keep) -> None:
        self._bytes_max = bytes_max
        self._lines_max = lines_max
        self._head = keep == "head"
        self._text = ""
        self.dropped_bytes = 0

    def add(self, text: str) -> None:
        """Take more output."""
        text = clean_output(text)
        if self._head and self.dropped_bytes:
            self.dropped_bytes += len(text.encode())
            return
        self._text += text
        if not _surely_fits(self._text, self._bytes_max, self._lines_max):
            self._cut()

    def _cut(self) -> None:
        lines = self._text.split("\n")
        if len(lines) > self._lines_max and (len(lines) > self._lines_max + 1 or lines[-1]):
            # A newline at the very end closes the last line and begins none.
            ended = 0 if lines[-1] else 1
            kept = (
                "\n".join(lines[: self._lines_max]) + "\n"
                if self._head
                else "\n".join(lines[-self._lines_max - ended :])
            )
            self._drop_to(kept)
        raw = self._text.encode()
        if len(raw) > self._bytes_max:
            part = raw[: self._bytes_max] if self._head else raw[-self._bytes_max :]
            # Where the cut went through a character, its remains are dropped too.
            self._drop_to(part.decode(errors="ignore"))

    def _drop_to(self, kept: str) -> None:
        self.dropped_bytes += len(self._text.encode()) - len(kept.encode())
        self._text = kept

    def text(self) -> str:
        """What is kept, without a mark."""
        return self._text

    def text_within(self, bytes_max: int) -> str:
        """What is kept, or that part of it which fits, with a mark at the cut."""
        if len(self._text) <= bytes_max // 4:
            return self._text
        raw = self._text.encode()
        if len(raw) <= bytes_max:
            return self._text
        part = (raw[:bytes_max] if self._head else raw[-bytes_max:]).decode(errors="ignore")
        return f"{part}\n{_NOT_SHOWN}" if self._head else f"{_NOT_SHOWN}\n{part}"

    def marked(self) -> str:
        """What is kept, with a line that says how much is not."""
        if not self.dropped_bytes:
            return self._text
        note = f"[{self.dropped_bytes} bytes of output were dropped]"
        if not self._head:
            return f"{note}\n{self._text}"
        return f"{self._text}{note}" if self._text.endswith("\n") else f"{self._text}\n{note}"


def bounded_output(text: str, *, bytes_max: int, lines_max: int, keep: Keep) -> str:
    """A whole text, cleaned and cut to a tool's limits with a mark."""
    text = clean_output(text)
    if _surely_fits(text, bytes_max, lines_max):
        return text
    collector = OutputCollector(bytes_max=bytes_max, lines_max=lines_max, keep=keep)
    collector.add(text)
    return collector.marked()
