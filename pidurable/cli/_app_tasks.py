"""The commands of `pidurable task`: looking at tasks, and looking after them."""

from __future__ import annotations

import functools
from typing import Annotated

from cyclopts import App, Parameter

from pidurable.cli._app_parameters import (
    Extensions,
    Output,
    Store,
    Timeout,
    ids_of,
    options_of,
    run_trio,
)
from pidurable.cli._host import Host


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
        live: Annotated[bool, Parameter(negative="")] = False,
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

        options = options_of(host, store=store, output=output)
        return run_trio(
            functools.partial(
                list_tasks,
                host,
                options,
                conversation=conversation,
                kind=kind,
                status=status,
                live=live,
                limit=limit,
            )
        )


def _add_show(app: App, host: Host) -> None:
    @app.command
    def show(*ids: str, store: Store = None, output: Output = None) -> int:
        """Show all that is stored of tasks; works beside a running holder.

        Args:
            ids: Ids of tasks; `-` reads them from standard input.
        """
        from pidurable.cli._tasks import show_tasks

        options = options_of(host, store=store, output=output)
        return run_trio(functools.partial(show_tasks, host, options, ids_of(host, ids)))

    @app.command
    def explain(*ids: str, store: Store = None, output: Output = None) -> int:
        """Say why tasks do not move, down to the one that decides; works beside a running holder.

        With `-o ids` the ids of the tasks that decide are printed.

        Args:
            ids: Ids of tasks; `-` reads them from standard input.
        """
        from pidurable.cli._tasks import explain_tasks

        options = options_of(host, store=store, output=output)
        return run_trio(functools.partial(explain_tasks, host, options, ids_of(host, ids)))

    @app.command
    def tree(
        root: int | None = None,
        /,
        *,
        watch: Annotated[bool, Parameter(name=["--watch", "-w"], negative="")] = False,
        interval: float = 0.5,
        store: Store = None,
        output: Output = None,
    ) -> int:
        """Show tasks and conversations as a tree; works beside a running holder.

        Args:
            root: A task or conversation to begin with; everything by default.
            watch: Show what is live again and again, as much of it as fits; Ctrl-C leaves.
            interval: Seconds between two looks of --watch.
        """
        options = options_of(host, store=store, output=output)
        if watch:
            from pidurable.cli._watch import watch_tree

            return run_trio(functools.partial(watch_tree, host, options, root, interval=interval))
        from pidurable.cli._tasks import show_tree

        return run_trio(functools.partial(show_tree, host, options, root))


def _add_abort(app: App, host: Host) -> None:
    @app.command
    def abort(
        *ids: str,
        yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
        reason: str = "user",
        orphan: Annotated[bool, Parameter(negative="")] = False,
        store: Store = None,
        extension: Extensions = None,
        output: Output = None,
        timeout: Timeout = None,
    ) -> int:
        """Abort tasks with everything below them, and wait until they have ended.

        Args:
            ids: Ids of tasks; `-` reads them from standard input.
            yes: Do not ask.
            reason: Stored with the abort.
            orphan: End also what has begun and whose code is not loaded; nothing of it is undone.
        """
        from pidurable.cli._tasks import abort_tasks

        options = options_of(
            host, store=store, extensions=extension, output=output, timeout=timeout
        )
        return run_trio(
            functools.partial(
                abort_tasks,
                host,
                options,
                ids_of(host, ids),
                yes=yes,
                reason=reason,
                orphan=orphan,
            )
        )


def _add_lift(app: App, host: Host) -> None:
    @app.command
    def retry(
        *ids: str, store: Store = None, output: Output = None, timeout: Timeout = None
    ) -> int:
        """Let blocked tasks be tried again, with their crashes forgiven; runs nothing itself.

        Args:
            ids: Ids of tasks; `-` reads them from standard input.
        """
        from pidurable.cli._task_writes import lift_tasks

        options = options_of(host, store=store, output=output, timeout=timeout)
        return run_trio(
            functools.partial(lift_tasks, host, options, ids_of(host, ids), verb="retry")
        )

    @app.command
    def resume(
        *ids: str, store: Store = None, output: Output = None, timeout: Timeout = None
    ) -> int:
        """Let tasks that a restart interrupted go on, with all below; runs nothing itself.

        Args:
            ids: Ids of tasks; `-` reads them from standard input.
        """
        from pidurable.cli._task_writes import lift_tasks

        options = options_of(host, store=store, output=output, timeout=timeout)
        return run_trio(
            functools.partial(lift_tasks, host, options, ids_of(host, ids), verb="resume")
        )


def _add_signal(app: App, host: Host) -> None:
    @app.command
    def signal(
        id: str,
        name: str,
        payload: str = "null",
        /,
        *,
        key: str | None = None,
        store: Store = None,
        output: Output = None,
        timeout: Timeout = None,
    ) -> int:
        """Send a task a signal, which it reads when it goes on; runs nothing itself.

        Args:
            id: The id of a live task; `-` reads ids from standard input, and sends to all or none.
            name: The name of the signal.
            payload: What it carries, as JSON.
            key: Send it once: the same key again stores nothing.
        """
        from pidurable.cli._task_writes import signal_tasks

        options = options_of(host, store=store, output=output, timeout=timeout)
        return run_trio(
            functools.partial(
                signal_tasks,
                host,
                options,
                ids_of(host, [id]),
                name=name,
                payload=payload,
                key=key,
            )
        )
