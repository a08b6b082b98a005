"""Mistakes in the code of a definition that only show when it runs: where, what, and the way out.

A class statement and an installation find what can be found without running anything. What is
left is found here, at the first run, and said in the same manner: the class, the method, what was
seen, and what to write instead. Errors that a handler's own code raises keep their text.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import trio

from pidurable.errors import (
    AbortRequestedError,
    DefinitionError,
    PidurableError,
    SessionClosedError,
    SessionPoisonedError,
    StorageRefusedError,
    show,
)
from pidurable.records._tasks import ErrorInfo
from pidurable.tasks._definition import Task, definition_info
from pidurable.tasks._errors import leaves

if TYPE_CHECKING:
    from pidurable.tasks._run import Phase
    from pidurable.tasks._runtime import Runtime
    from pidurable.tasks._tree import Node

UNREADABLE_REMEDY = (
    ". Give a new field a default, or raise `version` and write `migrate`; then the task goes on"
)


def place_of(phase: Phase) -> str:
    """Name the handler of a phase as its author knows it."""
    owner = f"{type(phase.definition).__name__} ({phase.info.name})"
    if phase.aborting:
        return f"`abort` of {owner}"
    method = phase.info.phases[phase.info.by_tag[phase.tag]].method_name
    return f"phase `{method}` of {owner}"


def no_progress(phase: Phase, returned: Any) -> ErrorInfo:
    """Describe a handler that returned and left its task where it was."""
    place = place_of(phase)
    ways = "`await ctx.goto(...)`, `ctx.complete(...)`, `ctx.fail(...)` or `ctx.wait(...)`"
    if phase.aborting:
        ways = "`await ctx.end_aborted(...)`, `ctx.complete(...)` or `ctx.fail(...)`"
    if inspect.iscoroutine(returned):
        returned.close()  # Or Python warns, at some later moment, of what is said here.
        message = f"{place} returned a coroutine that nobody awaited. Await it: {ways}."
    elif type(returned) in phase.info.phases:
        message = (
            f"{place} returned {show(returned)}, but what a handler returns counts for nothing. "
            "Commit it as the next checkpoint: `await ctx.goto(...)`."
        )
    elif phase.reached is not None and not phase.aborting:
        message = (
            f"{place} went to the very checkpoint that it began with, so it would run for ever. "
            "Go to one that differs (a counter in a field will do), or wait for something with "
            "`await ctx.wait(...)`."
        )
    else:
        message = (
            f"{place} returned without durable progress. End it with {ways}, and mind the `await`."
        )
    return ErrorInfo(type="no_progress", message=message)


def stray_cancellation(phase: Phase) -> ErrorInfo:
    """Describe a cancellation that came out of a handler and was not meant for it."""
    message = (
        f"{place_of(phase)} raised trio.Cancelled, which nobody sent it; a cancellation that a "
        "handler keeps must not be raised outside of its own cancel scope"
    )
    return ErrorInfo(type="trio.Cancelled", message=message)


def report_late(runtime: Runtime, phase: Phase, error: object, when: str) -> None:
    """Report what a handler raised when its step was decided already: nothing else will tell."""
    if not isinstance(error, BaseException):
        return
    expected = (
        trio.Cancelled,
        AbortRequestedError,
        SessionClosedError,
        SessionPoisonedError,
        StorageRefusedError,
    )
    late = [leaf for leaf in leaves(error) if not isinstance(leaf, expected)]
    if late:
        text = "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in late)
        runtime.report(
            phase.task_id, f"{place_of(phase)} raised {when}: {text}", kind=phase.info.name
        )


def first_checkpoint(
    runtime: Runtime, definition: Task[Any, Any, Any], input: Any, begins: Any = None
) -> tuple[str, str]:
    """Ask `initial` where a new task starts; return the stored tag and text of it, or of `begins`.

    Raises:
        DefinitionError: It returned something else than a checkpoint of the definition.
    """
    info = definition_info(definition)
    cls = type(definition).__name__
    try:
        first = definition.initial(input) if begins is None else begins
        if type(first) in info.phases:
            return runtime.encode_checkpoint(info, first)
    except Exception as error:
        error.add_note(
            f"It was raised by `initial` of {cls} ({info.name}), which runs inside of the commit "
            "that creates the task."
        )
        raise
    choices = " or ".join(f"{member.__name__}(...)" for member in info.checkpoint_types)
    remedy = f"Return an instance of a checkpoint class: {choices}."
    seen = show(first)
    if inspect.iscoroutine(first):
        first.close()  # Or Python warns, at some later moment, of what is said here.
        seen = "a coroutine"
        remedy += " Whatever has to be awaited belongs into the first phase."
    raise DefinitionError(cls, f"`initial` returned {seen}, which is no checkpoint of it", remedy)


def report_refusal(
    runtime: Runtime, definition: Task[Any, Any, Any] | None, node: Node, reason: str
) -> None:
    """Report why the tasks of a kind are blocked: once in a process, not for each of them."""
    version = 0 if definition is None else definition_info(definition).version
    cls = type(definition).__name__
    older = f"it was stored by version {node.version}, and {cls} is version {version}"
    if definition is None:
        why = "no installed extension defines it; install one, and the tasks go on"
    elif reason == "definition_too_old":
        why = f"{older}; install the newer one, and the tasks go on"
    elif reason == "migration_failed" and not definition_info(definition).has_migrate:
        why = f"{older} and has no `migrate`; give it one, and the tasks go on"
    else:
        return  # Somebody else has said what is wrong with this very task.
    told = (node.kind, reason, node.version, version)
    if told not in runtime.told:
        runtime.told.add(told)
        runtime.report(node.id, f"tasks of this kind are blocked, {reason}: {why}", kind=node.kind)


def fault_message(phase: Phase, error: BaseException, message: str) -> str:
    """Put the place before the text of an error of ours, which knows only the argument."""
    place = place_of(phase)
    if isinstance(error, TypeError) and "NoneType" in message and "await" in message:
        # Python names neither what was awaited nor why it may not be; this is the usual reason.
        return f"{message}; in a commit only `tx.document` is awaited, not `tx.goto` and so on"
    ours = all(isinstance(each, PidurableError) for each in leaves(error))
    return f"{place}: {message}" if ours and place not in message else message
