"""A Python that has imported the command line, and of which forks become commands on a terminal.

To begin is most of what a short command costs: the interpreter and its imports, again for each.
Here that is paid once. A fork is a process like any other from then on: a session of its own, with
the terminal as its controlling one, its environment, folder, signals, `__main__` and exit code.

A line of the input is `{"begin": {argv, folder, environ, device}}`, answered by the process id, or
`{"look": id}`, answered by the status that `waitpid` gives, or null while there is no news.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
from typing import Any


def warm() -> None:
    """Import what commands use; nothing here may start a thread, which no fork would have."""
    import griffe  # noqa: F401 - reads the docstrings of tools
    import yaml  # noqa: F401 - reads scripts

    import pidurable
    import pidurable.cli
    import pidurable.extensions.coding

    for name in dir(pidurable):
        getattr(pidurable, name)
    for module in pkgutil.iter_modules(pidurable.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"pidurable.cli.{module.name}")

    @pidurable.tool
    async def tool(call: pidurable.ToolCall, text: str) -> str:
        """Have a schema made, which takes libraries of its own."""
        return text

    gc.collect()
    gc.freeze()


def become(argv: list[str], folder: str, environ: dict[str, str], device: str) -> None:
    """Run the command line in this process, which is a fork, as `python -m pidurable.cli` would."""
    # Begin as a terminal does: whoever runs the tests may ignore its going away (nohup).
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A session leader that opens a terminal gets it as its controlling one.
    os.setsid()
    terminal = os.open(device, os.O_RDWR)
    for number in range(3):
        os.dup2(terminal, number)
    os.close(terminal)
    # What they replace stays alive as `sys.__stdin__` and so on, and closes nothing.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv = ["", *argv]
    runpy.run_module("pidurable.cli", run_name="__main__", alter_sys=True)


def look(pid: int) -> int | None:
    """How a fork has ended or been stopped, if that is news."""
    found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    return status if found else None


def main() -> None:
    warm()
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        if "look" in told:
            print(json.dumps(look(told["look"])), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            become(**told["begin"])
            return
        print(pid, flush=True)


if __name__ == "__main__":
    main()
