"""Refused images: found, left out of the context and not of the record, and never sent again."""

from __future__ import annotations

from typing import Any

from agent_world import World, ask, calls, messages, odd_tool, text_of, verify
from trio.testing import MockClock

from pidurable.agent._script import ScriptedError, Step
from pidurable.records._messages import AssistantMessage, ImageBlock, TextBlock, UserMessage
from pidurable.registry import ToolCall, ToolResult

NOTE = "(an image, image/png, that was refused)"


def refusing(*names: str, kind: Any = "other", **options: Any) -> World:
    """A world whose provider refuses requests that show one of these images, whatever is asked."""
    steps = options.pop("steps", ("fine", "fine again", "and again"))

    def refuses(_: Any) -> bool:
        return any(data.decode() in names for data in world.model.requests[-1].images.values())

    error = ScriptedError(kind=kind, detail="image too large")
    world = World(Step(when=refuses, error=error), *steps, **options)
    return world


async def put(harness: Any, *contents: str) -> list[ImageBlock]:
    """Images whose bytes are stored."""
    async with harness.commit() as tx:
        names = [tx.put_blob(content.encode()) for content in contents]
    return [ImageBlock(blob=name, media_type="image/png") for name in names]


def shown(world: World) -> list[list[str]]:
    """The images of each request, by their bytes."""
    return [sorted(data.decode() for data in each.images.values()) for each in world.model.requests]


async def test_a_refused_image_becomes_a_note_and_the_turn_goes_on(
    autojump_clock: MockClock,
) -> None:
    """The answer comes without it, what stood beside it stays, and it is not sent again."""
    world = refusing("bad")

    # C071
    async with world.open() as harness:
        root = await harness.root()
        good, bad = await put(harness, "good", "bad")
        first = await (await root.submit([TextBlock(text="this"), good])).wait()
        second = await (await root.submit([TextBlock(text="that"), bad])).wait()
        history = await root.history()
        context = await root.context()
        await verify(world, harness)
    async with world.open() as harness:
        third = await ask(harness, "more", "r3")

    assert [each.text for each in (first, second, third)] == ["fine", "fine again", "and again"]
    assert shown(world) == [["good"], ["bad", "good"], ["good"], ["good"]]
    said = messages(history, UserMessage)
    assert said[1].blocks == (TextBlock(text="that"), bad)
    (failed,) = [m for m in messages(history, AssistantMessage) if m.status == "failed"]
    assert failed.error == "image too large"
    assert [e.kind for e in history][-3:] == ["pi.assistant", "pi.note", "pi.assistant"]
    assert [text_of(item.message) for item in context if "that" in text_of(item.message)] == [
        f"that{NOTE}"
    ]
    assert failed.usage.requests == 1


async def test_an_image_of_a_tool_is_found_too(autojump_clock: MockClock) -> None:
    """The result stays the result of its call, with a note for the image."""

    async def body(call: ToolCall) -> Any:
        async with call.commit() as tx:
            name = tx.put_blob(b"bad")
        image = ImageBlock(blob=name, media_type="image/png")
        return ToolResult([TextBlock(text="look"), image])

    world = refusing("bad", steps=(calls("odd"), "done", "more"), tools=[odd_tool(body)])

    async with world.open() as harness:
        outcome = await ask(harness, "go")
        again = await ask(harness, "go on", "r2")
        await verify(world, harness)

    assert (outcome.text, again.text) == ("done", "more")
    assert shown(world) == [[], ["bad"], [], []]


async def test_what_is_refused_without_its_images_too_keeps_them(
    autojump_clock: MockClock,
) -> None:
    """If the images were not the reason, the first error counts and nothing becomes a note."""
    refusal = ScriptedError(kind="other", detail="no credit")
    world = World(Step(error=refusal))

    async with world.open() as harness:
        root = await harness.root()
        (image,) = await put(harness, "x")
        outcome = await (await root.submit([image])).wait()
        history = await root.history()

    assert (outcome.reason, outcome.detail) == ("model_error", "no credit")
    assert shown(world) == [["x"], []]
    assert "pi.note" not in [each.kind for each in history]


async def test_other_errors_are_not_taken_for_refusals(autojump_clock: MockClock) -> None:
    """A wrong key is none, and a request without images is refused once."""
    world = refusing("x", kind="auth")
    other = World(Step(error=ScriptedError(kind="other", detail="no")))

    async with world.open() as harness:
        root = await harness.root()
        (image,) = await put(harness, "x")
        denied = await (await root.submit([image])).wait()
    async with other.open() as harness:
        refused = await ask(harness, "text")

    assert (denied.reason, len(world.model.requests)) == ("model_error", 1)
    assert (refused.reason, len(other.model.requests)) == ("model_error", 1)


async def test_an_error_that_passes_is_tried_again_with_the_images(
    autojump_clock: MockClock,
) -> None:
    """If the request without images fails in passing, the whole is tried again, as it was."""
    busy = ScriptedError(kind="retryable", detail="busy")
    world = refusing("bad", steps=(Step(text="fine", error=busy, times=1),))

    async with world.open() as harness:
        root = await harness.root()
        (image,) = await put(harness, "bad")
        outcome = await (await root.submit([image])).wait()
        await verify(world, harness)

    assert outcome.text == "fine"
    assert shown(world) == [["bad"], [], ["bad"], []]
