"""read, write and edit: what they give, and what they say when they cannot."""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import pytest
import trio
import trio.testing

from pidurable.extensions.coding import edit, extension, read, render_cwd, write
from pidurable.registry import Registry


def put(call: Any, name: str, data: bytes | str) -> None:
    """Put a file into the working directory."""
    (call.env.root / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def get(call: Any, name: str) -> bytes:
    """Take the content of a file of the working directory."""
    data: bytes = (call.env.root / name).read_bytes()
    return data


def test_the_extension_installs() -> None:
    """The bundle is valid, and its policies are those that its tools can keep."""
    registry = Registry()
    registry.install(extension)

    assert {each.name: each.replay for each in registry.snapshot.tools()} == {
        "read": "safe",
        "write": "safe",
        "edit": "interrupt",
        "bash": "interrupt",
    }
    assert [each.key for each in registry.snapshot.sections()] == ["cwd"]


def test_the_section_names_the_working_directory(call: Any) -> None:
    """The model is told where relative paths begin."""

    class Input:
        cwd: str | None = "/somewhere"
        env = call.env

    assert render_cwd(Input()) == "The working directory is /somewhere."  # type: ignore[arg-type]
    Input.cwd = None
    assert render_cwd(Input()) == f"The working directory is {call.env.root}."  # type: ignore[arg-type]


# --- read -------------------------------------------------------------------------------------


async def test_a_small_file_is_read_whole(call: Any) -> None:
    """Text comes back as it is, with or without a newline at its end."""
    put(call, "a", "one\n\ntwo\n")
    put(call, "b", "one\n\ntwo")

    assert await call.run(read, path="a") == (False, "one\n\ntwo")
    assert await call.run(read, path="b") == (False, "one\n\ntwo")


async def test_a_long_file_is_read_in_parts_that_join(call: Any) -> None:
    """Following the offsets that the answers name gives every line once."""
    lines = [f"line {number} {'x' * (number % 50)}" for number in range(5000)]
    put(call, "a", "\n".join(lines) + "\n")
    got: list[str] = []
    while True:
        error, text = await call.run(read, path="a", offset=len(got))
        assert not error
        body, _, remark = text.rpartition("\n[lines ")
        got += (body or text).split("\n")
        if not body:
            break
        assert remark.endswith(f"go on with offset={len(got)}]")

    assert got == lines


@pytest.mark.parametrize(
    ("offset", "limit", "expected"),
    [
        (0, 1, "a\n[lines 0 to 0; more may follow, go on with offset=1]"),
        (1, 2, "b\nc"),
        (2, 1, "c"),
        (0, 3, "a\nb\nc"),
        (0, 99, "a\nb\nc"),
    ],
)
@pytest.mark.parametrize("end", ["", "\n"])
async def test_a_window_of_lines(
    call: Any, offset: int, limit: int, expected: str, end: str
) -> None:
    """Lines are counted from 0, and only what does not end the file says that more follows."""
    put(call, "a", f"a\nb\nc{end}")

    assert await call.run(read, path="a", offset=offset, limit=limit) == (False, expected)


async def test_a_huge_line_is_cut_and_counted_in_bounded_memory(call: Any) -> None:
    """A file of one line of 20 MB gives its beginning and says how much is left out."""  # C087
    put(call, "a", b"x" * 20_000_000 + b"\nnext\n")
    tracemalloc.start()
    try:
        error, text = await call.run(read, path="a")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert not error
    first, second = text.split("\n")
    assert first == "x" * 8192 + " [19991808 bytes more in this line]"
    assert second == "next"
    assert peak < 8_000_000


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (b"a\n", {"offset": 5}, "f has 1 lines; offset 5 is past its end"),
        (b"a\n", {"offset": -1}, "offset must be at least 0"),
        (b"a\n", {"limit": 0}, "limit at least 1"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", {}, "f is a binary file (it holds NUL bytes), 11 bytes"),
        ("text".encode("utf-16"), {}, "f looks like UTF-16 text, 10 bytes; look at it with bash"),
    ],
)
async def test_what_cannot_be_read_is_an_answer(
    call: Any, data: bytes, arguments: dict[str, int], message: str
) -> None:
    """Binary files and wrong windows give an error result that says what to do."""  # C081
    put(call, "f", data)

    error, text = await call.run(read, path="f", **arguments)

    assert error
    assert message in text


async def test_odd_bytes_are_marked(call: Any) -> None:
    """An empty file says so; broken UTF-8, escapes and CR LF are visible; nothing acts."""
    # C081, C082
    put(call, "empty", b"")
    put(call, "odd", b"\xffa\x1b[31m\x07\ttab\n")
    put(call, "windows", b"a\r\nb\r\n")

    assert await call.run(read, path="empty") == (False, "[empty is empty]")
    assert await call.run(read, path="odd") == (False, "\ufffda\u241b[31m\u2407\ttab")
    assert await call.run(read, path="windows") == (False, "a\nb\n[lines end with CR LF]")


async def test_a_wrong_path_names_the_nearest(call: Any) -> None:
    """A missing file is answered with the name that was probably meant, or with what is there."""
    (call.env.root / "sub").mkdir()
    put(call, "sub/settings.py", "")
    put(call, "sub/caf\u00e9", "")

    assert await call.run(read, path="sub/setings.py") == (
        True,
        "sub/setings.py does not exist; did you mean sub/settings.py?",
    )
    assert (await call.run(read, path="sub/cafe\u0301"))[1].endswith("mean sub/caf\u00e9?")  # C089
    assert (await call.run(read, path="sub/zzz"))[1].endswith("holds caf\u00e9, settings.py")
    assert (await call.run(read, path="none/x"))[1].endswith("folder none does not exist either")
    assert (await call.run(read, path="sub"))[1] == "sub: the path is a folder, not a regular file"
    assert (await call.run(read, path="sub/settings.py/x"))[0]


@pytest.mark.parametrize("tool", [read, write, edit])
async def test_no_tool_leaves_the_working_directory(call: Any, tool: Any) -> None:
    """A link to the outside, dots and an absolute path are refused by each; nothing is touched."""
    # C088
    outside = call.env.root.parent / "secret"
    outside.write_text("old")
    (call.env.root / "link").symlink_to(outside)
    (call.env.root / "dangling").symlink_to(call.env.root.parent / "new")
    more = {read: {}, write: {"content": "x"}, edit: {"old": "old", "new": "x"}}[tool]

    for path in ("link", "dangling", "../secret", str(outside)):
        error, text = await call.run(tool, path=path, **more)
        assert error
        assert "out of the working directory" in text or "not below the working" in text

    assert outside.read_text() == "old"
    assert sorted(os.listdir(call.env.root.parent)) == ["secret", "work"]


# --- write ------------------------------------------------------------------------------------


async def test_writing_creates_and_replaces(call: Any) -> None:
    """The answer says which; the same again gives the same file: a re-run is harmless."""
    assert await call.run(write, path="a/b", content="é") == (False, "a/b created, 2 bytes")
    assert await call.run(write, path="a/b", content="x") == (False, "a/b replaced, 1 bytes")
    assert await call.run(write, path="a/b", content="x") == (False, "a/b replaced, 1 bytes")

    assert get(call, "a/b") == b"x"


async def test_a_lone_surrogate_is_refused(call: Any) -> None:
    """Content that no UTF-8 file can hold is named by its place, and nothing is written."""  # C082
    put(call, "a", "old")

    assert await call.run(write, path="b", content="ab\ud800") == (
        True,
        "content holds a lone surrogate at character 2",
    )
    assert (await call.run(edit, path="a", old="old", new="\ud800"))[0]
    assert (get(call, "a"), (call.env.root / "b").exists()) == (b"old", False)


# --- edit -------------------------------------------------------------------------------------


async def test_an_edit_changes_exactly_the_text(call: Any) -> None:
    """One place is replaced; bytes that are not UTF-8 and the mode stay; a diff is shown."""
    put(call, "a", b"one\n\xfftwo\nthree\n")
    (call.env.root / "a").chmod(0o750)

    error, text = await call.run(edit, path="a", old="two\n", new="2\n2\n")

    assert (error, text) == (False, "a: 1 replacement at line 1")
    assert get(call, "a") == b"one\n\xff2\n2\nthree\n"
    assert (call.env.root / "a").stat().st_mode & 0o777 == 0o750
    assert "+2" in call.shown["diff"]


async def test_an_edit_of_a_windows_file_keeps_its_line_ends(call: Any) -> None:
    """Text that a model gives with plain line ends matches CR LF and is written so."""
    put(call, "a", b"one\r\ntwo\r\nthree\r\n")

    await call.run(edit, path="a", old="one\ntwo", new="1\n2")

    assert get(call, "a") == b"1\r\n2\r\nthree\r\n"


async def test_replace_all_says_how_many(call: Any) -> None:
    """Every place is replaced when that was asked for."""
    put(call, "a", "x y x\nx\n")

    assert await call.run(edit, path="a", old="x", new="z", replace_all=True) == (
        False,
        "a: 3 replacements, the first at line 0",
    )
    assert get(call, "a") == b"z y z\nz\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"old": "x = 1", "new": "x = 2"}, "stands 2 times in a, at lines 0, 2; add lines around"),
        ({"old": "def  f():", "new": "y"}, "not in a; line 1 is similar: '    def f():'"),
        ({"old": "def g():\n  pass", "new": "y"}, "line 1 is similar"),
        ({"old": "quite another thing", "new": "y"}, "is not in a; read the file again"),
        ({"old": "gone", "new": "x = 1"}, "the new text is, at line 0: the edit may have been"),
        ({"old": "", "new": "y"}, "old is empty"),
        ({"old": "x", "new": "x"}, "old and new are the same"),
    ],
)
async def test_an_edit_that_does_not_fit_says_why(
    call: Any, arguments: dict[str, str], message: str
) -> None:
    """Not found, not unique and done before are told apart, with lines; nothing is changed."""
    before = b"x = 1\n    def f():\nx = 1\n"
    put(call, "a", before)

    error, text = await call.run(edit, path="a", **arguments)

    assert error
    assert message in text
    assert get(call, "a") == before


async def test_an_edit_of_a_binary_or_missing_file_is_refused(call: Any) -> None:
    """Neither is guessed at."""
    put(call, "bin", b"a\0b")

    assert "is a binary file" in (await call.run(edit, path="bin", old="a", new="b"))[1]
    assert "does not exist" in (await call.run(edit, path="none", old="a", new="b"))[1]


async def test_edits_of_one_file_queue(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two edits at once both take effect, because each reads after the other has written."""
    put(call, "a", "1 2 3\n")
    real = type(call.env).read_bytes

    async def slow(self: Any, path: str, **options: Any) -> bytes:
        data: bytes = await real(self, path, **options)
        await trio.testing.wait_all_tasks_blocked()
        return data

    monkeypatch.setattr(type(call.env), "read_bytes", slow)
    async with trio.open_nursery() as nursery:
        for digit in "123":
            arguments = {"path": "a", "old": digit, "new": f"({digit})"}
            nursery.start_soon(edit.invoke, arguments, call)

    assert get(call, "a") == b"(1) (2) (3)\n"
