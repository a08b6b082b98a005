"""The `read`, `write` and `edit` tools: text files below the working directory.

What a tool cannot do it says in words that a model can act on: the nearest name, the line, the
count. Such answers are error results, not raised errors: nothing has gone wrong with the call.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

import attrs

from pidurable import Env, ToolCall, ToolResult, display_path, nearest_name, tool
from pidurable.errors import InvalidArgumentError

from ._text import looks_binary, mark_controls

CHUNK_BYTES = 1024 * 1024
SCAN_BYTES_MAX = 64 * CHUNK_BYTES
"""How far a file is read to find a line."""

SHOWN_BYTES_MAX = 48 * 1024
"""A little below the limit of a tool's output, so that the remark at the end fits."""

LINE_BYTES_MAX = 8 * 1024
EDIT_BYTES_MAX = 16 * CHUNK_BYTES
DIFF_CHARS_MAX = 16 * 1024
SIMILAR_LINES_MAX = 5_000
NAMES_SHOWN = 20


def _path_text(arguments: Any) -> str:
    return str(arguments["path"])


@tool(replay="safe", permission_text=_path_text, reach={"private", "untrusted"})
async def read(path: str, call: ToolCall, *, offset: int = 0, limit: int = 2000) -> ToolResult:
    """Read a text file.

    Long files are read in parts: the answer says where to go on. Bytes that are not UTF-8 are
    shown as U+FFFD, control characters as pictures.

    Args:
        path: File to read, relative to the working directory.
        offset: First line, counted from 0.
        limit: Most lines to return.
    """
    if offset < 0 or limit < 1:
        return _refuse(f"offset must be at least 0 and limit at least 1, got {offset} and {limit}")
    try:
        head = await call.env.read_bytes(path, limit=8192)
        if looks_binary(head):
            return await _refuse_binary(path, head, call)
        window = _Window(offset, limit)
        position = 0
        while not window.done and position < SCAN_BYTES_MAX:
            chunk = await call.env.read_bytes(path, offset=position, limit=CHUNK_BYTES)
            if not chunk:
                window.finish()
                break
            position += window.feed(chunk)
        if window.done and not await call.env.read_bytes(path, offset=position, limit=1):
            window.finish()
    except (OSError, InvalidArgumentError) as error:
        return await _explain(error, path, call.env)
    return window.result(path)


@attrs.define(eq=False)
class _Window:
    """The lines of a file that were asked for, gathered in bounded memory."""

    offset: int
    limit: int
    number: int = 0
    """The line that is being read."""
    lines: list[bytes] = attrs.Factory(list)
    size: int = 0
    line: bytes = b""
    line_bytes: int = 0
    done: bool = False
    """All that was asked for, or all that fits, is there."""
    ended: bool = False
    """The end of the file was seen."""

    def feed(self, chunk: bytes) -> int:
        """Take the next bytes; return how many of them were needed."""
        start = 0
        while not self.done:
            end = chunk.find(b"\n", start)
            self._extend(chunk[start : end if end >= 0 else len(chunk)])
            if end < 0:
                return len(chunk)
            self._close_line()
            start = end + 1
        return start

    def _extend(self, part: bytes) -> None:
        self.line_bytes += len(part)
        if self.number >= self.offset and len(self.line) < LINE_BYTES_MAX:
            self.line += part[: LINE_BYTES_MAX - len(self.line)]

    def _close_line(self) -> None:
        if self.number >= self.offset:
            cut = self.line_bytes - len(self.line)
            line = self.line + (b" [%d bytes more in this line]" % cut if cut else b"")
            if self.size + len(line) > SHOWN_BYTES_MAX and self.lines:
                self.done = True
                return
            self.lines.append(line)
            self.size += len(line) + 1
        self.number += 1
        self.line, self.line_bytes = b"", 0
        if self.number >= self.offset + self.limit:
            self.done = True

    def finish(self) -> None:
        """Take notice that the file has ended."""
        if self.line_bytes and not self.done:
            self._close_line()
        # A line is still open only if it did not fit any more.
        self.ended = self.line_bytes == 0

    def result(self, path: str) -> ToolResult:
        name = display_path(path)
        if not self.lines:
            if not self.ended:
                problem = (
                    f"line {self.offset} of {name} lies beyond the first {SCAN_BYTES_MAX} bytes"
                )
                return _refuse(f"{problem}; use bash, for example sed -n")
            if self.number == 0:
                return ToolResult(f"[{name} is empty]")
            return _refuse(f"{name} has {self.number} lines; offset {self.offset} is past its end")
        windows = sum(line.endswith(b"\r") for line in self.lines)
        text = b"\n".join(line.removesuffix(b"\r") for line in self.lines).decode(
            "utf-8", "replace"
        )
        remarks = []
        if not self.ended:
            remarks.append(
                f"[lines {self.offset} to {self.number - 1}; "
                f"more may follow, go on with offset={self.number}]"
            )
        if windows:
            remarks.append("[lines end with CR LF]")
        return ToolResult("\n".join([mark_controls(text), *remarks]))


@tool(replay="safe", permission_text=_path_text)
async def write(path: str, content: str, call: ToolCall) -> ToolResult:
    """Write a text file: create it, or replace all of its content.

    Missing folders are created. To change a part of a file use edit.

    Args:
        path: File to write, relative to the working directory.
        content: The whole new content.
    """
    # Safe to run again: the same content a second time changes nothing.
    try:
        data = content.encode("utf-8")
    except UnicodeEncodeError as error:
        return _refuse(f"content holds a lone surrogate at character {error.start}")
    try:
        async with call.env.lock(path):
            created = await call.env.write_bytes(path, data)
    except (OSError, InvalidArgumentError) as error:
        return await _explain(error, path, call.env)
    how = "created" if created else "replaced"
    return ToolResult(f"{display_path(path)} {how}, {len(data)} bytes")


@tool(permission_text=_path_text)
async def edit(
    path: str, old: str, new: str, call: ToolCall, *, replace_all: bool = False
) -> ToolResult:
    """Replace text in a file. The old text must match exactly, blanks and line ends included.

    Args:
        path: File to change, relative to the working directory.
        old: Text to replace; it must stand in the file exactly once, unless replace_all is set.
        new: Text to put in its place.
        replace_all: Replace every place where the old text stands.
    """
    if not old:
        return _refuse("old is empty; use write to create a file")
    if old == new:
        return _refuse("old and new are the same; nothing to change")
    try:
        async with call.env.lock(path):
            data = await call.env.read_bytes(path, limit=EDIT_BYTES_MAX + 1)
            if len(data) > EDIT_BYTES_MAX:
                return _refuse(
                    f"{display_path(path)} is larger than {EDIT_BYTES_MAX} bytes; use bash"
                )
            if looks_binary(data):
                return await _refuse_binary(path, data, call)
            # Bytes that are not UTF-8 go through unchanged.
            before = data.decode("utf-8", "surrogateescape")
            if "\r\n" in before and old not in before:
                old, new = _with_crlf(old), _with_crlf(new)
            count = before.count(old)
            if count == 0 or (count > 1 and not replace_all):
                return _refuse(_mismatch(display_path(path), before, old, new, count))
            after = before.replace(old, new)
            await call.env.write_bytes(path, after.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return _refuse("new holds a lone surrogate, which no file can hold")
    except (OSError, InvalidArgumentError) as error:
        return await _explain(error, path, call.env)
    await call.details({"diff": _diff(display_path(path), before, after)})
    line = _line_of(before, before.find(old))
    places = "1 replacement" if count == 1 else f"{count} replacements, the first"
    return ToolResult(f"{display_path(path)}: {places} at line {line}")


def _with_crlf(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _line_of(text: str, position: int) -> int:
    """The line of a position, counted from 0 as `read` does."""
    return text.count("\n", 0, position)


def _mismatch(name: str, text: str, old: str, new: str, count: int) -> str:
    """Say why old text cannot be replaced, and what is nearest to it."""
    if count > 1:
        lines: list[str] = []
        position = text.find(old)
        while position >= 0 and len(lines) < NAMES_SHOWN:
            lines.append(str(_line_of(text, position)))
            position = text.find(old, position + len(old))
        more = ", ..." if count > len(lines) else ""
        return (
            f"the old text stands {count} times in {name}, at lines {', '.join(lines)}{more}; "
            "add lines around it until it is unique, or set replace_all"
        )
    if new and new in text:
        # After an interrupted call the edit may have been made: say so, instead of just no.
        line = _line_of(text, text.find(new))
        return (
            f"the old text is not in {name}, but the new text is, at line {line}: "
            "the edit may have been made before"
        )
    first = next((line for line in old.splitlines() if line.strip()), old)
    near = _similar_line(text.splitlines(), first)
    hint = "" if near is None else f"; line {near[0]} is similar: {mark_controls(near[1][:200])!r}"
    return f"the old text is not in {name}{hint}; read the file again"


def _similar_line(lines: list[str], wanted: str) -> tuple[int, str] | None:
    bare = " ".join(wanted.split())
    for number, line in enumerate(lines):
        if bare and " ".join(line.split()) == bare:
            return number, line
    # Comparing is slow for many or long lines; a hint is not worth a second of waiting.
    short = [line[:200] for line in lines[:SIMILAR_LINES_MAX]]
    close = difflib.get_close_matches(wanted[:200], short, n=1)
    return (short.index(close[0]), close[0]) if close else None


def _diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), fromfile=name, tofile=name, lineterm="", n=2
    )
    text = mark_controls("\n".join(lines)).encode("utf-8", "replace").decode()
    return text if len(text) <= DIFF_CHARS_MAX else f"{text[:DIFF_CHARS_MAX]}\n[cut]"


def _refuse(text: str) -> ToolResult:
    return ToolResult(text, error=True)


async def _refuse_binary(path: str, data: bytes, call: ToolCall) -> ToolResult:
    info = await call.env.find_info(path)
    size = info.size_bytes if info is not None else len(data)
    utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    kind = "looks like UTF-16 text" if utf16 else "is a binary file (it holds NUL bytes)"
    way = "iconv -f UTF-16 -t UTF-8" if utf16 else "file, xxd or strings"
    return _refuse(f"{display_path(path)} {kind}, {size} bytes; look at it with bash: {way}")


async def _explain(error: OSError | InvalidArgumentError, path: str, env: Env) -> ToolResult:
    """Turn what the environment refused into an answer."""
    name = display_path(path)
    if isinstance(error, InvalidArgumentError):
        return _refuse(f"{name}: the path {error.problem}")
    if isinstance(error, FileNotFoundError):
        return _refuse(f"{name} does not exist{await _near(path, env)}")
    return _refuse(f"{name}: {error.strerror or type(error).__name__}")


async def _near(path: str, env: Env) -> str:
    folder, wanted = os.path.split(path)
    try:
        names = await env.list_folder(folder or ".")
    except (OSError, InvalidArgumentError):
        return f"; the folder {display_path(folder)} does not exist either"
    near = nearest_name(wanted, list(names))
    if near is not None:
        return f"; did you mean {display_path(os.path.join(folder, near))}?"
    shown = ", ".join(display_path(name) for name in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"; the folder holds {shown}{more}" if shown else "; the folder is empty"
