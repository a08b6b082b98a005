"""The commands of `pidurable conversation` that look: list, follow, log, show; and fork."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from pidurable.cli._app_parameters import (
    Conversation,
    Flag,
    Looking,
    Output,
    Store,
    Waiting,
    options_of,
    run_trio,
)
from pidurable.cli._host import Host


def add_conversation_views(app: App, host: Host) -> None:
    """Add to `pidurable conversation` what writes nothing into one that is there."""
    _add_follow(app, host)
    _add_show(app, host)
    _add_fork(app, host)


def _add_follow(app: App, host: Host) -> None:
    @app.command(name="list")
    def list_(
        *,
        busy: Flag = False,
        limit: int = 100,
        given: Looking | None = None,
    ) -> int:
        """List conversations, those of sub-agents too; works beside a running holder.

        Args:
            busy: Only those in which a run goes on, or is held up.
            limit: Most conversations to list, the newest ones.
        """
        from pidurable.cli._conversation_list import list_conversations

        return run_trio(list_conversations, host, options_of(host, given), busy=busy, limit=limit)

    @app.command
    def follow(
        conversation: Conversation = None,
        /,
        *,
        until_done: Annotated[bool, Parameter(name="--until-done", negative="")] = False,
        limit: int = 10,
        full: Flag = False,
        events: Annotated[bool, Parameter(name="--events", negative="")] = False,
        given: Waiting | None = None,
    ) -> int:
        """Show the log of a conversation and what comes, as it comes; Ctrl-C leaves.

        Works beside a running holder, and takes part in nothing.

        Args:
            until_done: Leave when nothing runs in it: with exit code 1 if its last run had no
                answer, and 6 if a run is left and nobody holds the store.
            limit: How many of the newest entries to begin with.
            full: Show long texts whole.
            events: Write what happens as one JSON object a line.
        """
        from pidurable.cli._conversation_follow import follow_conversation

        options = options_of(host, given)
        return run_trio(
            follow_conversation,
            *(host, options, conversation),
            limit=limit,
            full=full,
            until_done=until_done,
            events=events,
        )


def _add_show(app: App, host: Host) -> None:
    @app.command
    def log(
        conversation: Conversation = None,
        /,
        *,
        store: Store = None,
        limit: int = 200,
        full: Flag = False,
        output: Output = None,
    ) -> int:
        """Show the transcript of a conversation; works beside a running holder.

        Args:
            limit: Most entries to show, the newest ones.
            full: Show long texts whole.
        """
        from pidurable.cli._conversations import show_log

        options = options_of(host, store=store, output=output)
        return run_trio(show_log, host, options, conversation, limit=limit, full=full)

    @app.command
    def show(conversation: Conversation = None, /, *, given: Looking | None = None) -> int:
        """Show where a conversation stands: its agent, what runs, what is queued, what was spent.

        With `-o ids` the queued submissions are printed.
        """
        from pidurable.cli._conversations import show_conversation

        return run_trio(show_conversation, host, options_of(host, given), conversation)


def _add_fork(app: App, host: Host) -> None:
    @app.command
    def fork(
        conversation: int,
        /,
        *,
        at: int | None = None,
        key: str | None = None,
        given: Waiting | None = None,
    ) -> int:
        """Fork a conversation at an entry of its history; runs nothing itself.

        Args:
            conversation: Its id.
            at: The last entry that the fork shares, by default the newest.
            key: Fork once: the same key again gives the first fork.
        """
        from pidurable.cli._fork import fork_conversation

        return run_trio(
            fork_conversation, host, options_of(host, given), conversation, at=at, key=key
        )
