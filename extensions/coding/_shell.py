"""The `bash` tool: run a command, show its output while it runs, leave nothing behind."""

from __future__ import annotations

from typing import Any

from pidurable import ExitStatus, ToolCall, ToolResult, tool
from pidurable.errors import InvalidArgumentError

from ._text import OutputText

SECONDS_MAX = 3600.0


def _command_text(arguments: Any) -> str:
    return str(arguments["command"])


@tool(output_keep="tail", permission_text=_command_text, reach={"private", "untrusted", "outward"})
async def bash(command: str, call: ToolCall, *, timeout: float = 120.0) -> ToolResult:  # noqa: ASYNC109
    """Run a shell command in the working directory and return its output.

    Standard output and standard error are shown together, in order; of a long output the end is
    kept. The command reads nothing from standard input. Processes that it leaves running in the
    background are ended when it returns.

    Args:
        command: The text for the shell.
        timeout: Most seconds to run, at most 3600; then the command is ended.
    """
    if not 0 < timeout <= SECONDS_MAX:
        return ToolResult(
            f"timeout must be above 0 and at most 3600 seconds, got {timeout}", error=True
        )
    text = OutputText()
    ends_line = True

    async def show(data: bytes, *, final: bool = False) -> None:
        nonlocal ends_line
        piece = text.feed(data, final=final)
        if piece:
            ends_line = piece.endswith("\n")
            await call.output(piece)

    try:
        status = await call.env.run(command, on_output=show, timeout=timeout)
    except (OSError, InvalidArgumentError) as error:
        return ToolResult(f"the command could not be started: {error}", error=True)
    await show(b"", final=True)
    remarks = _remarks(status, timeout)
    if remarks:
        await call.output(("" if ends_line else "\n") + "\n".join(remarks) + "\n")
    await call.details(
        {
            "exit_code": status.code,
            "timed_out": status.timed_out,
            "leftover": status.leftover,
            "survivors": list(status.survivors),
        }
    )
    return ToolResult(error=status.timed_out or status.code != 0)


def _remarks(status: ExitStatus, timeout: float) -> list[str]:
    """Say what the output alone does not show."""
    remarks = []
    if status.timed_out:
        remarks.append(f"[ended after its time limit of {timeout:g} s]")
    elif status.code is None:
        remarks.append("[ended from outside; its exit code is not known]")
    elif status.code < 0:
        remarks.append(f"[ended by signal {-status.code}]")
    elif status.code > 0:
        remarks.append(f"[exit code {status.code}]")
    if status.leftover:
        remarks.append(
            f"[{status.leftover} background process{'es' if status.leftover > 1 else ''} ended]"
        )
    if status.survivors:
        numbers = ", ".join(map(str, status.survivors))
        remarks.append(f"[could not be ended and still running: process {numbers}]")
    return remarks
