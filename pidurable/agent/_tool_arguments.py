"""Arguments of a call: as a model wrote them, and as the tool takes them.

A model may write anything, also text that is no JSON at all. What does not fit is an error result
that names every problem and shows the schema, so that the model can mend its call.
"""

from __future__ import annotations

from typing import Any

from pidurable.agent._tool_result import FinalResult, error_result
from pidurable.errors import NotJsonError
from pidurable.records import _json
from pidurable.records._limits import ERROR_MESSAGE_BYTES_MAX
from pidurable.records._readonly import copied_json
from pidurable.registry._tool import Tool, ToolArgumentsError
from pidurable.tasks._errors import bounded, error_info

_SCHEMA_BYTES_MAX = 6 * 1024


def validated(tool: Tool[..., Any], arguments: Any) -> dict[str, Any]:
    """The arguments as the tool takes them.

    Raises:
        ToolArgumentsError: They do not fit.
    """
    if not isinstance(arguments, dict):
        raise ToolArgumentsError(f"the arguments are not a JSON object{_why_not_json(arguments)}")
    try:
        # Copied: what the tool does to its arguments does not reach what is stored and shown.
        return tool.validate(copied_json(arguments))
    except ToolArgumentsError:
        raise
    except Exception as raised:  # validators of the tool's own types may raise anything
        raise ToolArgumentsError(described(raised)) from raised


def invalid_arguments(
    tool: Tool[..., Any], problem: ToolArgumentsError, *, rewritten: bool = False
) -> FinalResult:
    """The error result of a call whose arguments do not fit.

    Args:
        tool: The tool, whose schema is shown.
        problem: What does not fit.
        rewritten: Whether hooks have changed what the model wrote.
    """
    schema = bounded(_json.dumps(tool.schema), _SCHEMA_BYTES_MAX)
    said = bounded(str(problem), ERROR_MESSAGE_BYTES_MAX)
    if rewritten:
        said = f"an extension has changed its arguments, and they do not fit any more: {said}"
    text = f"The call was not run: {said}\nThe arguments must fit this schema: {schema}"
    return error_result("invalid_arguments", text)


def described(raised: BaseException) -> str:
    """An error as a model is told of it: its type and its text."""
    info = error_info(raised)
    return f"{info.type}: {info.message}"


def _why_not_json(arguments: Any) -> str:
    """What breaks the rules in the text that a model wrote, so that it can mend it."""
    if isinstance(arguments, str):
        try:
            _json.loads(arguments)
        except NotJsonError as problem:
            return f", {problem}"
    return ""  # another value than an object, or only what was cleaned on its way to the store
