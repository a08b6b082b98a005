"""Paths below one root, walked folder by folder, so that what is checked is what is opened.

A path is never checked as text and then opened by name: between the two, a link could be put in
its place. `walk` opens each folder relative to the one before, without following links, resolves
links itself, and ends with the folder that holds the last part and a name that is no link. Whoever
opens that name uses O_NOFOLLOW relative to the folder. Holds at all times:

* Nothing outside the root is opened, created or changed: `..` above the root, an absolute path
  elsewhere and a link that leads out (a chain, a dangling one, as folder or as last part) are
  refused with `InvalidArgumentError`.
* Names pass byte for byte: no normalising of accents, no trimming, no change of case.

This is hygiene against mistakes and simple tricks, not a sandbox: a command that the same agent
runs can do whatever the user can, and a hard link cannot be told from a file.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import stat
import unicodedata
from collections.abc import Iterator

import attrs

from pidurable.errors import InvalidArgumentError, show

LINKS_MAX = 40
PATH_BYTES_MAX = 4096
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@attrs.frozen(kw_only=True)
class Place:
    """Where a path leads: an open folder, and a name in it that is no link."""

    folder: int
    """A descriptor of the folder; valid inside the `walk` block only."""
    name: bytes
    """The last part; `.` for the folder itself."""
    path: bytes
    """The resolved path relative to the root."""


def encode_path(path: str) -> bytes:
    """Return the bytes of a path, or refuse one that no file can have."""
    try:
        data = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError("path", "holds a lone surrogate", show(path)) from error
    if b"\0" in data:
        raise InvalidArgumentError("path", "holds a NUL character", show(path))
    if not data:
        raise InvalidArgumentError("path", "is empty")
    if len(data) > PATH_BYTES_MAX:
        raise InvalidArgumentError("path", f"is longer than {PATH_BYTES_MAX} bytes", show(path))
    return data


def display_path(path: str | bytes) -> str:
    """Render a path for people and models: one line, printable, whatever the name holds."""
    text = os.fsdecode(path)
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    if 0xDC80 <= ord(char) <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape", "replace").decode("ascii")


@contextlib.contextmanager
def walk(root: str, path: str, *, make_folders: bool = False) -> Iterator[Place]:
    """Open the folder that holds `path`, below `root`, and give its place there.

    Blocks on the disk: call it in a thread.

    Args:
        root: The root, as a resolved absolute path.
        path: Relative to the root, or absolute and below it.
        make_folders: Create missing folders on the way.

    Raises:
        InvalidArgumentError: The path leads out of the root, or no file can have it.
        OSError: A folder on the way is missing or cannot be opened.
    """
    walker = _Walker(root=os.fsencode(root), asked=path, make_folders=make_folders)
    try:
        yield walker.find(encode_path(path))
    finally:
        walker.close()


@attrs.define(eq=False)
class _Walker:
    root: bytes
    asked: str
    make_folders: bool
    links: int = 0
    folders: list[int] = attrs.Factory(list)
    """Descriptors from the root down to where the walk is."""
    names: list[bytes] = attrs.Factory(list)
    """The names of `folders`, without the root."""

    def close(self) -> None:
        while self.folders:
            os.close(self.folders.pop())

    def refuse(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError("path", problem, show(display_path(os.fsencode(self.asked))))

    def find(self, path: bytes) -> Place:
        self.folders.append(os.open(self.root, _DIRECTORY))
        todo = self._parts(path, "is not below the working directory")
        while todo:
            name = todo.pop()
            if name == b"..":
                if not self.names:
                    raise self.refuse("leads out of the working directory")
                os.close(self.folders.pop())
                self.names.pop()
                continue
            target = self._read_link(name)
            if target is not None:
                self.links += 1
                if self.links > LINKS_MAX:
                    raise self.refuse(f"goes through more than {LINKS_MAX} links")
                todo.extend(self._parts(target, "is a link out of the working directory"))
            elif todo:
                self._enter(name)
            else:
                return self._place(name)
        return self._place(b".")

    def _place(self, name: bytes) -> Place:
        parts = self.names if name == b"." else [*self.names, name]
        return Place(folder=self.folders[-1], name=name, path=b"/".join(parts) or b".")

    def _parts(self, path: bytes, problem: str) -> list[bytes]:
        """Split a path, last part first; start again at the root for an absolute one."""
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        if path.startswith(b"/"):
            above = [part for part in self.root.split(b"/") if part]
            # Compared part by part, never by prefix: /work/main-old is not below /work/main.
            if parts[: len(above)] != above:
                raise self.refuse(problem)
            parts = parts[len(above) :]
            while self.names:
                os.close(self.folders.pop())
                self.names.pop()
        parts.reverse()
        return parts

    def _read_link(self, name: bytes) -> bytes | None:
        try:
            return os.readlink(name, dir_fd=self.folders[-1])
        except (FileNotFoundError, NotADirectoryError):
            return None  # Whether it may be missing is for the caller to say.
        except OSError as error:
            if error.errno == errno.EINVAL:  # It is there, and no link.
                return None
            raise

    def _enter(self, name: bytes) -> None:
        if self.make_folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.folders[-1])
        try:
            self.folders.append(os.open(name, _DIRECTORY, dir_fd=self.folders[-1]))
        except NotADirectoryError:
            if self._read_link(name) is None:
                raise
            raise self.refuse("changed into a link meanwhile") from None
        self.names.append(name)


def open_file(place: Place) -> int:
    """Open the regular file at a place for reading, without waiting and without following a link.

    Raises:
        InvalidArgumentError: It is a folder, a FIFO, a socket, a device, or a link by now.
        OSError: It is missing or cannot be opened.
    """
    info = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
    # Looked at before opening as well: opening a device may already do something.
    _check_regular(place, info)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(place.name, flags, dir_fd=place.folder)
    try:
        _check_regular(place, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_replaceable(place: Place) -> os.stat_result | None:
    """Return what stands at a place that is to be written, None if nothing does.

    Raises:
        InvalidArgumentError: Something stands there that is no regular file.
    """
    try:
        info = os.stat(place.name, dir_fd=place.folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    _check_regular(place, info)
    return info


def _check_regular(place: Place, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        problem = f"is a {describe_kind(info.st_mode)}, not a regular file"
        raise InvalidArgumentError("path", problem, show(display_path(place.path)))


def describe_kind(mode: int) -> str:
    """Name the kind of file that a mode stands for."""
    return {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "folder",
        stat.S_IFLNK: "link",
        stat.S_IFIFO: "FIFO",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
    }.get(stat.S_IFMT(mode), "special file")


def nearest_name(name: str, known: list[str]) -> str | None:
    """Return the known name that was probably meant, or None.

    Names that differ only in how accents are composed, or in case, come first: to a reader they
    look the same, to the file system they do not.
    """
    folded = _fold(name)
    for candidate in known:
        if candidate != name and _fold(candidate) == folded:
            return candidate
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
