"""Replacing a file's content as one step: written beside it, synced, renamed over it.

Readers see the old or the new content, never half of it. What is written beside is not left there:

* an error removes it;
* a process that is killed leaves it, and the next write to the same file removes it. Its name
  depends on the file's name alone, and whoever writes it holds a lock on it, so that what a dead
  process left is told from what a live one is writing. A second writer at the same time takes a
  name drawn at random instead of waiting.

What stands at that name already is never written into: it may be a link to something outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat

from pidurable.registry._paths import Place, check_replaceable

__all__ = ["replace_content"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def replace_content(place: Place, data: bytes) -> bool:
    """Replace a file's content, or create it; return whether it was created.

    Mode bits are kept.

    Raises:
        InvalidArgumentError: The place holds no regular file.
        OSError: The disk refused; the old content stands.
    """
    before = check_replaceable(place)
    fd, beside = _create_beside(place)
    try:
        with open(fd, "wb", buffering=0) as file:
            _write_all(file.fileno(), data)
            if before is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            os.fsync(file.fileno())
            # Renamed while it is locked: until then nobody takes it for a left-over.
            os.rename(beside, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=place.folder)
        raise
    os.fsync(place.folder)
    return before is None


def _create_beside(place: Place) -> tuple[int, bytes]:
    """Create the file to write to, locked where that is possible."""
    # A name of its own: the file's own name with an addition may be longer than allowed.
    name = f".pidurable-{hashlib.sha256(place.name).hexdigest()[:16]}".encode()
    _remove_left_over(place.folder, name)
    with contextlib.suppress(FileExistsError):
        fd = os.open(name, _CREATE, 0o666, dir_fd=place.folder)
        if _lock(fd, without=True) and _stands_at(fd, place.folder, name):
            return fd, name
        # Another process took it for a left-over before it was locked, and removes it.
        os.close(fd)
    name = f".pidurable-{secrets.token_hex(8)}".encode()
    return os.open(name, _CREATE, 0o666, dir_fd=place.folder), name


def _remove_left_over(folder: int, name: bytes) -> None:
    """Remove what a dead process left at a name; leave what a live one is writing."""
    try:
        fd = os.open(name, _LOOK, dir_fd=folder)
    except OSError:
        return  # nothing there, or nothing of ours: a random name is taken
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        if regular and _lock(fd, without=False) and _stands_at(fd, folder, name):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(fd)


def _lock(fd: int, *, without: bool) -> bool:
    """Lock unless somebody else has; `without` is the answer of a file system without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without
    return True


def _stands_at(fd: int, folder: int, name: bytes) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
