"""`pidurable conversation log`: the transcript as it is stored, oldest entry first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from pidurable.agent._boundaries import AFTER
from pidurable.agent._permissions import encode_request
from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._host import Host
from pidurable.cli._options import Options
from pidurable.cli._render import (
    clean,
    clean_line,
    compact_json,
    conversation_text,
    holder_lines,
    moment,
)
from pidurable.cli._tasks import check_store
from pidurable.errors import NotFoundError
from pidurable.harness._reader import Reader, open_reader
from pidurable.records._entries import Entry
from pidurable.records._entry_json import entry_json, role_of
from pidurable.records._messages import (
    AssistantMessage,
    Block,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
)

__all__ = ["entry_lines", "root_id", "said_text", "show_conversation", "show_log"]

ITEMS_SHOWN_MAX = 50
ITEM_CHARS_MAX = 120
ENTRY_LINES_MAX = 40
"""Of one text in the log; `--full` and `-o json` show all."""


async def show_log(
    host: Host, options: Options, conversation_id: int | None, *, limit: int, full: bool
) -> int:
    """Show the newest entries of a conversation, with what is being said right now."""
    if limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    check_store(options.store)
    async with open_reader(options.store) as reader:
        id = await root_id(reader) if conversation_id is None else conversation_id
        entries = await reader.entries(id, limit=limit)
        live = await reader.live(id)
        holder = await reader.holder()
    if options.output == "json":
        host.out_json([entry_json(entry) for entry in entries])
        return Exit.DONE
    if options.output == "ids":
        host.out(str(entry.id) for entry in entries)
        return Exit.DONE
    if len(entries) == limit:
        host.err(f"the newest {limit} entries; --limit shows more")
    for entry in entries:
        host.out(entry_lines(entry, full=full))
    if not entries:
        host.err(f"conversation {id} has no entries")
    host.err(_live_lines(live))
    host.say(holder_lines(holder))
    return Exit.DONE


async def show_conversation(host: Host, options: Options, conversation_id: int | None) -> int:
    """Show where a conversation stands."""
    check_store(options.store)
    async with open_reader(options.store) as reader:
        id = await root_id(reader) if conversation_id is None else conversation_id
        record = await reader.conversation(id)
        names = ("pi.agent", "pi.live", "pi.inbox", "pi.usage")
        documents = {name: await reader.document(name, id) for name in names}
        requests = await reader.permissions(id)
        items = (documents["pi.inbox"] or {}).get("items") or []
        queued = [(item, await _said(reader, item)) for item in items[:ITEMS_SHOWN_MAX]]
        holder = await reader.holder()
    if options.output == "json":
        asked = [encode_request(request) for request in requests]
        host.out_json(
            {"conversation": attrs.asdict(record), "documents": documents, "permissions": asked}
        )
        return Exit.DONE
    if options.output == "ids":
        host.out(str(item["submission"]) for item in items)
        return Exit.DONE
    host.out(conversation_text(record))
    for name, value in (documents["pi.agent"] or {}).items():
        if value is not None:
            host.out(f"  {name:<13} {compact_json(value, chars_max=ITEM_CHARS_MAX)}")
    live = _live_lines(documents["pi.live"]) or ["not busy"]
    host.out(f"  {line}" for line in live)
    for slot in (documents["pi.live"] or {}).get("compactions") or ():
        host.out(f"  compaction    task {slot['task']}: {clean_line(str(slot['status']))}")
    for request in requests:
        tool = clean_line(request.tool, chars_max=64)
        host.out(f"  permission    {request.id}: task {request.task} ({tool}) waits for a person")
    host.out(f"  {line}" for line in _queue_lines(queued, len(items)))
    for name, value in ((documents["pi.usage"] or {}).get("models") or {}).items():
        host.out(f"  spent         {clean_line(name)} {compact_json(value)}")
    host.say(holder_lines(holder))
    return Exit.DONE


async def _said(reader: Reader, item: Any) -> str:
    """The text of what is queued. What did not fit into the queue stands with its submission."""
    content = item.get("content", item.get("entry"))
    if content is None:
        content = (await reader.submission(item["submission"])).content
    return said_text(content)


def _queue_lines(queued: Sequence[tuple[Any, str]], count: int) -> list[str]:
    """What is queued, an item a line, and how many of all are not shown."""
    lines = []
    for item, said in queued:
        shown = compact_json(said, chars_max=ITEM_CHARS_MAX)
        mode = item["mode"]
        if item.get(AFTER) is not None:
            mode = f"when run {item[AFTER]} has been aborted"
        lines.append(f"queued        submission {item['submission']} ({mode}): {shown}")
    if count > len(queued):
        lines.append(f"queued        \u2026 and {count - len(queued)} more")
    return lines


def said_text(content: Any) -> str:
    """The text of what was handed in: blocks of an input, or an entry with messages."""
    messages = content.get("messages") or () if isinstance(content, dict) else ()
    blocks = content if isinstance(content, list) else [b for m in messages for b in m["blocks"]]
    return "\n".join(str(block.get("text", "[image]")) for block in blocks)


async def root_id(reader: Reader) -> int:
    """Return the id of the root: the oldest conversation that nothing owns.

    Raises:
        NotFoundError: Nothing was ever said in this session.
    """
    conversations = await reader.conversations()
    if not conversations:
        raise NotFoundError("conversation", "yet", "`pidurable run PROMPT` begins one.")
    return conversations[0].id


# --- lines ------------------------------------------------------------------------------------


def entry_lines(entry: Entry, *, full: bool = False) -> list[str]:
    """Return the lines of an entry: what it is, then its text, indented."""
    nested = _nested_title(entry)
    title = _title(entry) if nested is None else nested
    lines = [f"#{entry.id}  {moment(entry.at_us)}  {clean_line(title, chars_max=200)}"]
    for message in entry.messages:
        lines += [f"    {line}" for line in _message_lines(message, full=full)]
    if not entry.messages and entry.data is not None and nested is None:
        lines.append(f"    {compact_json(entry.data)}")
    if entry.edits:
        lines.append(f"    edits {', '.join(f'#{edit.target}' for edit in entry.edits)}")
    return lines


def _nested_title(entry: Entry) -> str | None:
    """The line of a nested call, whose result its caller has got; None of any other entry."""
    data = entry.data
    if entry.kind != "pi.nested_result" or entry.messages or not isinstance(data, dict):
        return None
    title = f"result of {data.get('name')}  (nested: task {data.get('task')}"
    title += f", called by task {data.get('caller')})"
    if data.get("is_error"):
        code = data.get("code")
        title += "  error" if code is None else f"  error: {code}"
    return title


def _title(entry: Entry) -> str:
    if not entry.messages:
        return entry.kind
    message = entry.messages[0]
    if isinstance(message, AssistantMessage):
        title = f"assistant  {message.model}"
        if message.status != "complete":
            title += f"  {message.status}"
        if message.stop_reason not in ("stop", "tool_use", "aborted", "error"):
            title += f"  stopped: {message.stop_reason}"
        return title
    if isinstance(message, ToolResultMessage):
        title = f"result of {message.name}  (call {message.call[1]} of #{message.call[0]})"
        if message.is_error:
            title += f"  error{'' if message.code is None else f': {message.code}'}"
        return title
    return role_of(message)


def _message_lines(message: Message, *, full: bool) -> list[str]:
    if isinstance(message, SystemMessage):
        return _system_lines(message, full=full)
    lines: list[str] = []
    for block in message.blocks:
        lines += _block_lines(block, full=full)
    if isinstance(message, AssistantMessage) and message.error:
        lines.append(f"error: {clean_line(message.error)}")
    return lines


def _block_lines(block: Block, *, full: bool) -> list[str]:
    if isinstance(block, TextBlock):
        return _cut(block.text, full=full)
    if isinstance(block, ThinkingBlock):
        return [f"(thinking) {line}" for line in _cut(block.text, full=full)]
    if isinstance(block, ToolCallBlock):
        return [f"calls {clean_line(block.name, chars_max=64)} {compact_json(block.arguments)}"]
    return [f"[image {clean_line(block.media_type, chars_max=60)} {block.blob[:12]}]"]


def _system_lines(message: SystemMessage, *, full: bool) -> list[str]:
    lines: list[str] = []
    for name, text in message.sections.items():
        name = clean_line(name, chars_max=60)
        lines += (
            [f"section {name} removed"]
            if text is None
            else [f"section {name}", *(f"  {line}" for line in _cut(text, full=full))]
        )
    if message.tools_added:
        names = ", ".join(clean_line(tool.name, chars_max=64) for tool in message.tools_added)
        lines.append(f"tools added: {names}")
    if message.tools_removed:
        names = ", ".join(clean_line(name, chars_max=64) for name in message.tools_removed)
        lines.append(f"tools removed: {names}")
    return lines


def _cut(text: str, *, full: bool) -> list[str]:
    """The lines of a text; of a long one the first and the last, and how many are left out."""
    lines = clean(text).rstrip("\n").split("\n")
    if full:
        return lines
    lines = [clean_line(line) for line in lines]
    if len(lines) <= ENTRY_LINES_MAX:
        return lines
    half = ENTRY_LINES_MAX // 2
    left_out = len(lines) - 2 * half
    return [*lines[:half], f"\u2026 {left_out} lines left out (--full shows them)", *lines[-half:]]


def _live_lines(live: Any) -> list[str]:
    """What a conversation is busy with, from `pi.live`."""
    if not isinstance(live, dict) or live.get("run") is None:
        return []
    lines = [f"busy: run {live['run']}, turn {live.get('turn')}"]
    for call in live.get("calls") or ():
        name = clean_line(str(call.get("name")), chars_max=64)
        task = call.get("task")
        who = "not begun" if task is None else f"task {task}"
        line = f"  {name} ({who}): {clean_line(str(call.get('status')))}"
        if call.get("held_by"):
            line += f" for {clean_line(str(call['held_by']), chars_max=64)}"
        lines.append(line)
    return lines
