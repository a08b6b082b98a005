"""The extension of the demo: a tool that may be repeated, because it only looks."""

from __future__ import annotations

import codecs
import shlex
import sys

from pidurable import Extension, ToolCall, ToolResult, tool


@tool(replay="safe")
async def run_tests(call: ToolCall) -> ToolResult:
    """Run the tests of the project and return what pytest says."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def show(data: bytes) -> None:
        await call.output(decoder.decode(data))

    # Neither cache nor bytecode: running the tests twice leaves nothing that running once does not.
    command = f"{shlex.quote(sys.executable)} -B -m pytest -q -p no:cacheprovider --no-header"
    status = await call.env.run(
        command,
        on_output=show,
        timeout=60,
        variables={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ""},
    )
    await call.details({"exit_code": status.code})
    return ToolResult(error=status.code != 0)


extension = Extension("demo", tools=[run_tests])
