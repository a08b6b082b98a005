"""Measuring in processes of their own: for memory, for restarts, and for one heap a size.

A script starts itself again with a role. Such a process serves requests, a line of JSON each, until
its input ends; so the parent can let processes of several sizes take turns.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import trio

Answer = Callable[[str], Awaitable[dict[str, Any]]]


class Process:
    """A script that was started in a role. Killed at the end of its block."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def ask(self, request: str) -> dict[str, Any]:
        """Send a request, and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self.hear()

    def finish(self) -> None:
        """Let it close what it has open, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:
            raise RuntimeError(f"the process ended with {self._process.returncode}")

    def kill(self) -> None:
        """Kill it as SIGKILL does: nothing of it runs any more."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.kill()


def tell(answer: dict[str, Any]) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)


async def serve(answer: Answer) -> None:
    """Answer requests until there are no more."""
    while request := await trio.to_thread.run_sync(sys.stdin.readline):
        tell(await answer(request.strip()))


def resident_bytes() -> int:
    """What this process holds in memory now, after a collection."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
