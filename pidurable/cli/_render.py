"""Text for people: cleaned of everything a terminal would obey, in lines, columns and trees.

What models, tools and files wrote is data. Before any of it is shown, `clean` removes terminal
control sequences and makes every other control character visible, so that no text can repaint,
move, retitle, copy to the clipboard or change the reading order. Lines are built from cleaned
parts; colour is added behind that, by rich, and only on a terminal.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from pidurable.harness._reader import HolderView, TreeRow
from pidurable.records._entries import Conversation
from pidurable.records._moments import duration as duration, moment as moment
from pidurable.records._tasks import Status, TaskRecord
from pidurable.storage import ConversationRow

__all__ = [
    "age",
    "clean",
    "clean_line",
    "columns",
    "compact_json",
    "conversation_text",
    "cut",
    "duration",
    "escaped",
    "holder_lines",
    "moment",
    "outcome_word",
    "tail",
    "task_line",
    "tree_lines",
    "wrapped",
    "wrapped_tail",
]

_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erasing
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    # ^ OSC, DCS, SOS, PM, APC: titles, clipboard, links; one without an end ends with its line
    r"|\x1b[ -/]*[0-~]"  # everything else that begins with ESC
)
_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_INVISIBLE = (
    "\u00ad\u034f\u115f\u1160\u180e\u200b\u2028\u2029\u2060\u2061\u2062\u2063\u2064"
    "\u3164\uffa0\ufeff"
)
_VISIBLE: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"<U+{code:04X}>" for code in range(0x80, 0xA0)},
    **{ord(char): f"<U+{ord(char):04X}>" for char in _BIDI + _INVISIBLE},
    **{code: f"<U+{code:04X}>" for code in range(0xE0000, 0xE0080)},  # invisible tags
}
LINE_CHARS_MAX = 2_000
CELL_CHARS_MAX = 60
WRAPPED_CHARS_MAX = 4_000
_WRAPPED_CELLS_MIN = 20
_BEGIN = re.compile(r" *(?:\d+\. )?")
_WORD = re.compile(r"( *)((?:`[^`]*`|[^ `]|`(?![^`]*`))+)")
"""What stands before a word, and the word, which may hold a command with spaces."""


def clean(text: str) -> str:
    """Return a text that a terminal shows and does not obey. Line breaks and tabs stay.

    Sequences are removed; other control, bidirectional and invisible characters are shown as
    pictures or as <U+XXXX>; a carriage return becomes a line break, since it would repaint.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _SEQUENCE.sub("", text.replace("\r\n", "\n")).replace("\r", "\n")
    text = text.translate(_VISIBLE)
    # A lone surrogate cannot be written to any stream.
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def clean_line(text: str, *, chars_max: int = LINE_CHARS_MAX) -> str:
    """Return a cleaned text on one line; what was cut off is marked and counted."""
    line = clean(text).replace("\n", "\u23ce").replace("\t", " ").strip()
    if len(line) <= chars_max:
        return line
    return f"{line[: chars_max - 1]}\u2026[{len(line) - chars_max + 1} more]"


def tail(text: str, *, lines: int, chars_max: int = 200) -> list[str]:
    """Return the last lines of a text, each cleaned and cut."""
    # Only the end is looked at, so that a long output costs nothing at every refresh.
    end = text[-(lines + 1) * 4 * chars_max :]
    return [
        clean_line(line, chars_max=chars_max)
        for line in clean(end).rstrip("\n").split("\n")[-lines:]
    ]


def wrapped_tail(text: str, *, lines: int, cells: int) -> list[str]:
    """Return the end of a text, cleaned and broken into lines that fit a terminal."""
    # Only the end is looked at, as above.
    found = clean(text[-WRAPPED_CHARS_MAX:]).replace("\t", " ").rstrip().split("\n")[-lines:]
    return [part for line in found for part in _broken(line.rstrip(), max(1, cells))][-lines:]


def wrapped(line: str, cells: int) -> list[str]:
    """Break a line for people between its words, so that it fits a terminal.

    What follows is indented like its beginning. A command stays in one piece, in backticks or
    behind a `$`, so that it can be copied, and so does a word that is too wide by itself: the
    terminal breaks those.
    """
    begin = _BEGIN.match(line)
    assert begin is not None
    head, indent = begin[0], " " * begin.end()
    narrow = cells < _WRAPPED_CELLS_MIN + len(indent)
    if narrow or _width(line) <= cells or "\t" in line or line[begin.end() :].startswith("$ "):
        return [line]
    found, now = [], ""
    for space, word in _WORD.findall(line[begin.end() :]):
        if now and _width(indent + now + space + word) > cells:
            found.append(head + now)
            head, now = indent, word
        else:
            now += space + word
    return [*found, head + now]


def _broken(line: str, cells: int) -> list[str]:
    """Break a line between its words, or within one that is too wide by itself."""
    found = []
    start = taken = 0
    space: int | None = None
    for index, char in enumerate(line):
        taken += _width(char)
        if taken > cells and char == " " and index > start:
            found.append(line[start:index])
            start, taken, space = index + 1, 0, None
        elif taken > cells and index > start:
            end = index if space is None else space
            found.append(line[start:end])
            start, space = end if space is None else end + 1, None
            taken = _width(line[start : index + 1])
        elif char == " " and taken > 1:
            space = index
    return [*found, line[start:]]


def escaped(text: str) -> str:
    """Return a text in which everything that is not plainly printed is shown as its escape.

    Nothing is taken out, as `clean` does with control sequences: where somebody decides by what
    is shown, what is hidden would be decided too.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() and ord(char) not in _VISIBLE else _escape(char) for char in text
    )


def _escape(char: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if short is not None:
        return short
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def compact_json(value: Any, *, chars_max: int = LINE_CHARS_MAX) -> str:
    """Return JSON on one line, with escapes for all that is not plainly printed; a cut is marked.

    Control sequences stay in it, escaped: arguments are shown so where somebody decides by them.
    """
    line = escaped(json.dumps(value, ensure_ascii=False))
    if len(line) <= chars_max:
        return line
    return f"{line[: chars_max - 1]}\u2026[{len(line) - chars_max + 1} more]"


# --- moments and durations --------------------------------------------------------------------


def age(task: TaskRecord, now_us: int) -> str:
    """Return how long a task has been there, or took."""
    end = task.ended_us if task.ended_us is not None else now_us
    return duration((end - task.created_us) / 1e6)


# --- tasks ------------------------------------------------------------------------------------


def outcome_word(task: TaskRecord) -> str:
    """Return where a task stands, in one word of the design: its outcome once it has one."""
    if task.outcome is not None and task.status is Status.TERMINAL:
        return task.outcome.status
    if task.status is Status.TERMINAL:
        return "ended"
    if task.blocked:
        return f"blocked ({clean_line(task.blocked, chars_max=CELL_CHARS_MAX)})"
    if task.abort_us is not None:
        return f"{task.status.word}, aborting"
    return task.status.word


def _detail(task: TaskRecord) -> str:
    """What a line says of a task besides: the call it makes, why it ended."""
    parts = []
    given = task.input if isinstance(task.input, dict) else {}
    if task.kind == "pi.generation" and isinstance(given.get("turn"), int):
        parts.append(f"turn {given['turn']}")
    if task.kind == "pi.tool" and isinstance(given.get("name"), str):
        parts.append(clean_line(given["name"], chars_max=CELL_CHARS_MAX))
    if task.kind == "pi.compaction" and isinstance(given.get("why"), str):
        parts.append(clean_line(given["why"], chars_max=CELL_CHARS_MAX))
    if task.phase and task.status is not Status.TERMINAL:
        parts.append(f"phase {clean_line(task.phase, chars_max=CELL_CHARS_MAX)}")
    if task.background:
        parts.append("background")
    if task.recoveries:
        parts.append(f"interrupted {task.recoveries}x")
    if task.outcome is not None:
        if task.outcome.reason:
            parts.append(f"reason {clean_line(task.outcome.reason, chars_max=CELL_CHARS_MAX)}")
        if task.outcome.error is not None:
            parts.append(clean_line(task.outcome.error.message, chars_max=CELL_CHARS_MAX))
    return ", ".join(parts)


def task_line(task: TaskRecord, now_us: int) -> str:
    """Return one line for a task: id, kind, where it stands, how long, what it does."""
    detail = _detail(task)
    kind = clean_line(task.kind, chars_max=CELL_CHARS_MAX)
    line = f"{task.id} {kind} {outcome_word(task)} {age(task, now_us)}"
    return f"{line}  {detail}" if detail else line


def holder_lines(holder: HolderView | None) -> list[str]:
    """Say who holds the session, if that matters to somebody who looks."""
    if holder is None or holder.state == "released":
        return []
    record = holder.record
    who = f"process {record.pid} on {clean_line(record.host, chars_max=60)}"
    beat = f"last heartbeat {duration(holder.heartbeat_age)} ago"
    if holder.state == "dead":
        return [
            f"process {record.pid} held this store and is dead ({beat}); "
            "`pidurable resume` goes on with its work"
        ]
    if holder.state == "silent":
        return [f"held by {who}, silent: it may hang ({beat})"]
    return [f"held by {who} ({beat})"]


def tree_lines(rows: Sequence[TreeRow], now_us: int) -> list[str]:
    """Return the lines of a tree, with the branches drawn."""
    lines = []
    continues: list[bool] = []
    for index, row in enumerate(rows):
        del continues[row.depth :]
        more = _has_sibling(rows, index)
        stem = "".join("│  " if open_ else "   " for open_ in continues[1 : row.depth])
        branch = "" if row.depth == 0 else ("├─ " if more else "└─ ")
        continues.append(more)
        lines.append(f"{stem}{branch}{_tree_text(row, now_us)}")
    return lines


def _has_sibling(rows: Sequence[TreeRow], index: int) -> bool:
    """Whether a later row hangs from the same owner."""
    depth = rows[index].depth
    for row in rows[index + 1 :]:
        if row.depth <= depth:
            return row.depth == depth
    return False


def _tree_text(row: TreeRow, now_us: int) -> str:
    if row.task is not None:
        return task_line(row.task, now_us)
    assert row.conversation is not None
    return conversation_text(row.conversation)


def conversation_text(made: Conversation | ConversationRow) -> str:
    """Return one line for a conversation: its id, key and what it is a fork of."""
    fork = "" if made.parent is None else f", fork of {made.parent}"
    if made.parent_entry is not None:
        fork += f" at entry {made.parent_entry}"
    key = "" if made.key is None else f" {clean_line(made.key, chars_max=CELL_CHARS_MAX)!r}"
    return f"conversation {made.id}{key}{fork}"


# --- columns ----------------------------------------------------------------------------------


def _width(text: str) -> int:
    """Cells that a text takes on a terminal: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def cut(text: str, cells: int) -> str:
    """Return a line that takes at most so many cells; what was cut off is marked."""
    if _width(text) <= cells:
        return text
    taken, kept = 0, 0
    for char in text:
        taken += _width(char)
        if taken > cells - 1:
            break
        kept += 1
    return f"{text[:kept]}…"


def columns(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, cells: int | None = None
) -> list[str]:
    """Return lines in columns, as wide as their widest cell; the last one is not padded.

    Args:
        header: A word for each column.
        rows: The cells, which are cleaned here.
        cells: How wide a line may be at most, on a terminal. Where that is too narrow, columns
            that say nothing go, and texts are cut and marked, the widest first.
    """
    table = [list(header), *([clean_line(cell) for cell in row] for row in rows)]
    if cells is not None and sum(_widths(table)) > cells - _GAP * (len(header) - 1):
        rest = range(1, len(header))
        said = [True, *(any(row[index] != "-" for row in table[1:]) for index in rest)]
        table = [[cell for cell, kept in zip(row, said, strict=True) if kept] for row in table]
        widths = _narrowed(table, cells - _GAP * (len(table[0]) - 1))
        # A terminal with room for nothing gets what fits, and no second line.
        return [cut(line, cells) for line in _aligned(table, widths)]
    return _aligned(table, _widths(table))


_GAP = 2
_CUTS = ((False, 16), (True, 4), (False, 6))
"""Whether columns of numbers are narrowed, and down to how many cells, step by step."""
_NUMBER = re.compile(r"[\d.,]+|-")


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_width, column)) for column in zip(*table, strict=True)]


def _aligned(table: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    lines = []
    for row in table:
        shown = [cut(cell, width) for cell, width in zip(row, widths, strict=True)]
        padded = [
            cell + " " * (width - _width(cell))
            for cell, width in zip(shown, [*widths[:-1], 0], strict=True)
        ]
        lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def _narrowed(table: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths that fit the room where that can be: long texts are cut first, numbers never."""
    widths = _widths(table)
    data = [[row[index] for row in table[1:]] for index in range(len(widths))]
    numbers = [all(map(_NUMBER.fullmatch, column)) for column in data]
    # Of a number only the word above it can be cut.
    least = [max(map(_width, cells)) if n else 0 for cells, n in zip(data, numbers, strict=True)]
    for of_numbers, floor in _CUTS:
        while (excess := sum(widths) - room) > 0:
            wide = [
                (width, index)
                for index, width in enumerate(widths)
                if numbers[index] is of_numbers and width > max(floor, least[index])
            ]
            if not wide:
                break
            width, index = max(wide)
            # Down to the next widest one, so that they share what is missing.
            next_width = max((other for other, _ in wide if other < width), default=0)
            widths[index] = max(next_width, floor, least[index], width - excess)
    return widths
