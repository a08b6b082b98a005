"""The lines of a run, from the events of its commits."""

from __future__ import annotations

import pytest

from pidurable.cli._follow import live_lines
from pidurable.cli._story import Story
from pidurable.harness._events import (
    MessageEnd,
    MessageStart,
    MessageUpdate,
    RunEnd,
    RunStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnStart,
)
from pidurable.records._entries import Entry
from pidurable.records._messages import AssistantMessage, TextBlock, ToolResultMessage, Usage


def test_each_block_of_a_result_begins_a_line() -> None:
    """A remark of a tool is not glued to the end of its output."""
    blocks = (TextBlock(text="no newline at its end"), TextBlock(text="warning: odd"))
    message = ToolResultMessage(call=(1, 0), name="look", blocks=blocks, is_error=False, at_us=0)
    entry = Entry(
        id=2,
        conversation_id=1,
        seq=2,
        kind="pi.tool_result",
        messages=(message,),
        by_task=9,
        at_us=0,
    )

    lines = Story(clock=lambda: 0.0).tell([ToolExecutionEnd((1, 0), entry)])

    assert lines[1:] == ["    no newline at its end", "    warning: odd"]


def test_the_picture_shows_where_an_answer_grows() -> None:
    """Of a paragraph wider than the terminal its newest words are seen, and of a call its time."""
    story = Story(clock=lambda: 5.0)
    story.tell([RunStart(4)])
    story.tell(
        [MessageStart(4), MessageUpdate(4, 0, "text", "one " * 100 + "and the newest words")]
    )
    story.tell([ToolExecutionStart(7, 0, "bash", {"command": "echo " * 20})])

    lines = live_lines(story, 40, 0)

    assert lines[-2].endswith("and the newest words")
    assert lines[-1] == '└─ bash {"command": "echo echo ec…  0.0s'
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize("blocks", [(), (TextBlock(text="so far"),)])
def test_an_answer_that_comes_later_is_not_called_cut(blocks: tuple[TextBlock, ...]) -> None:
    """A deferred answer is told as one, whatever was streamed before it was deferred."""
    message = AssistantMessage(
        blocks=blocks, status="deferred", stop_reason="stop", model="m", usage=Usage(), at_us=0
    )
    entry = Entry(
        id=2,
        conversation_id=1,
        seq=2,
        kind="pi.assistant",
        messages=(message,),
        by_task=9,
        at_us=0,
    )

    lines = Story(clock=lambda: 0.0).tell([MessageEnd(entry)])

    assert lines == ["the provider answers later, and is asked for it again"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_answer_that_a_hook_goes_on_with_is_told(goes_on: bool) -> None:
    """The last answer is told as the result; one that is followed by a turn is told on the way."""
    message = AssistantMessage(
        blocks=(TextBlock(text="I am done."),),
        status="complete",
        stop_reason="stop",
        model="m",
        usage=Usage(),
        at_us=0,
    )
    entry = Entry(
        id=2,
        conversation_id=1,
        seq=2,
        kind="pi.assistant",
        messages=(message,),
        by_task=9,
        at_us=0,
    )
    next_turn = TurnStart(9, 2, 11)
    ended = [] if goes_on else [RunEnd(9, "done", None, None)]

    lines = Story(clock=lambda: 0.0).tell([MessageEnd(entry), *ended, next_turn])

    assert ("I am done." in lines) == goes_on
