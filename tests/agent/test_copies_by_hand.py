"""Records that are copied field by field, which is quicker than `attrs.evolve`: nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from pidurable.agent._answered import _at
from pidurable.agent._boundaries import ended
from pidurable.records._entries import own_message
from pidurable.records._messages import AssistantMessage, ToolCallBlock, Usage
from pidurable.records._submissions import SubmissionRecord


def filled(record: type[Any], **given: Any) -> Any:
    """A record of which each field that is not given has a value that no other has."""
    names = attrs.fields_dict(record)
    others = {name: f"its {name}" for name in names if name not in given}
    return record(**others, **given)


def ended_copy(record: Any) -> tuple[Any, Any]:
    tx: Any = SimpleNamespace(now_us=lambda: 7)
    changes: dict[str, Any] = {"answer": 5, "reason": "why", "detail": "in full"}
    expected = attrs.evolve(record, status="unanswered", ended_us=7, **changes)
    return ended(tx, record, "unanswered", **changes), expected


def answer_at(answer: Any) -> tuple[Any, Any]:
    return _at(answer, 7), attrs.evolve(answer, at_us=7)


def own_answer(answer: Any) -> tuple[Any, Any]:
    return own_message(answer), answer


BLOCKS = (ToolCallBlock(name="look", arguments={"at": [1]}, opaque={"signed": "x"}),)


@pytest.mark.parametrize(
    ("copied", "record"),
    [
        (ended_copy, filled(SubmissionRecord)),
        (answer_at, filled(AssistantMessage, blocks=BLOCKS, usage=Usage(requests=1))),
        (own_answer, filled(AssistantMessage, blocks=BLOCKS, usage=Usage(requests=1))),
    ],
    ids=["ended", "at", "own"],
)
def test_a_copy_by_hand_has_every_field(copied: Any, record: Any) -> None:
    """Whatever a record has, or gets in later versions, its copies have."""
    made, expected = copied(record)

    assert made == expected
    assert made is not record
