"""Environments: where tools read and write files and run commands.

`Env` is what a tool may ask of its surroundings, so that a host can put a container or another
machine in its place. `LocalEnv` is the working directory of this process's machine.

Path checks and the environment allowlist are hygiene, not a sandbox: a command can do whatever
the user of this process can. Who needs a boundary supplies an `Env` that has one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, final, runtime_checkable

import attrs
import trio

from pidurable.errors import InvalidArgumentError, show
from pidurable.registry._paths import (
    Place,
    describe_kind,
    display_path,
    nearest_name,
    open_file,
    walk,
)
from pidurable.registry._processes import (
    GRACE_SECONDS,
    ExitStatus,
    OnOutput,
    child_environment,
    run_command,
)
from pidurable.registry._replace import replace_content

__all__ = ["Env", "ExitStatus", "FileInfo", "LocalEnv", "display_path", "nearest_name"]


@attrs.frozen(kw_only=True)
class FileInfo:
    """What stands at a path, after links inside the working directory were followed."""

    kind: str
    """`file`, `folder`, `FIFO`, `socket`, `device` or `special file`."""
    size_bytes: int
    path: str
    """The resolved path, relative to the root."""


@runtime_checkable
class Env(Protocol):
    """Files and processes, as tools see them.

    Paths are relative to `root`, or absolute and below it. Every method that takes one raises
    `InvalidArgumentError` for a path that leads out of the root or that no file can have, and
    `OSError` for what the disk refuses.

    It may also have an attribute `boundary`, a text that names what keeps its files and processes
    in. Permissions are bound to it, as they are to the root; the class stands for it by default.
    """

    @property
    def root(self) -> Path:
        """The working directory."""
        ...

    async def find_info(self, path: str) -> FileInfo | None:
        """Return what stands at a path, or None if nothing does."""
        ...

    async def read_bytes(self, path: str, *, limit: int, offset: int = 0) -> bytes:
        """Return at most `limit` bytes of a regular file, starting at byte `offset`."""
        ...

    async def write_bytes(self, path: str, data: bytes) -> bool:
        """Replace a file's content as one step, or create it; return whether it was created."""
        ...

    async def list_folder(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted."""
        ...

    def lock(self, path: str) -> AbstractAsyncContextManager[None]:
        """Keep others in this process from changing a file while it is read and written."""
        ...

    async def run(
        self,
        command: str,
        *,
        on_output: OnOutput,
        timeout: float | None = None,  # noqa: ASYNC109 - the command's limit, kept by run_command
        cwd: str = ".",
        variables: Mapping[str, str] | None = None,
    ) -> ExitStatus:
        """Run a shell command and return when nothing of it is left."""
        ...


_file_locks: weakref.WeakValueDictionary[tuple[int, int, bytes], trio.Lock] = (
    weakref.WeakValueDictionary()
)
"""By folder and name, for all environments of the process: two may have the same folder."""


@final
class LocalEnv:
    """One folder of this machine, and commands that start in it.

    Args:
        root: The working directory; it must exist. Links in it are resolved now.
        variables: Environment variables for commands, besides the allowlist (PATH, HOME, LANG,
            LC_*, TERM, TMPDIR, VIRTUAL_ENV). Nothing else of this process's environment is passed.
        shell: Absolute path of the shell; by default bash, else sh.
        grace_seconds: Time between SIGTERM and SIGKILL when a command is ended.

    Raises:
        InvalidArgumentError: The root is no folder.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] = ".",
        *,
        variables: Mapping[str, str] | None = None,
        shell: str | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        given = Path(os.path.abspath(root))
        resolved = given.resolve()
        if not resolved.is_dir():
            raise InvalidArgumentError("root", "is not a folder", show(str(root)))
        self._root = resolved
        self._given = given
        self._variables = dict(variables or {})
        self._shell = shell or shutil.which("bash") or "/bin/sh"
        self._grace_seconds = grace_seconds

    @property
    def root(self) -> Path:
        """The working directory, without links."""
        return self._root

    async def find_info(self, path: str) -> FileInfo | None:
        """Return what stands at a path, or None if nothing does."""
        return await trio.to_thread.run_sync(self._find_info, path)

    def _find_info(self, path: str) -> FileInfo | None:
        try:
            with self._walk(path) as place:
                info = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
                return FileInfo(
                    kind=describe_kind(info.st_mode),
                    size_bytes=info.st_size,
                    path=os.fsdecode(place.path),
                )
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def read_bytes(self, path: str, *, limit: int, offset: int = 0) -> bytes:
        """Return at most `limit` bytes of a regular file, starting at byte `offset`.

        Raises:
            InvalidArgumentError: The path leads out of the root, or names no regular file.
            OSError: The file is missing or cannot be read.
        """
        return await trio.to_thread.run_sync(self._read_bytes, path, limit, offset)

    def _read_bytes(self, path: str, limit: int, offset: int) -> bytes:
        with self._walk(path) as place, open(open_file(place), "rb", buffering=0) as file:
            parts = []
            while limit > 0 and (part := os.pread(file.fileno(), limit, offset)):
                parts.append(part)
                limit -= len(part)
                offset += len(part)
            return b"".join(parts)

    async def write_bytes(self, path: str, data: bytes) -> bool:
        """Replace a file's content as one step, or create it; return whether it was created.

        Readers see the old or the new content, never half of it, also after a crash: the new
        content is written beside it, synced, and renamed over it. Mode bits are kept, missing
        folders are created. A name that is a hard link is replaced; its other names keep the old
        content. Not cancellable once it has begun.

        Raises:
            InvalidArgumentError: The path leads out of the root, or names no regular file.
            OSError: The disk refused; the old content stands.
        """
        return await trio.to_thread.run_sync(self._write_bytes, path, data)

    def _write_bytes(self, path: str, data: bytes) -> bool:
        with self._walk(path, make_folders=True) as place:
            return replace_content(place, data)

    async def list_folder(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted. A byte that is not UTF-8 is a lone surrogate."""
        return await trio.to_thread.run_sync(self._list_folder, path)

    def _list_folder(self, path: str) -> tuple[str, ...]:
        with self._walk(path) as place:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(place.name, flags, dir_fd=place.folder)
            try:
                return tuple(sorted(os.listdir(fd)))
            finally:
                os.close(fd)

    @contextlib.asynccontextmanager
    async def _locked(self, path: str) -> AsyncIterator[None]:
        key = await trio.to_thread.run_sync(self._lock_key, path)
        lock = _file_locks.get(key)
        if lock is None:
            lock = _file_locks[key] = trio.Lock()
        async with lock:
            yield

    def lock(self, path: str) -> AbstractAsyncContextManager[None]:
        """Keep others in this process from changing a file while it is read and written.

        In the order of arrival. Other processes, commands included, are not kept out.
        """
        return self._locked(path)

    def _lock_key(self, path: str) -> tuple[int, int, bytes]:
        with self._walk(path, make_folders=True) as place:
            info = os.fstat(place.folder)
            return info.st_dev, info.st_ino, place.name

    async def run(
        self,
        command: str,
        *,
        on_output: OnOutput,
        timeout: float | None = None,  # noqa: ASYNC109 - the command's limit, kept by run_command
        cwd: str = ".",
        variables: Mapping[str, str] | None = None,
    ) -> ExitStatus:
        """Run a shell command and return when nothing of it is left.

        The end of the shell is the end of the command: what it left in the background is ended
        shortly after and counted. When this call is cancelled or times out, every process below is
        ended (SIGTERM, then SIGKILL) before it returns. When this process is killed, a supervisor
        does the same.

        Args:
            command: The text for the shell.
            on_output: Receives standard output and error, in order, in chunks of at most 64 KiB;
                the command waits while it runs.
            timeout: Most seconds; None for no limit.
            cwd: Folder to start in, below the root.
            variables: Environment variables for this command alone.

        Raises:
            InvalidArgumentError: The command or folder cannot be passed on, or lies outside.
            OSError: The shell or the folder cannot be used.
        """
        folder = await trio.to_thread.run_sync(self._find_folder, cwd)
        return await run_command(
            [self._shell, "-c", command],
            cwd=folder,
            environment=child_environment({**self._variables, **(variables or {})}),
            on_output=on_output,
            timeout=timeout,
            grace_seconds=self._grace_seconds,
        )

    def _find_folder(self, path: str) -> str:
        with self._walk(path) as place:
            info = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            return os.path.join(self._root, os.fsdecode(place.path))

    def _walk(
        self, path: str, *, make_folders: bool = False
    ) -> contextlib.AbstractContextManager[Place]:
        # An absolute path may be spelled with the links that the root was given with.
        given, asked = self._given.parts, Path(path).parts if path.startswith("/") else ()
        if self._given != self._root and asked[: len(given)] == given:
            path = os.path.join(self._root, *asked[len(given) :])
        return walk(str(self._root), path, make_folders=make_folders)
