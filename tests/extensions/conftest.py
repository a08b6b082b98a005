"""A stand-in for a running call, good enough for tools that use output, details and env."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pidurable.registry import LocalEnv, ToolResult


class Call:
    """Collects what a tool shows; keeps at most `bytes_max` of it, as the agent does."""

    id = 1
    name = "test"
    conversation_id = 1

    def __init__(self, env: LocalEnv) -> None:
        self.env = env
        self.text = ""
        self.pieces = 0
        self.length = 0
        self.bytes_max = 100_000
        self.shown: Any = None

    async def output(self, text: str) -> None:
        self.pieces += 1
        self.length += len(text)
        self.text = (self.text + text)[-self.bytes_max :]

    async def details(self, value: Any) -> None:
        self.shown = value

    async def run(self, tool: Any, **arguments: Any) -> tuple[bool, str]:
        """Run a tool as the agent does; return whether it is an error, and what the model sees."""
        self.text = ""
        result = await tool.invoke(tool.validate(arguments), self)
        assert isinstance(result, ToolResult)
        return result.error, self.text if result.content is None else str(result.content)


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """A call in an environment of its own."""
    (tmp_path / "work").mkdir()
    return Call(LocalEnv(tmp_path / "work", grace_seconds=0.05))
