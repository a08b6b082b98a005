"""The prompt: told once, told what changed, and a request that every provider takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio
from agent_world import text_of
from hypothesis import given, strategies as st

from pidurable.agent._models import ModelRequest
from pidurable.agent._prompt import (
    Told,
    build_request,
    difference,
    estimate_tokens,
    render_sections,
    request_characters,
    told_by,
    with_images,
)
from pidurable.agent._request_messages import sendable_name
from pidurable.agent._services import Agent
from pidurable.agent._strict import check_request
from pidurable.records._entries import Entry
from pidurable.records._messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    SystemMessage,
    TextBlock,
    ToolCallBlock,
    ToolDeclaration,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from pidurable.registry import Extension, LocalEnv, Registry, section, tool
from pidurable.session._context import context_of


def entry(id: int, *messages: Message, head: int | None = None) -> Entry:
    """An entry of one conversation."""
    return Entry(id=id, conversation_id=1, seq=id, kind="test", messages=messages, head=head)


def user(text: str) -> UserMessage:
    """A message of a user."""
    return UserMessage(blocks=(TextBlock(text=text),), at_us=0)


def answer(*names: str, text: str = "") -> AssistantMessage:
    """A complete answer that calls tools."""
    blocks: list[Any] = [TextBlock(text=text)] if text else []
    blocks += [ToolCallBlock(name=name, arguments={}) for name in names]
    return AssistantMessage(
        blocks=tuple(blocks),
        status="complete",
        stop_reason="stop",
        model="m",
        usage=Usage(),
        at_us=0,
    )


def result(entry_id: int, index: int, name: str, text: str = "r") -> ToolResultMessage:
    """The result of a call."""
    blocks = (TextBlock(text=text),)
    return ToolResultMessage(
        call=(entry_id, index), name=name, blocks=blocks, is_error=False, at_us=0
    )


def declaration(name: str, description: str = "d") -> ToolDeclaration:
    """A tool as a model is told of it."""
    return ToolDeclaration(name=name, description=description, schema={"type": "object"})


def request(*entries: Entry, cutoff: int = 100) -> ModelRequest:
    """The request for these entries."""
    context = context_of(e for e in entries if e.id <= cutoff)
    return build_request(context, model="scripted/m", thinking=None)


# --- what was told ------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abc"), st.sampled_from(["x", "y"])),
            st.sets(st.sampled_from("pqr")),
        ),
        max_size=6,
    )
)
def test_replaying_what_was_told_gives_what_holds(
    states: list[tuple[dict[str, str], set[str]]],
) -> None:
    """After any series of changes the transcript says exactly the last state."""
    entries: list[Entry] = []
    for number, (sections, names) in enumerate(states, start=1):
        tools = {name: declaration(name) for name in sorted(names)}
        message = difference(told_by(context_of(entries)), sections, tools, at_us=0)
        if message is not None:
            entries.append(entry(number, message))
        told = told_by(context_of(entries))
        assert told.sections == sections
        assert told.tools == tools
        assert difference(told, sections, tools, at_us=0) is None


def test_a_changed_declaration_is_told_again() -> None:
    """The same name with another description replaces the tool, without removing it first."""
    told = Told(tools={"a": declaration("a")})

    message = difference(told, {}, {"a": declaration("a", "new")}, at_us=0)

    assert message is not None
    assert [each.description for each in message.tools_added] == ["new"]
    assert message.tools_removed == ()


async def test_sections_come_from_the_instructions_and_the_extensions() -> None:
    """Instructions first, then each section in its tags; blank ones out, broken ones kept."""

    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    def broken(_: Any) -> str:
        raise ValueError("broken")

    def stopped(_: Any) -> str:
        raise asyncio.CancelledError("by another loop")

    async def later(given: Any) -> str:
        await trio.lowlevel.checkpoint()
        return f"tools: {', '.join(given.tools)}"

    registry = Registry()
    registry.install(
        Extension(
            "e",
            tools=[look],
            sections=[
                section("plain", lambda _: "text", tag=False),
                section("blank", lambda _: " \n"),
                section("broken", broken),
                section("new", stopped),
                section("bytes", lambda _: b"no text"),  # type: ignore[arg-type,return-value]
                section("later", later),
            ],
        )
    )
    agent = Agent(
        model="m/m",
        thinking=None,
        extensions=None,
        instructions="be brief",
        cwd=None,
        turns_max=1,
        tools=registry.snapshot.tools(None),
        snapshot=registry.snapshot,
    )
    reports: list[Any] = []
    told = Told(sections={"broken": "as before"})

    found = await render_sections(agent, LocalEnv("."), 0, told, reports.append)

    assert found == {
        "instructions": "be brief",
        "plain": "text",
        "broken": "as before",
        "later": "<later>\ntools: look\n</later>",
    }
    assert len(reports) == 3
    assert "ValueError: broken" in reports[0]
    assert "CancelledError: by another loop" in reports[1]
    assert "'bytes' was not rendered: TypeError: it returned b'no text'" in reports[2]
    assert list(agent.declarations) == ["look"]


# --- the request --------------------------------------------------------------------------------


def test_a_request_ends_at_its_cutoff() -> None:
    """What was appended after the request was fixed is not in it, however often it is built."""
    entries = [
        entry(1, user("one")),
        entry(2, SystemMessage(sections={"s": "system"}, at_us=0)),
        entry(3, answer("look")),
        entry(4, result(3, 0, "look")),
        entry(5, user("late")),
    ]

    made = request(*entries, cutoff=4)

    check_request(made)
    assert made.system == "system"
    assert [text_of(m.message) for m in made.messages] == ["one", "", "r"]
    assert [m.entry for m in made.messages] == [1, 3, 3]


def test_what_a_provider_does_to_a_request_reaches_no_other_request() -> None:
    """Schemas of tools and arguments of calls are copies for each request."""
    told = SystemMessage(sections={}, tools_added=(declaration("t"),), at_us=0)
    context = context_of([entry(1, told), entry(2, user("go")), entry(3, answer("t"))])
    before = repr(request_of := build_request(context, model="scripted/m", thinking=None))
    request_of.tools[0].schema["type"] = "other"
    for item in request_of.messages:
        if isinstance(item.message, AssistantMessage):
            item.message.tool_calls[0].arguments["x"] = 1
    assert repr(request_of) != before
    assert repr(build_request(context, model="scripted/m", thinking=None)) == before


def test_a_change_of_tools_alone_is_no_message() -> None:
    """The tools of a request are those told last; only words are sent as messages."""
    change = SystemMessage(sections={}, tools_removed=("a",), at_us=0)
    both = SystemMessage(sections={}, tools_added=(declaration("a"), declaration("b")), at_us=0)
    made = request(
        entry(1, both),
        entry(2, user("x")),
        entry(3, answer(text="y")),
        entry(4, change),
        entry(5, user("z")),
    )

    check_request(made)
    assert made.system == ""
    assert [each.name for each in made.tools] == ["b"]
    assert [text_of(m.message) for m in made.messages] == ["x", "y", "z"]


@pytest.mark.parametrize("name", ["", " ", "a.b/c", "x" * 500, "\ud83d\ude00", "ok_-9"])
def test_a_called_name_is_sent_as_a_valid_one(name: str) -> None:
    """A call and its result carry the same valid name; the record keeps what the model wrote."""
    first = entry(2, answer(name))
    made = request(entry(1, user("x")), first, entry(3, result(2, 0, name)))

    check_request(made)
    sent = made.messages[1].message
    assert isinstance(sent, AssistantMessage)
    assert sent.tool_calls[0].name == sendable_name(name)
    assert 1 <= len(sendable_name(name)) <= 64
    assert first.messages[0] == answer(name)


def test_a_context_without_input_asks_nothing() -> None:
    """System messages alone, or results whose calls are out of range, are no request."""
    system = entry(1, SystemMessage(sections={"s": "x"}, at_us=0))

    assert not context_of([]).asks_something
    assert not context_of([system]).asks_something
    assert not context_of([system, entry(2, result(9, 0, "look"))]).asks_something
    assert context_of([system, entry(3, user("x"))]).asks_something
    assert not context_of([system, entry(3, user("x")), entry(4, answer(text="y"))]).asks_something
    called = [system, entry(3, user("x")), entry(4, answer("look"))]
    assert context_of(called).asks_something


class Blobs:
    """A session that holds some images."""

    def __init__(self, **held: bytes) -> None:
        self._held = held
        self.storage = self
        self.blocking = self

    def blob(self, sha256: str) -> bytes | None:
        return self._held.get(sha256)

    async def run(self, function: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function()


async def test_images_are_added_where_their_bytes_are() -> None:
    """A request carries the bytes of the images that are stored; a missing one is left out."""
    images = tuple(ImageBlock(blob=name, media_type="image/png") for name in ("a", "b"))
    message = UserMessage(blocks=(TextBlock(text="see"), *images), at_us=0)
    session: Any = Blobs(a=b"bytes")

    made = await with_images(session, request(entry(1, message)))
    plain = request(entry(1, user("x")))

    assert made.images == {"a": b"bytes"}
    assert await with_images(session, plain) is plain


def test_an_estimate_counts_everything_that_is_sent() -> None:
    """System, tools, texts, names and arguments count; four characters are a token."""
    system = SystemMessage(sections={"s": "1234"}, tools_added=(declaration("a", "12"),), at_us=0)
    small = request(entry(1, system), entry(2, user("123")))
    large = request(entry(1, system), entry(2, user("123")), entry(3, answer("look", text="12345")))

    assert request_characters(small) == 4 + 2 + len("{'type': 'object'}") + 3
    assert request_characters(large) >= request_characters(small) + 5 + 4
    assert [estimate_tokens(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
