"""Files of a local environment: what is read and written, and what is refused."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from pidurable.errors import InvalidArgumentError
from pidurable.registry import Env, LocalEnv, display_path, nearest_name
from pidurable.registry._paths import walk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A working directory beside a folder that must stay untouched."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "work-old").mkdir()
    (tmp_path / "work-old" / "x").write_text("old")
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "work" / "a.txt").write_text("content")
    return Path(os.path.realpath(tmp_path / "work"))


def outside_state(root: Path) -> dict[str, str]:
    """Everything outside of the working directory, with its content."""
    return {
        str(path): path.read_text()
        for folder in ("outside", "work-old")
        for path in (root.parent / folder).rglob("*")
        if path.is_file()
    }


def test_a_local_environment_is_an_environment(root: Path) -> None:
    """LocalEnv has every member that the protocol asks for."""
    env: Env = LocalEnv(root)

    assert isinstance(env, Env)
    assert env.root == root


def test_a_root_that_is_no_folder_is_refused(root: Path) -> None:
    """A missing root, or a file as root, is an error at once."""
    with pytest.raises(InvalidArgumentError, match="root: is not a folder"):
        LocalEnv(root / "a.txt")
    with pytest.raises(InvalidArgumentError, match="root: is not a folder"):
        LocalEnv(root / "missing")


def _link(name: str, target: str) -> Callable[[Path], str]:
    def make(root: Path) -> str:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(target)
        return name

    return make


def _chain(root: Path) -> str:
    (root / "first").symlink_to("second")
    (root / "second").symlink_to("sub/third")
    (root / "sub/third").symlink_to("../../outside/secret")
    return "first"


def _folder_link(root: Path) -> str:
    (root / "folder").symlink_to("../outside")
    return "folder/secret"


def _dangling_folder_link(root: Path) -> str:
    (root / "folder").symlink_to("../outside/none")
    return "folder/new"


def _loop(root: Path) -> str:
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    return "one"


def _dots_behind_link(root: Path) -> str:
    (root / "here").symlink_to("sub")
    return "here/../../outside/secret"


OUTSIDE: dict[str, Callable[[Path], str]] = {
    "dots": lambda root: "../outside/secret",
    "dots inside": lambda root: "sub/../../outside/secret",
    "dots alone": lambda root: "..",
    "absolute": lambda root: str(root.parent / "outside" / "secret"),
    "absolute prefix": lambda root: f"{root}-old/x",
    "absolute with dots": lambda root: f"{root}/../outside/secret",
    "root of the disk": lambda root: "/",
    "proc": lambda root: f"/proc/self/root{root}/a.txt",
    "relative link": _link("link", "../outside/secret"),
    "absolute link": _link("link", "/etc/passwd"),
    "dangling link": _link("link", "../outside/new"),
    "absolute dangling link": _link("link", "/nowhere/new"),
    "link with the root as prefix": lambda root: _link("link", f"{root}-old/x")(root),
    "chain": _chain,
    "folder link": _folder_link,
    "dangling folder link": _dangling_folder_link,
    "loop": _loop,
    "dots behind a link": _dots_behind_link,
    "NUL": lambda root: "a\0.txt",
    "lone surrogate": lambda root: "a\ud800.txt",
    "empty": lambda root: "",
    "too long": lambda root: "a/" * 3000,
}


@pytest.mark.parametrize("case", list(OUTSIDE))
async def test_a_path_out_of_the_root_is_refused_by_everything(root: Path, case: str) -> None:
    """Reading, writing, listing, looking, locking, running: each refuses; nothing is touched."""
    # C088
    env = LocalEnv(root)
    path = OUTSIDE[case](root)
    before = outside_state(root)

    async def ignore(data: bytes) -> None:
        raise AssertionError(data)

    async def lock() -> None:
        async with env.lock(path):
            pass

    for attempt in (
        lambda: env.read_bytes(path, limit=10),
        lambda: env.write_bytes(path, b"overwritten"),
        lambda: env.list_folder(path),
        lambda: env.find_info(path),
        lock,
        lambda: env.run("echo x", on_output=ignore, cwd=path),
    ):
        with pytest.raises(InvalidArgumentError, match="path: "):
            await attempt()

    assert outside_state(root) == before


async def test_dots_behind_a_missing_folder_lead_nowhere(root: Path) -> None:
    """A folder that is missing, or is made on the way, is no way out either."""  # C088
    env = LocalEnv(root)
    before = outside_state(root)

    with pytest.raises(FileNotFoundError):
        await env.read_bytes("new/../../outside/secret", limit=10)
    with pytest.raises(InvalidArgumentError, match="leads out of the working directory"):
        await env.write_bytes("new/../../outside/new", b"")

    assert outside_state(root) == before


async def test_a_link_that_is_put_in_place_after_the_check_is_not_followed(root: Path) -> None:
    """A name that becomes a link between check and open is not read and not written through."""
    # C088
    from pidurable.registry._paths import check_replaceable, open_file

    with walk(str(root), "a.txt") as place:
        (root / "a.txt").unlink()
        (root / "a.txt").symlink_to("../outside/secret")

        with pytest.raises(InvalidArgumentError, match="is a link, not a regular file"):
            open_file(place)
        with pytest.raises(InvalidArgumentError, match="is a link, not a regular file"):
            check_replaceable(place)


async def test_a_folder_that_is_swapped_for_a_link_is_not_entered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that becomes a link between look and open is refused."""  # C088
    read_link = os.readlink

    def swap(name: bytes, *, dir_fd: int) -> bytes:
        try:
            return read_link(name, dir_fd=dir_fd)
        finally:
            if name == b"sub" and not (root / "sub").is_symlink():
                (root / "sub").rmdir()
                (root / "sub").symlink_to("../outside")

    monkeypatch.setattr(os, "readlink", swap)

    with pytest.raises(InvalidArgumentError, match="changed into a link"):
        await LocalEnv(root).read_bytes("sub/secret", limit=10)


async def test_links_inside_of_the_root_are_followed(root: Path) -> None:
    """A link to a place below the root works: relative, absolute, dangling, as folder."""
    env = LocalEnv(root)
    (root / "relative").symlink_to("a.txt")
    (root / "absolute").symlink_to(root / "a.txt")
    (root / "folder").symlink_to("sub")
    (root / "dangling").symlink_to("sub/new")

    await env.write_bytes("relative", b"changed")
    await env.write_bytes("dangling", b"new")

    assert await env.read_bytes("absolute", limit=10) == b"changed"
    assert await env.read_bytes("folder/../folder/new", limit=10) == b"new"
    assert (root / "relative").is_symlink()


async def test_a_root_given_through_a_link_accepts_paths_of_both_spellings(root: Path) -> None:
    """Absolute paths may be spelled as the root was given, or as it resolves."""
    (root.parent / "shortcut").symlink_to("work")
    env = LocalEnv(root.parent / "shortcut")

    for spelled in (root.parent / "shortcut" / "a.txt", root / "a.txt"):
        assert await env.read_bytes(str(spelled), limit=99) == b"content"


def _make_fifo(path: Path) -> None:
    os.mkfifo(path)


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(_make_fifo, "FIFO"), (_make_socket, "socket"), (Path.mkdir, "folder")],
)
async def test_only_regular_files_are_read_and_written(
    root: Path, make: Callable[[Path], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO, a socket and a folder are refused at once, without waiting on them."""
    monkeypatch.chdir(root)
    make(root / "odd")
    env = LocalEnv(root)

    with pytest.raises(InvalidArgumentError, match=f"is a {kind}, not a regular file"):
        await env.read_bytes("odd", limit=1)
    with pytest.raises(InvalidArgumentError, match=f"is a {kind}, not a regular file"):
        await env.write_bytes("odd", b"")
    info = await env.find_info("odd")
    assert info is not None
    assert info.kind == kind


async def test_reading_takes_the_part_that_was_asked_for(root: Path) -> None:
    """Offset and limit bound what is read; past the end there is nothing."""
    env = LocalEnv(root)

    assert await env.read_bytes("a.txt", limit=3, offset=2) == b"nte"
    assert await env.read_bytes("a.txt", limit=3, offset=99) == b""
    assert await env.read_bytes("sub/../a.txt", limit=0) == b""
    with pytest.raises(FileNotFoundError):
        await env.read_bytes("missing", limit=1)


async def test_writing_replaces_in_one_step_and_keeps_the_mode(root: Path) -> None:
    """The old file stays whole for whoever has it open; mode bits stay; nothing is left beside."""
    env = LocalEnv(root)
    (root / "a.txt").chmod(0o754)
    os.link(root / "a.txt", root.parent / "outside" / "hard")

    with (root / "a.txt").open() as old:
        created = await env.write_bytes("a.txt", b"new")

        assert old.read() == "content"
    assert not created
    assert (root / "a.txt").read_bytes() == b"new"
    assert stat.S_IMODE((root / "a.txt").stat().st_mode) == 0o754
    assert (root.parent / "outside" / "hard").read_text() == "content"
    assert sorted(os.listdir(root)) == ["a.txt", "sub"]


async def test_writing_makes_missing_folders(root: Path) -> None:
    """A new file may lie in folders that do not exist yet."""
    assert await LocalEnv(root).write_bytes("x/y/z.txt", b"1")

    assert (root / "x/y/z.txt").read_bytes() == b"1"


async def test_a_write_that_fails_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves the old content, and no half file beside it."""

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)

    with pytest.raises(OSError, match="No space left"):
        await LocalEnv(root).write_bytes("a.txt", b"new")
    monkeypatch.undo()
    assert (root / "a.txt").read_text() == "content"
    assert sorted(os.listdir(root)) == ["a.txt", "sub"]


BESIDE = f".pidurable-{hashlib.sha256(b'a.txt').hexdigest()[:16]}"


async def test_what_a_killed_write_left_is_removed_by_the_next(root: Path) -> None:
    """The half file of a process that died in the middle of a write does not stay for ever."""
    died = "import os, sys; os.rename = lambda *a, **k: os._exit(7)\n" + (
        "import trio; from pidurable import LocalEnv\n"
        "trio.run(LocalEnv(sys.argv[1]).write_bytes, 'a.txt', b'half')"
    )
    done = await trio.run_process([sys.executable, "-c", died, str(root)], check=False)
    assert done.returncode == 7
    assert (root / BESIDE).read_bytes() == b"half"

    await LocalEnv(root).write_bytes("a.txt", b"whole")

    assert sorted(os.listdir(root)) == ["a.txt", "sub"]
    assert (root / "a.txt").read_bytes() == b"whole"


async def test_what_another_process_is_writing_is_left_alone(root: Path) -> None:
    """Two writers at once do not remove each other's half files; both files end whole."""
    with (root / BESIDE).open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        await LocalEnv(root).write_bytes("a.txt", b"mine")

        assert sorted(os.listdir(root)) == [BESIDE, "a.txt", "sub"]
    assert (root / "a.txt").read_bytes() == b"mine"


async def test_what_stands_at_the_name_beside_is_never_written_to(root: Path) -> None:
    """A link, also a hard one, planted where the half file goes leads nothing outside."""  # C088
    outside = root.parent / "outside" / "victim"
    outside.write_text("untouched")
    for plant in (os.symlink, os.link):
        plant(outside, root / BESIDE)
        await LocalEnv(root).write_bytes("a.txt", b"new")
        assert outside.read_text() == "untouched"
        assert (root / "a.txt").read_bytes() == b"new"
        (root / BESIDE).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name",
    ["caf\u00e9", "cafe\u0301", "-rf", "a\nb", " blank ", "x" * 255, os.fsdecode(b"\xff\xfe")],
)
async def test_odd_names_pass_byte_for_byte(root: Path, name: str) -> None:
    """What was written under a name is found under exactly that name."""  # C089
    env = LocalEnv(root)

    await env.write_bytes(name, b"1")

    assert await env.read_bytes(name, limit=9) == b"1"
    assert os.fsencode(name) in os.listdir(os.fsencode(root))
    assert name in await env.list_folder(".")


async def test_two_spellings_of_one_accent_are_two_files(root: Path) -> None:
    """Nothing is normalised on the way to the disk, and the other spelling is suggested."""  # C089
    env = LocalEnv(root)
    await env.write_bytes("caf\u00e9", b"composed")

    assert await env.find_info("cafe\u0301") is None
    assert nearest_name("cafe\u0301", list(await env.list_folder("."))) == "caf\u00e9"


def test_names_are_shown_on_one_printable_line() -> None:
    """Line ends, escapes, bytes that are not UTF-8 and surrogates are shown escaped."""
    shown = display_path("a\nb\x1b[31m\u202e" + os.fsdecode(b"\xff") + "\ud800é")

    assert shown == "a\\nb\\x1b[31m\\u202e\\xff\\ud800é"


async def test_one_file_is_locked_whatever_it_is_called(root: Path) -> None:
    """Two paths, and two environments, that lead to one file share one lock, first come first."""
    (root / "link").symlink_to("a.txt")
    order = []

    async def hold(env: LocalEnv, path: str, name: str) -> None:
        async with env.lock(path):
            order.append(f"{name} in")
            await trio.testing.wait_all_tasks_blocked()
            order.append(f"{name} out")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, LocalEnv(root), "a.txt", "first")
        nursery.start_soon(hold, LocalEnv(root / "sub" / ".."), "sub/../link", "second")
        nursery.start_soon(hold, LocalEnv(root), "other", "other")

    alone = [step for step in order if not step.startswith("other")]
    assert alone in (
        ["first in", "first out", "second in", "second out"],
        ["second in", "second out", "first in", "first out"],
    )
