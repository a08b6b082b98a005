"""The commands of `pidurable task`: looking at tasks, and looking after them."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from pidurable.cli._app_parameters import (
    Extensions,
    Flag,
    Looking,
    Output,
    Store,
    Timeout,
    Waiting,
    ids_of,
    options_of,
    run_trio,
)
from pidurable.cli._host import Host

TaskIds = Annotated[str, Parameter(help="Ids of tasks; `-` reads them from standard input.")]


def task_app(host: Host) -> App:
    """Return the application of `pidurable task`."""
    app = App(name="task", help="Look at tasks, and look after them.", help_format="plaintext")
    _add_list(app, host)
    _add_show(app, host)
    _add_abort(app, host)
    _add_lift(app, host)
    _add_signal(app, host)
    return app


def _add_list(app: App, host: Host) -> None:
    @app.command(name="list")
    def list_(
        *,
        store: Store = None,
        conversation: int | None = None,
        kind: str | None = None,
        status: str | None = None,
        live: Flag = False,
        limit: int = 100,
        output: Output = None,
    ) -> int:
        """List the newest tasks; works beside a running holder.

        Args:
            conversation: Only tasks of this conversation.
            kind: Only tasks of this definition, as pi.tool.
            status: Only tasks with this status: pending, running, waiting, completing, terminal.
            live: Only tasks that have not ended.
            limit: Most tasks to list.
        """
        from pidurable.cli._tasks import list_tasks

        return run_trio(
            list_tasks,
            host,
            options_of(host, store=store, output=output),
            conversation=conversation,
            kind=kind,
            status=status,
            live=live,
            limit=limit,
        )


def _add_show(app: App, host: Host) -> None:
    @app.command
    def show(*ids: TaskIds, given: Looking | None = None) -> int:
        """Show all that is stored of tasks; works beside a running holder."""
        from pidurable.cli._tasks import show_tasks

        return run_trio(show_tasks, host, options_of(host, given), ids_of(host, ids))

    @app.command
    def explain(*ids: TaskIds, given: Looking | None = None) -> int:
        """Say why tasks do not move, down to the one that decides; works beside a running holder.

        With `-o ids` the ids of the tasks that decide are printed.
        """
        from pidurable.cli._tasks import explain_tasks

        return run_trio(explain_tasks, host, options_of(host, given), ids_of(host, ids))

    @app.command
    def tree(
        root: int | None = None,
        /,
        *,
        watch: Annotated[bool, Parameter(name=["--watch", "-w"], negative="")] = False,
        interval: float = 0.5,
        given: Looking | None = None,
    ) -> int:
        """Show tasks and conversations as a tree; works beside a running holder.

        Args:
            root: A task or conversation to begin with; everything by default.
            watch: Show what is live again and again, as much of it as fits; Ctrl-C leaves.
            interval: Seconds between two looks of --watch.
        """
        options = options_of(host, given)
        if watch:
            from pidurable.cli._watch import watch_tree

            return run_trio(watch_tree, host, options, root, interval=interval)
        from pidurable.cli._tasks import show_tree

        return run_trio(show_tree, host, options, root)


def _add_abort(app: App, host: Host) -> None:
    @app.command
    def abort(
        *ids: TaskIds,
        yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
        reason: str = "user",
        orphan: Flag = False,
        store: Store = None,
        extension: Extensions = None,
        output: Output = None,
        timeout: Timeout = None,
    ) -> int:
        """Abort tasks with everything below them, and wait until they have ended.

        Args:
            yes: Do not ask.
            reason: Stored with the abort.
            orphan: End also what has begun and whose code is not loaded; nothing of it is undone.
        """
        from pidurable.cli._tasks import abort_tasks

        options = options_of(
            host, store=store, extensions=extension, output=output, timeout=timeout
        )
        found = ids_of(host, ids)
        return run_trio(abort_tasks, host, options, found, yes=yes, reason=reason, orphan=orphan)


def _add_lift(app: App, host: Host) -> None:
    def lift(verb: Literal["retry", "resume"], ids: tuple[str, ...], given: Waiting | None) -> int:
        from pidurable.cli._task_writes import lift_tasks

        return run_trio(lift_tasks, host, options_of(host, given), ids_of(host, ids), verb=verb)

    @app.command
    def retry(*ids: TaskIds, given: Waiting | None = None) -> int:
        """Let blocked tasks be tried again, with their crashes forgiven; runs nothing itself."""
        return lift("retry", ids, given)

    @app.command
    def resume(*ids: TaskIds, given: Waiting | None = None) -> int:
        """Let tasks that a restart interrupted go on, with all below; runs nothing itself."""
        return lift("resume", ids, given)


def _add_signal(app: App, host: Host) -> None:
    @app.command
    def signal(
        id: str,
        name: str,
        payload: str = "null",
        /,
        *,
        key: str | None = None,
        given: Waiting | None = None,
    ) -> int:
        """Send a task a signal, which it reads when it goes on; runs nothing itself.

        Args:
            id: The id of a live task; `-` reads ids from standard input, and sends to all or none.
            name: The name of the signal.
            payload: What it carries, as JSON.
            key: Send it once: the same key again stores nothing.
        """
        from pidurable.cli._task_writes import signal_tasks

        options = options_of(host, given)
        found = ids_of(host, [id])
        return run_trio(signal_tasks, host, options, found, name=name, payload=payload, key=key)
