"""The commands below `pidurable conversation` that change something."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from pidurable.cli._app_parameters import Conversation, Flag, Waiting, ids_of, options_of, run_trio
from pidurable.cli._host import Host

__all__ = ["add_conversation_writes"]

Where = Annotated[int | None, Parameter(name="--conversation", help="Its id; the root by default.")]
RequestId = Annotated[
    str | None,
    Parameter(name="--request-id", help="Your own id of this: given twice, it is done once."),
]


def add_conversation_writes(app: App, host: Host) -> None:
    """Add the commands that hand something in, take it back, continue, compact and abort."""
    _add_submit(app, host)
    _add_write(app, host)
    _add_withdraw(app, host)
    _add_continue(app, host)
    _add_compact(app, host)
    _add_abort(app, host)


def _add_submit(app: App, host: Host) -> None:
    @app.command
    def submit(
        text: str,
        /,
        *,
        conversation: Where = None,
        steer: Flag = False,
        reject: Flag = False,
        request_id: RequestId = None,
        given: Waiting | None = None,
    ) -> int:
        """Hand in an input without waiting for its answer; runs nothing itself.

        While a run is active it waits for the end of the run, unless told otherwise.
        `pidurable run` hands in and waits.

        Args:
            text: What is said; `-` reads it from standard input.
            steer: Say it to the run that is active, after its next tool round.
            reject: Refuse it while a run is active.
        """
        from pidurable.cli._conversation_writes import check_when_busy, submit_text

        options = options_of(host, given)
        return run_trio(
            submit_text,
            host,
            options,
            text,
            conversation=conversation,
            when_busy=check_when_busy(steer=steer, reject=reject),
            request_id=request_id,
        )


def _add_write(app: App, host: Host) -> None:
    @app.command
    def write(
        text: str,
        /,
        *,
        conversation: Where = None,
        request_id: RequestId = None,
        given: Waiting | None = None,
    ) -> int:
        """Write a note that the model sees with its next request; asks it nothing.

        While a run is active it is placed after the next tool round, or at its end.

        Args:
            text: What is said; `-` reads it from standard input.
        """
        from pidurable.cli._conversation_writes import write_text

        options = options_of(host, given)
        return run_trio(
            write_text, host, options, text, conversation=conversation, request_id=request_id
        )

    @app.command
    def reset(
        conversation: Conversation = None,
        /,
        *,
        given: Waiting | None = None,
    ) -> int:
        """Let the model's context start anew; the history keeps everything."""
        from pidurable.cli._conversation_writes import reset_conversation

        return run_trio(reset_conversation, host, options_of(host, given), conversation)


def _add_withdraw(app: App, host: Host) -> None:
    @app.command
    def withdraw(*ids: str, given: Waiting | None = None) -> int:
        """Take back input that is still queued, and print what it said.

        Exit code 1 if any was placed already.

        Args:
            ids: Ids of submissions; `-` reads them from standard input.
        """
        from pidurable.cli._conversation_writes import withdraw_submissions

        options = options_of(host, given)
        hint = "`pidurable conversation show` shows what is queued; `-` reads them"
        found = ids_of(host, ids, hint=hint)
        return run_trio(withdraw_submissions, host, options, found)


def _add_continue(app: App, host: Host) -> None:
    @app.command(name="continue")
    def continue_(
        conversation: Conversation = None,
        /,
        *,
        given: Waiting | None = None,
    ) -> int:
        """Continue a run that failed, was aborted or was cut; runs nothing itself."""
        from pidurable.cli._conversation_writes import continue_conversation

        return run_trio(continue_conversation, host, options_of(host, given), conversation)


def _add_compact(app: App, host: Host) -> None:
    @app.command
    def compact(
        conversation: Conversation = None,
        /,
        *,
        instructions: str | None = None,
        given: Waiting | None = None,
    ) -> int:
        """Replace the older part of the context by a summary; runs nothing itself.

        Nothing is deleted, and `conversation log` goes on showing everything.

        Args:
            instructions: What the summary should hold besides.
        """
        from pidurable.cli._conversation_writes import compact_conversation

        options = options_of(host, given)
        return run_trio(
            compact_conversation, host, options, conversation, instructions=instructions
        )


def _add_abort(app: App, host: Host) -> None:
    @app.command
    def abort(
        conversation: Conversation = None,
        /,
        *,
        reason: str = "user",
        given: Waiting | None = None,
    ) -> int:
        """Abort what runs in a conversation, and print what was queued in it.

        Args:
            reason: Stored with the abort.
        """
        from pidurable.cli._conversation_writes import abort_conversation

        return run_trio(
            abort_conversation, host, options_of(host, given), conversation, reason=reason
        )
