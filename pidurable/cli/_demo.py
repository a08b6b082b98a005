"""`pidurable demo`: an agent is killed three times in the middle of its work, and finishes it.

Everything is real but the model, which follows a script: files, commands, pytest, a worker process
of its own, and SIGKILL. The demo looks into the store from outside (it is a reader beside the
worker), so it kills exactly when it has seen what it waits for, and it judges the end by the world:
tests that pass, a log with one line, no process left, a transcript without gaps.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

import pidurable
from pidurable.cli._demo_project import (
    announcements,
    leftover_processes,
    make_project,
    tests_pass,
    transcript_problem,
)
from pidurable.cli._errors import Exit, UsageError
from pidurable.cli._host import Host
from pidurable.cli._render import clean, clean_line, tree_lines
from pidurable.errors import MissingExtraError, PidurableError
from pidurable.harness._reader import Reader, open_reader
from pidurable.records._entries import Entry
from pidurable.records._messages import AssistantMessage, ToolResultMessage

__all__ = ["run_demo"]

PROMPT = "Make the failing test pass, then announce release 1.1."
LOOK_SECONDS = 0.02
SEE_SECONDS_MAX = 20.0
GONE_SECONDS_MAX = 8.0
PARTIAL_CHARS_MIN = 60


@attrs.define(eq=False)
class DemoFailed(Exception):
    """Something did not happen as promised."""

    why: str

    def __str__(self) -> str:
        return self.why


async def run_demo(host: Host, *, keep: bool, directory: str | None) -> int:
    """Run the demo; the last line says `demo: ok`, or why not."""
    if importlib.util.find_spec("pytest") is None:
        raise MissingExtraError("demo", "the demo runs pytest and")
    folder = _make_folder(directory)
    demo = Demo(host, folder)
    try:
        await demo.run()
    except (DemoFailed, PidurableError, OSError, subprocess.TimeoutExpired) as failed:
        host.out(f"the scratch project is left in {folder}")
        host.out(f"demo: FAILED: {clean_line(str(failed))}")
        return Exit.FAILED
    if keep:
        host.out(f"the scratch project is in {folder}")
    else:
        shutil.rmtree(folder)
    host.out("demo: ok")
    return Exit.DONE


def _make_folder(directory: str | None) -> Path:
    """Make a new folder; one that has something in it is left alone."""
    if directory is None:
        return Path(os.path.realpath(tempfile.mkdtemp(prefix="pidurable-demo-")))
    folder = Path(os.path.realpath(directory))
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as error:
        raise UsageError(f"--dir {directory!r} exists already", "Name a new folder") from error
    except OSError as error:
        raise UsageError(f"--dir {directory!r} cannot be created ({error.strerror})") from error
    return folder


@attrs.define(eq=False)
class Demo:
    """One run of the demo in its folder."""

    host: Host
    folder: Path
    lost_chars: int = 0
    """What the tests had put out when they were killed."""
    began: float = attrs.Factory(trio.current_time)

    @property
    def store(self) -> Path:
        """The store of the worker."""
        return self.folder / ".pidurable" / "session.sqlite"

    def say(self, text: str) -> None:
        """Tell the person what happens, with the seconds since the beginning."""
        self.host.out(f"[{trio.current_time() - self.began:5.1f}s] {text}")

    async def run(self) -> None:
        """Make the project, kill three times, resume three times, judge."""
        make_project(self.folder)
        self.say(f"a project with a bug and a failing test: {self.folder}")
        if await trio.to_thread.run_sync(tests_pass, self.folder):
            raise DemoFailed("the test of the scratch project passes before anything was done")
        async with self.worker("run", PROMPT) as worker:
            self.say("an agent starts to work on it")
            chars = await self.until(worker, "a partial answer", self.streamed)
            await self.kill(worker, f"kill 1: while the model streams, {chars} characters in")
        async with self.worker("resume") as worker:
            await self.until(worker, "the tests to run again", self.second_tests)
            await self.kill(worker, "kill 2: while the tests run, which may be repeated")
        async with self.worker("resume") as worker:
            await self.until(worker, "the announcement", self.announced)
            await self.kill(worker, "kill 3: the announcement has gone out, its result is not in")
        async with self.worker("resume") as worker:
            code = await worker.wait()
            if code != 0:
                raise DemoFailed(f"the last resume ended with exit code {code}")
        await self.judge()

    # --- the worker ----------------------------------------------------------------------

    @asynccontextmanager
    async def worker(self, command: str, *arguments: str) -> AsyncIterator[trio.Process]:
        """Run a worker process while the block lasts, and show what it says."""
        tools = Path(__file__).with_name("_demo_tools.py")
        argv = [sys.executable, "-m", "pidurable.cli", command, *arguments]
        argv += ["--script", "model.yaml", "--extension", str(tools)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PIDURABLE_")}
        # The package that runs here, also where it is not installed but run from its folder.
        own = str(Path(pidurable.__file__).parent.parent)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [own, environ.get("PYTHONPATH")]))
        process = await trio.lowlevel.open_process(
            argv,
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with trio.open_nursery() as nursery:
                assert process.stdout is not None
                nursery.start_soon(self.relay, process.stdout)
                yield process
        finally:
            if process.poll() is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def relay(self, stream: trio.abc.ReceiveStream) -> None:
        """Show the worker's lines; ends when the worker does."""
        held = b""
        async for chunk in stream:
            *lines, held = (held + chunk).split(b"\n")
            for line in lines:
                text = clean(line.decode("utf-8", "replace")).rstrip()
                self.host.out(f"         | {text}")

    async def until(
        self, worker: trio.Process, what: str, seen: Callable[[Reader], Awaitable[Any]]
    ) -> Any:
        """Look into the store again and again until something is there."""
        with trio.move_on_after(SEE_SECONDS_MAX):
            while worker.poll() is None:
                if self.store.exists():
                    try:
                        async with open_reader(self.store) as reader:
                            while worker.poll() is None:
                                found = await seen(reader)
                                if found:
                                    return found
                                await trio.sleep(LOOK_SECONDS)
                    except PidurableError:
                        # It is being created right now; what stays wrong runs into the time limit.
                        await trio.sleep(LOOK_SECONDS)
                await trio.sleep(LOOK_SECONDS)
            raise DemoFailed(f"the worker ended (exit code {worker.returncode}) before {what}")
        raise DemoFailed(f"{what} was not seen within {SEE_SECONDS_MAX:g} s")

    async def kill(self, worker: trio.Process, what: str) -> None:
        """Kill the worker, see that nothing of it is left, and say what it cost."""
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
        self.say(f"{what}: SIGKILL")
        left: list[int] = []
        with trio.move_on_after(GONE_SECONDS_MAX):
            while left := leftover_processes(self.folder):  # noqa: ASYNC110 - of other processes
                await trio.sleep(LOOK_SECONDS)
        if left:
            raise DemoFailed(f"processes {left} outlived the worker by {GONE_SECONDS_MAX:g} s")
        self.say("the worker is dead, its commands have ended with it; resume")

    # --- what is waited for --------------------------------------------------------------

    async def live(self, reader: Reader) -> dict[str, Any]:
        """Return what happens in the root conversation right now."""
        conversations = await reader.conversations()
        return (await reader.live(conversations[0].id) or {}) if conversations else {}

    async def streamed(self, reader: Reader) -> int:
        """Return how much of the second answer is committed, once it is enough."""
        live = await self.live(reader)
        if live.get("turn") != 2 or not live.get("partial"):
            return 0
        chars = sum(len(block["text"]) for block in live["partial"]["blocks"])
        return chars if chars >= PARTIAL_CHARS_MIN else 0

    async def second_tests(self, reader: Reader) -> bool:
        """Whether the tests run for the second time and have put something out already."""
        live = await self.live(reader)
        for call in live.get("calls") or ():
            if live["turn"] == 4 and call["status"] == "running" and call["output_tail"]:
                self.lost_chars = len(call["output_tail"])
                return True
        return False

    async def announced(self, reader: Reader) -> bool:
        """Whether the announcement is out while its call has no result."""
        for task in await reader.tasks(live=True, kind="pi.tool"):
            if task.phase == "execute" and task.input.get("name") == "bash":
                return bool(announcements(self.folder))
        return False

    # --- the judgement -------------------------------------------------------------------

    async def judge(self) -> None:
        """See for ourselves that everything happened as promised."""
        async with open_reader(self.store) as reader:
            root = (await reader.conversations())[0].id
            entries = await reader.entries(root, limit=10_000)
            rows = await reader.tree()
            tests = [row.task for row in rows if row.task and row.task.kind == "pi.tool"]
        self.say("the agent has finished. The tasks:")
        self.host.out(f"  {line}" for line in tree_lines(rows, self.host.now_us()))
        problem = transcript_problem(entries)
        if problem is not None:
            raise DemoFailed(f"the transcript is not valid: {problem}")
        self.say("what each crash cost:")
        self.host.out(f"  {line}" for line in _costs(entries, tests, self.lost_chars))
        sent = announcements(self.folder)
        if sent != ["release 1.1"]:
            raise DemoFailed(f"the release was announced {len(sent)} times: {sent}")
        if not await trio.to_thread.run_sync(tests_pass, self.folder):
            raise DemoFailed("the test of the scratch project still fails")
        left = leftover_processes(self.folder)
        if left:
            raise DemoFailed(f"processes {left} were left behind")
        self.say("the test passes, one announcement went out, no process is left, no gap is stored")


def _costs(entries: list[Entry], calls: list[Any], lost_chars: int) -> list[str]:
    """What the transcript and the tasks say about each crash."""
    cut = [
        message
        for entry in entries
        for message in entry.messages
        if isinstance(message, AssistantMessage) and message.status == "aborted"
    ]
    unknown = [
        message
        for entry in entries
        for message in entry.messages
        if isinstance(message, ToolResultMessage) and message.code == "interrupted"
    ]
    again = [task for task in calls if task.invocations > 1 and task.input["name"] == "run_tests"]
    if len(cut) != 1 or len(unknown) != 1 or len(again) != 1:
        raise DemoFailed(
            f"expected one cut answer, one repeated test run and one interrupted call, found "
            f"{len(cut)}, {len(again)} and {len(unknown)}"
        )
    return [
        f"1  about {cut[0].usage.output_tokens} tokens of the answer ({len(cut[0].text)} "
        "characters, kept as cut); the same request was sent again",
        f"2  one more test run (task {again[0].id} ran {again[0].invocations} times) and "
        f"{lost_chars} characters of its output; nothing else was repeated",
        f"3  one more turn of the model, which looked before it went on; {unknown[0].name} was not "
        "run again",
    ]
