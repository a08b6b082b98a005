"""A Python that has imported the product, and of which a fork becomes each example that it is told.

More than half of what a short example costs is to begin: the interpreter and the imports, again for
each. Here they are paid once. A fork is a process like any other from then on: `__main__`, exit
code, output and what it leaves behind are its own, and what it starts begins from nothing. A line
of the input is `[path, file for the output, file for the errors]`, and a line of the output the
exit code. Warnings are what this Python was started with.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path

SECONDS_MAX = 100


def warm() -> None:
    """Import what the examples use; nothing here may start a thread, which no fork would have."""
    import griffe  # noqa: F401 - reads the docstrings of tools

    import pidurable
    import pidurable.testing

    for name in dir(pidurable):
        getattr(pidurable, name)

    @pidurable.tool
    async def tool(call: pidurable.ToolCall, text: str) -> str:
        """Have a schema made, which takes libraries of its own."""
        return text

    gc.collect()
    gc.freeze()


def become(path: str, output: str, errors: str) -> None:
    """Run the example in this process, which is a fork, as `python path` would."""
    signal.alarm(SECONDS_MAX)
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.path[0] = str(Path(path).parent)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def main() -> None:
    warm()
    for line in sys.stdin:
        path, output, errors = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(path, output, errors)
            return
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
