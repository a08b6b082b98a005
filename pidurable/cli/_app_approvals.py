"""The commands below `pidurable approval`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from pidurable.cli._app_parameters import Looking, Waiting, ids_of, options_of, run_trio
from pidurable.cli._errors import UsageError
from pidurable.cli._host import STDIN, Host

__all__ = ["approval_app"]

RequestIds = Annotated[
    str, Parameter(help="Ids of permission requests; `-` reads them from standard input.")
]
RequestId = Annotated[
    str, Parameter(help="Of a permission request; `-` reads ids from standard input.")
]
GrantIds = Annotated[str, Parameter(help="Ids of grants; `-` reads them from standard input.")]
By = Annotated[
    str | None, Parameter(name="--by", help="Who decides, for the record; this user by default.")
]


def approval_app(host: Host) -> App:
    """Return the commands about permission requests."""
    app = App(
        name="approval",
        help="Look at what waits for a person, and decide it.",
        help_format="plaintext",
    )
    _add_looking(app, host)
    _add_yes_and_no(app, host)
    _add_decide(app, host)
    _add_grants(app, host)
    return app


def _add_looking(app: App, host: Host) -> None:
    @app.command(name="list")
    def list_(*, below: int | None = None, given: Looking | None = None) -> int:
        """List the calls that wait for a person, oldest first; works beside a running holder.

        Args:
            below: Only those of this task or conversation, and of all below it.
        """
        from pidurable.cli._approvals import list_requests

        return run_trio(list_requests, host, options_of(host, given), below=below)

    @app.command
    def show(*ids: RequestIds, given: Looking | None = None) -> int:
        """Show all of a request: what is asked, by whom, and what a yes covers."""
        from pidurable.cli._approvals import show_requests

        return run_trio(show_requests, host, options_of(host, given), _ids(host, ids))


def _add_yes_and_no(app: App, host: Host) -> None:
    @app.command
    def approve(
        *ids: RequestIds,
        pattern: str | None = None,
        expires: str | None = None,
        by: By = None,
        given: Waiting | None = None,
    ) -> int:
        """Let a call run, exactly as it was shown; runs nothing itself.

        With --pattern later calls of the same tool are let through too, up to the
        same risk and in the same directory, until the grant expires or is revoked.
        In a pattern `*` stands for any characters and `?` for one; a text that
        chains or substitutes commands matches none.

        Args:
            pattern: Allow later calls too whose text matches, as `git log *`.
            expires: How long the pattern counts: 12h, 30d, 2w.
        """
        from pidurable.agent._decisions import Decision, Once, Pattern
        from pidurable.cli._approvals import decide_requests, expiry
        from pidurable.cli._gc import parse_age

        options = options_of(host, given)
        if expires is not None and pattern is None:
            raise UsageError(
                "--expires is for a pattern: a yes without one is for this call alone",
                "Give --pattern too, or leave --expires out",
            )
        age = None if expires is None else parse_age(expires, "--expires")
        decision: Decision = (
            Once() if pattern is None else Pattern(pattern, expires=expiry(host, age))
        )
        return run_trio(decide_requests, host, options, _ids(host, ids), decision, by=by)

    @app.command
    def deny(
        id: RequestId,
        text: str = "",
        /,
        *,
        by: By = None,
        given: Waiting | None = None,
    ) -> int:
        """Refuse a call; the text tells the model why, or what to do instead.

        Args:
            text: What the model is told.
        """
        from pidurable.agent._decisions import Deny
        from pidurable.cli._approvals import decide_requests

        return run_trio(
            decide_requests, host, options_of(host, given), _ids(host, (id,)), Deny(text), by=by
        )


def _add_decide(app: App, host: Host) -> None:
    @app.command
    def decide(
        id: RequestId,
        what: str,
        /,
        *,
        result: str | None = None,
        by: By = None,
        given: Waiting | None = None,
    ) -> int:
        """Say what became of a call that a crash interrupted.

        Args:
            what: `rerun` it, it `happened` with this --result, or it stays `interrupted`: nobody
                can tell, and the model is told so.
            result: What the model gets as its result; `-` reads it from standard input.
        """
        from pidurable.agent._decisions import Decision, Happened, Interrupted, Rerun
        from pidurable.cli._approvals import decide_requests

        options = options_of(host, given)
        simple: dict[str, Decision] = {"rerun": Rerun(), "interrupted": Interrupted()}
        if what not in (*simple, "happened"):
            raise UsageError(
                f"{what!r} is not one of rerun, happened, interrupted",
                "A call that has not begun is decided by `approve` and `deny`",
            )
        if (what == "happened") != (result is not None):
            raise UsageError("--result goes with `happened`, and `happened` needs it")
        decision = simple.get(what)
        if decision is None:
            assert result is not None
            decision = Happened(host.read_stdin() if result == STDIN else result)
        return run_trio(decide_requests, host, options, _ids(host, (id,)), decision, by=by)


def _add_grants(app: App, host: Host) -> None:
    @app.command
    def grants(*, given: Looking | None = None) -> int:
        """List what was allowed for later calls; works beside a running holder."""
        from pidurable.cli._approvals import list_grants

        return run_trio(list_grants, host, options_of(host, given))

    @app.command
    def revoke(*ids: GrantIds, given: Waiting | None = None) -> int:
        """Take grants back: later calls are asked for again."""
        from pidurable.cli._approvals import revoke_grants

        options = options_of(host, given)
        hint = "`pidurable approval grants` shows them; `-` reads them"
        return run_trio(revoke_grants, host, options, ids_of(host, ids, hint=hint))


def _ids(host: Host, ids: tuple[str, ...]) -> list[int]:
    return ids_of(host, ids, hint="`pidurable approval list` shows them; `-` reads them")
