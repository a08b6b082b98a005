"""The commands, their options and help: cyclopts in front, one function of ours behind each.

Built anew for every call of `main`, around its host, so that a test or another program can run
commands without a process of its own.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from pidurable.cli._app_approvals import approval_app
from pidurable.cli._app_conversations import add_conversation_writes
from pidurable.cli._app_help import one_line_paragraphs
from pidurable.cli._app_parameters import (
    Events,
    Flag,
    Looking,
    NoQuestions,
    Timeout,
    Waiting,
    Working,
    options_of,
    run_trio,
)
from pidurable.cli._app_tasks import task_app
from pidurable.cli._app_views import add_conversation_views
from pidurable.cli._errors import Exit, UsageError, debugging, explain_error
from pidurable.cli._host import STDIN, Host

__all__ = ["build_app", "run_app"]

HELP = """Run agents whose work survives the death of the process.

Results go to stdout, everything else to stderr. Options count over
PIDURABLE_* variables, those over [tool.pidurable] in pyproject.toml.

Exit codes: 0 done, 1 the work failed, 2 usage, 4 not found, 5 held by another
process, 6 waits for a person, 7 out of budget, 8 timed out, 130 interrupted.
"""


def build_app(host: Host, version: str) -> App:
    """Return the application; each command returns its exit code."""
    app = App(
        name="pidurable",
        help=HELP,
        help_format="plaintext",
        version=version,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    _add_run(app, host)
    _add_resume(app, host)
    _add_demo(app, host)
    _add_move(app, host)
    _add_doctor(app, host)
    _add_usage(app, host)
    _add_gc(app, host)
    app.command(task_app(host))
    app.command(approval_app(host))
    conversation = App(
        name="conversation",
        help="Look at conversations, say something in them, and look after them.",
        help_format="plaintext",
    )
    add_conversation_views(conversation, host)
    add_conversation_writes(conversation, host)
    app.command(conversation)
    return one_line_paragraphs(app)


def _add_run(app: App, host: Host) -> None:
    @app.command
    def run(
        prompt: str,
        /,
        *,
        given: Working | None = None,
        request_id: Annotated[str | None, Parameter(name="--request-id")] = None,
        timeout: Timeout = None,
        go_on: Annotated[bool, Parameter(name="--continue", negative="")] = False,
        no_questions: NoQuestions = False,
        events: Events = False,
    ) -> int:
        """Hand a prompt to the agent, show its work, and print its answer.

        Ctrl-C once leaves it resumable and says how; twice leaves at once. A call
        that waits for a person is asked for here, on a terminal; without one the
        exit code is 6 once nothing else is left to do, and the call goes on waiting.

        Args:
            prompt: What is to be done; `-` reads it from standard input.
            request_id: Your own id of this prompt: given twice, it is done once.
            go_on: First go on with work that an earlier process left unfinished.
        """
        from pidurable.cli._run import run_prompt

        options = options_of(host, given, timeout=timeout)
        return run_trio(
            run_prompt,
            *(host, options, prompt),
            request_id=request_id,
            go_on=go_on,
            questions=not no_questions,
            events=events,
        )


def _add_resume(app: App, host: Host) -> None:
    @app.command
    def resume(
        *,
        plan: Flag = False,
        given: Working | None = None,
        timeout: Timeout = None,
        no_questions: NoQuestions = False,
        events: Events = False,
    ) -> int:
        """Go on with what a dead, stopped or interrupted process left behind.

        Says first what was interrupted and what becomes of it: safe calls run again, others give
        the model an error result that says so.

        Args:
            plan: Only say what would happen; nothing runs.
        """
        from pidurable.cli._run import resume_work

        options = options_of(host, given, timeout=timeout)
        return run_trio(
            resume_work, host, options, plan_only=plan, questions=not no_questions, events=events
        )


def _add_demo(app: App, host: Host) -> None:
    @app.command
    def demo(
        *,
        keep: Flag = False,
        directory: Annotated[str | None, Parameter(name="--dir")] = None,
    ) -> int:
        """Kill an agent three times and watch it finish its work.

        Args:
            keep: Leave the scratch project there at the end.
            directory: A new folder to work in; by default one in the temporary folder.
        """
        from pidurable.cli._demo import run_demo

        return run_trio(run_demo, host, keep=keep, directory=directory)

    @app.command
    def explain(code: str, /) -> int:
        """Explain a reason code, or a rule of stored values.

        Args:
            code: As shown by `task show`, `resume` and in errors; of rules, as in the manual.
        """
        from pidurable.cli._explanations import explanations

        host.out(host.fitted(explanations(code), host.stdout))
        return Exit.DONE


def _add_move(app: App, host: Host) -> None:
    @app.command
    def export(
        file: str,
        /,
        *,
        overwrite: Flag = False,
        given: Looking | None = None,
    ) -> int:
        """Write a whole session into a file of JSON lines; works beside a running holder.

        The same session gives the same bytes. The file holds everything that was said in it.

        Args:
            file: The new file; `-` writes to standard output.
            overwrite: Replace a file that is there.
        """
        from pidurable.cli._move import export_store

        options = options_of(host, given)
        move = functools.partial(export_store, host, options, file, overwrite=overwrite)
        return _whole_or_not(host, move)

    @app.command(name="import")
    def import_(
        file: str,
        /,
        *,
        as_: Annotated[str | None, Parameter(name="--as")] = None,
        value_mib: int = 16,
        given: Looking | None = None,
    ) -> int:
        """Make a store of an export, whole or not at all; runs nothing itself.

        A move goes on under the keys of the original, which must never be worked on again. A copy
        is another session: unfinished work is done by both, each for itself.

        Args:
            file: The export; `-` reads it from standard input.
            as_: `move` or `copy`; must be said.
            value_mib: Most MiB of one value.
        """
        from pidurable.cli._move import import_store

        options = options_of(host, given)
        move = functools.partial(import_store, host, options, file, as_=as_, value_mib=value_mib)
        return _whole_or_not(host, move)


def _whole_or_not(host: Host, move: Callable[[], Awaitable[int]]) -> int:
    """Run what Ctrl-C cuts short without a trace: there is nothing to resume."""
    try:
        return run_trio(move)
    except KeyboardInterrupt:
        host.err("pidurable: interrupted; nothing was made", "yellow")
        return Exit.INTERRUPTED


def _add_doctor(app: App, host: Host) -> None:
    @app.command
    def doctor(
        *,
        full: Flag = False,
        given: Looking | None = None,
    ) -> int:
        """Say what is wrong with the store, and what to do; works beside a running holder.

        Looks and changes nothing, also at a store that is damaged. Exit code 1 if there is
        anything to act on. With `-o ids` the ids of the blocked tasks are printed.

        Args:
            full: Also read every record: indexes, references, stored values and blobs.
        """
        from pidurable.cli._doctor import show_doctor

        return run_trio(show_doctor, host, options_of(host, given), full=full)


def _add_usage(app: App, host: Host) -> None:
    @app.command
    def usage(below: int | None = None, /, *, given: Looking | None = None) -> int:
        """Say what was spent, by model and by tool; works beside a running holder.

        Failed, aborted and interrupted attempts count too. With `-o ids` the
        models are printed.

        Args:
            below: Only what this task or conversation has spent, with all below it.
        """
        from pidurable.cli._usage import show_usage

        return run_trio(show_usage, host, options_of(host, given), below)


def _add_gc(app: App, host: Host) -> None:
    @app.command
    def gc(
        *,
        older_than: Annotated[str, Parameter(name="--older-than")],
        keep_outcomes: Annotated[bool, Parameter(name="--keep-outcomes", negative="")] = False,
        dry_run: Annotated[bool, Parameter(name="--dry-run", negative="")] = False,
        yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
        given: Waiting | None = None,
    ) -> int:
        """Remove ended tasks with everything below them, and bytes that nothing refers to.

        A task that no other owns goes with all that it owned, or not at all: when everything below
        it ended long enough ago and nothing else needs it. Conversations that no task owns stay,
        with all that was said in them. Who hands the same in again later, under the same key, is
        told how it ended.

        Args:
            older_than: How long ago the last of it must have ended: 30d, 12h, 2w.
            keep_outcomes: Keep the outcomes of the tasks that no other owned.
            dry_run: Only say what would go; works beside a running holder.
            yes: Do not ask.
        """
        from pidurable.cli._gc import collect_garbage

        options = options_of(host, given)
        return run_trio(
            collect_garbage,
            *(host, options, older_than),
            keep=keep_outcomes,
            dry_run=dry_run,
            yes=yes,
        )


# --- the edge ---------------------------------------------------------------------------------


def run_app(host: Host, argv: Sequence[str], version: str) -> int:
    """Run one command line and return its exit code; no error leaves it."""
    host.store = None
    try:
        try:
            app = build_app(host, version)
            found = app(
                _mark_stdin(argv),
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
        except CycloptsError as error:
            helps = " ".join(("pidurable", *(error.command_chain or ()), "--help"))
            raise UsageError(_plain(error), f"`{helps}` shows what there is") from error
        return Exit.DONE if found is None else int(found)
    except BrokenPipeError:
        # Whoever read the result went away, as `head` does. Nothing is there to be told.
        host.forget_streams()
        return Exit.FAILED
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):
            # How the library that draws help says the same.
            host.forget_streams()
            return Exit.FAILED
        # Nothing of ours does this; the code of an extension may.
        host.err(f"pidurable: code of an extension left the program with sys.exit({left.code!r})")
        return Exit.FAILED
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        explained = explain_error(error)
        if debugging():
            host.err("".join(traceback.format_exception(error)).rstrip())
        host.say(explained.lines(), "red" if explained.code is Exit.FAILED else "yellow")
        return explained.code


def _mark_stdin(argv: Sequence[str]) -> list[str]:
    """Replace a lone `-`, which the parser takes for an option, by a word no argv can hold."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [STDIN if word == "-" and place < end else word for place, word in enumerate(argv)]


def _plain(error: CycloptsError) -> str:
    """The parser's own words, on one line."""
    text = " ".join(str(error).replace(STDIN, "-").split())
    return text if text.endswith("...") else text.removesuffix(".")
