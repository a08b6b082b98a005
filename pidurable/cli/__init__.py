"""The command line: `pidurable`, or `python -m pidurable.cli`.

Only `main` is for others. Everything else is imported when a command needs it.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pidurable.session._seams import Failpoints

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, *, failpoints: Failpoints | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        argv: The arguments behind the program's name; those of the process where None.
        failpoints: Where a test stops the process; see `pidurable.session._seams`.
    """
    try:
        return _main(argv, failpoints)
    except KeyboardInterrupt:
        # While the command was still being imported: nothing has begun.
        print("pidurable: interrupted before anything began", file=sys.stderr)
        return 130


def _main(argv: Sequence[str] | None, failpoints: Failpoints | None) -> int:
    import pidurable
    from pidurable.cli._host import Host
    from pidurable.errors import MissingExtraError

    host = Host.of_process(failpoints)
    given = list(sys.argv[1:] if argv is None else argv)
    if given == ["--version"]:
        host.out(pidurable.__version__)
        return 0
    try:
        from pidurable.cli._app import run_app
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("cyclopts", "rich"):
            raise
        host.err(f"pidurable: {MissingExtraError('cli', 'the command line')}")
        return 2
    handler = host.log_handler()
    logger = logging.getLogger("pidurable")
    logger.addHandler(handler)
    # Thousands of running handlers are no garbage; looking for it among them again and again would
    # take a third of the time.
    often = gc.get_threshold()
    gc.set_threshold(max(often[0], 10_000), *often[1:])
    try:
        return run_app(host, given, pidurable.__version__)
    finally:
        gc.set_threshold(*often)
        logger.removeHandler(handler)
        if host.gone:
            host.forget_streams()
