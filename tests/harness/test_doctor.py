"""The doctor: what it finds of a store in each kind of trouble, and that it changes nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import attrs
import pytest
import trio

from pidurable import (
    Extension,
    Registry,
    Task,
    TaskContext,
    document,
    entry,
    nothing_to_undo,
    open_harness,
    phase,
)
from pidurable.errors import StorageAccessError
from pidurable.harness._doctor import Diagnosis, examine
from pidurable.records._limits import WAL_BYTES_WARN
from pidurable.records._tasks import TaskRecord
from pidurable.storage import HolderClaim, SqliteStorage
from pidurable.storage._sqlite_check import _RULES, StoreCheck


@attrs.frozen
class Only:
    """The single step."""


@document("doctor.count", scope="session")
@attrs.define
class Count:
    number: int = 0


@entry("doctor.large")
@attrs.frozen
class Large:
    text: str


class Patient(Task[str, Only, str]):
    """Completes, waits, or raises, as its input says."""

    name = "doctor.patient"
    abort = nothing_to_undo
    on_fault = "park"

    def initial(self, input: str) -> Only:
        return Only()

    @phase
    async def only(self, at: Only, ctx: TaskContext[str, Only, str]) -> None:
        if ctx.input == "complete":
            await ctx.complete("x" * 70_000)
        elif ctx.input == "wait":
            await ctx.wait(then=Only(), signals=True)
        else:
            raise ValueError(ctx.input)


async def fill(path: Path, *inputs: str) -> dict[str, int]:
    """A store that has a bit of everything; the ids of its tasks by their inputs."""
    registry = Registry()
    registry.install(Extension("doctor", tasks=[Patient()]))
    async with open_harness(path, registry=registry) as harness:
        root = await harness.root()
        async with harness.commit() as tx:
            tx.append(root.id, Large("y" * 70_000))
            (await tx.document(Count)).number = 1
        ids = {each: await root.create_task(Patient, each) for each in inputs}
        with trio.fail_after(60):
            while not all(at_rest(harness.task(id)) for id in ids.values()):  # noqa: ASYNC110
                await trio.sleep(0.002)
    return ids


def at_rest(task: TaskRecord) -> bool:
    return task.blocked is not None or task.status.word in ("waiting", "terminal")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("template") / "s"
    trio.run(fill, found, "complete", "wait")
    return found


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir(mode=0o700)
    return Path(shutil.copy(template, tmp_path / "folder" / "s"))


def contents(path: Path) -> bytes:
    return path.read_bytes()


def texts(found: Diagnosis) -> str:
    return "\n".join(f"{each.area}: {each.text} > {each.remedy}" for each in found.findings)


def change(path: Path, *statements: str) -> None:
    """Do to a store what no program of ours does."""
    connection = apsw.Connection(str(path))
    connection.execute("pragma foreign_keys = off")
    for statement in statements:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("full", [False, True])
async def test_a_healthy_store_has_no_findings_and_is_left_as_it_is(path: Path, full: bool) -> None:
    """Facts are told, work to go on with is a note, and not a byte of the store changes."""
    before = contents(path)

    found = await examine(path, full=full)

    assert texts(found) == ""
    assert found.healthy
    assert found.size is not None
    assert (found.size.tasks, found.size.entries, found.size.blobs) == (2, 1, 2)
    assert found.live_tasks == {"waiting": 1}
    assert found.holder is not None
    assert found.holder.state == "released"
    assert found.mode == "0600"
    assert any("1 task to go on with: `pidurable resume" in note for note in found.notes)
    assert contents(path) == before


async def test_it_works_beside_a_live_holder(path: Path) -> None:
    """The holder is named, its lock file is no leftover, and it is not in its way."""
    async with open_harness(path) as harness:
        found = await examine(path, full=True)
        async with harness.commit() as tx:
            tx.append((await harness.root()).id, 1, kind="doctor.after")
    assert texts(found) == ""
    assert found.holder is not None
    assert (found.holder.state, found.holder.record.pid) == ("live", os.getpid())
    assert found.notes == []


async def test_blocked_tasks_come_with_their_reason_and_the_command(path: Path) -> None:
    """Each is a finding of its own; beyond twenty they are counted."""
    ids = await fill(path, *(f"fault {n}" for n in range(22)))

    found = await examine(path)

    assert set(ids.values()) <= set(found.blocked_tasks)
    blocked = [each for each in found.findings if each.task_id is not None]
    assert len(blocked) == 20
    assert "is blocked, faulted: The code of the task raised" in blocked[0].text
    assert "ValueError: fault " in blocked[0].text
    first = blocked[0].task_id
    assert blocked[0].command == f"pidurable task retry {first} --store {path}"
    assert "2 more tasks blocked" in texts(found)


async def test_a_dead_holder_is_told_with_the_way_on(path: Path) -> None:
    """Its lock is free: what it left goes on with `resume`."""
    storage = SqliteStorage(path)
    storage.acquire(claim(), takeover=False)
    storage.close()

    found = await examine(path)

    assert "which held the session, is dead" in texts(found)
    assert found.findings[0].command == f"pidurable resume --store {path}"
    (path.parent / "s.lock.2").unlink()


def claim(**changes: Any) -> HolderClaim:
    facts = {
        "holder_id": "test",
        "host": socket.gethostname(),
        "pid": 4_000_000,
        "at_us": 1,
        "lease_seconds": 15.0,
    }
    return HolderClaim(**{**facts, **changes})


async def test_a_silent_holder_is_told_from_a_dead_one(path: Path) -> None:
    """Its lock is held and its heart does not beat: it may hang."""
    storage = SqliteStorage(path)
    storage.acquire(claim(), takeover=False)

    found = await examine(path)

    assert "holds the session and has been silent for" in texts(found)
    storage.release(2)
    storage.close()


async def test_lock_files_of_other_epochs_are_told_apart(path: Path) -> None:
    """A free one is litter, a locked one is of a process that was replaced and still lives."""
    from pidurable.storage._holder import take_lock

    (path.parent / "s.lock.7").touch(mode=0o600)
    lock = take_lock(str(path), 5)

    found = await examine(path)

    assert f"a process that was replaced still has {path}.lock.5" in texts(found)
    assert len(found.findings) == 1
    assert any(f"{path}.lock.7 was left behind" in note for note in found.notes)
    lock.remove()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who has a lock")
async def test_a_stopped_writer_is_named_with_what_to_do(path: Path) -> None:
    """Nobody can store anything behind it, so it is the first thing to know."""
    code = "import apsw, sys; c = apsw.Connection(sys.argv[1]); c.execute('begin immediate'); "
    code += "print(1, flush=True); sys.stdin.read()"
    writer = subprocess.Popen(  # noqa: ASYNC220 - read with what blocks
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    os.kill(writer.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222

    found = await examine(path)

    os.kill(writer.pid, signal.SIGCONT)
    writer.communicate()
    [finding] = found.findings
    assert f"process {writer.pid} (python" in finding.text
    assert finding.command == f"kill -CONT {writer.pid}"


async def test_a_large_log_is_told_with_who_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wal_bytes_warn: above it who reads is named, where the system tells."""
    # C073
    for beyond in (0, 1):
        with path.with_name("s-wal").open("wb") as file:
            file.truncate(WAL_BYTES_WARN + beyond)
        path.with_name("s-wal").chmod(0o600)
        monkeypatch.setattr("pidurable.storage._sqlite_locks.readers", lambda _: [1])
        monkeypatch.setattr("pidurable.storage._sqlite_locks.describe_process", lambda _: "it")
        found = await examine(path)
        assert found.readers == ["it"]
        assert ("kept from being used again by it" in texts(found)) is bool(beyond)


@pytest.mark.parametrize("name", ["s", "s.lock.9", "s.commands"])
async def test_what_others_may_open_is_found(path: Path, name: str) -> None:
    """S11: the store and all that belongs to it is its owner's alone."""
    there = path.parent / name
    if name.endswith(".commands"):
        there.mkdir()
    there.touch()
    there.chmod(0o755 if there.is_dir() else 0o644)

    found = await examine(path)

    wanted = "700" if there.is_dir() else "600"
    [finding] = found.findings
    assert finding.area == "permissions"
    assert finding.command == f"chmod {wanted} {there}"


async def test_a_folder_that_everybody_may_change_is_found(path: Path) -> None:
    """Whoever may rename files in it may exchange the store."""
    path.parent.chmod(0o777)

    assert "everybody may exchange files" in texts(await examine(path))


@pytest.mark.parametrize("place", ["store", "folder"])
async def test_a_place_that_allows_no_work_is_found_and_no_work_is_suggested(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What is suggested works there, and what would be refused is not suggested."""
    assert path.parent == path.parent.resolve()
    change(path, "update tasks set blocked = 'interrupted' where status < 4")
    closed = {"store": path, "folder": path.parent}[place]
    access = os.access

    def allowed(asked: Any, mode: int, **how: Any) -> bool:
        wanted = mode & os.W_OK and os.fspath(asked) == str(closed)
        return not wanted and access(asked, mode, **how)

    before = await examine(path)
    monkeypatch.setattr(os, "access", allowed)
    found = await examine(path)
    with pytest.raises(StorageAccessError) as refused:
        SqliteStorage(path)

    first = found.findings[0]
    assert first.area == "permissions"
    assert "this user may not write to" in first.text
    assert first.text.partition("not worked on: ")[2] in str(refused.value)
    assert first.command == f"pidurable export FILE --store {path}"
    # Everything else is found as before.
    assert [each.text for each in found.findings[1:]] == [each.text for each in before.findings]
    assert [each.command for each in before.findings] != [None]
    assert [each.command for each in found.findings[1:]] == [None]
    assert any("pidurable resume" in note for note in before.notes)
    assert not any("pidurable" in note for note in found.notes)


async def test_commands_that_nobody_takes_are_found(path: Path) -> None:
    """Without a holder any, and what is no command always; what was taken is counted."""
    folder = path.with_name("s.commands")
    folder.mkdir(mode=0o700)
    for name in ("1-a.command", "2-b.taken", "3-c.bad", "4-d.part"):
        (folder / name).touch(mode=0o600)

    found = await examine(path)

    assert found.commands == {"waiting": 1, "taken": 1, "unreadable": 1}
    assert "1 command from outside" in texts(found)
    assert "no process holds the session" in texts(found)
    assert "1 file in" in texts(found)


async def test_a_removal_that_was_not_finished_is_found(path: Path) -> None:
    """`gc` finishes what it has begun; until then this says so."""
    change(path, "insert into removals values (77, 1)")

    found = await examine(path)

    assert found.removals == 1
    assert found.findings[0].command == f"pidurable resume --store {path}"


@pytest.mark.parametrize("kind", ["text", "folder", "pipe", "other database"])
async def test_what_is_no_store_is_said_once_and_judged_no_further(path: Path, kind: str) -> None:
    """No damage, no rights of others, no hanging at a pipe: the path is wrong."""
    other = path.with_name("other")
    if kind == "folder":
        other.mkdir(mode=0o755)
    elif kind == "pipe":
        os.mkfifo(other)
    elif kind == "text":
        other.write_text("import this\n" * 100)
    else:
        change(other, "create table mine (x)")
    if kind != "pipe":
        other.chmod(0o755)

    with trio.fail_after(60):
        found = await examine(other)

    assert len(found.findings) == 1, texts(found)
    assert "is not a pidurable store" in texts(found)
    assert found.findings[0].command is None


@pytest.mark.parametrize("schema", [2, 999])
def test_the_locks_of_another_version_are_not_judged(path: Path, schema: int) -> None:
    """Whose they are is in records that are not read: nobody is told to end or remove them."""
    change(path, f"pragma user_version = {schema}")
    with open(f"{path}.lock.7", "w") as lock, open(f"{path}.lock.8", "w") as free:
        for each in (lock, free):
            os.chmod(each.name, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = trio.run(examine, path)

    assert [each.area for each in found.findings] == ["file"], texts(found)
    assert len(found.notes) == 1
    assert "another version works on the store" in found.notes[0]


# --- damage -------------------------------------------------------------------------------------

LIVE = "(select id from tasks where status < 4)"
ENDED = "(select id from tasks where status = 4)"
BROKEN = {
    "tasks of a conversation": f"update tasks set conversation = 999 where id = {ENDED}",
    "tasks whose owner": f"update tasks set owner = 999 where id = {ENDED}",
    "conversations whose owner": "update conversations set owner = 999",
    "forks of an entry": "update conversations set parent_entry = 999",
    "entries of a conversation": "update entries set conversation = 999",
    "live tasks below an ended": f"update tasks set owner = {ENDED} where id = {LIVE}",
    "live tasks without an input": f"delete from inputs where task = {LIVE}",
    "live tasks without a checkpoint": f"delete from checkpoints where task = {LIVE}",
    "waiting tasks without": "delete from waits",
    "ended tasks without": "delete from outcomes",
    "checkpoints of tasks": f"insert into checkpoints values ({ENDED}, 'p', '1', 1)",
    "inputs, outcomes, memos": "insert into memos values (999, 'm', '1')",
    "revisions of a document": "insert into revisions values (999, 1, 1, 1, '1')",
    "living documents that": "update revisions set base = 0",
    "submissions whose entry": "insert into submissions (id, conversation, kind, when_busy, digest,"
    " content, created_us, status, entry) values (2, 1, 'k', 'w', 'd', '1', 1, 'answered', 999)",
    "records with an id": "update session set next_id = 3",
    "commits with a number": "update session set seq = 1",
}


async def test_each_rule_has_a_record_that_breaks_it(path: Path) -> None:
    """The table of this test has a way to break every rule, and no other ways."""
    assert [what for what, _ in _RULES if not any(what.startswith(start) for start in BROKEN)] == []
    assert len(BROKEN) == len(_RULES)


@pytest.mark.parametrize("start", BROKEN)
async def test_records_that_disagree_are_found(path: Path, start: str) -> None:
    """Each rule finds the one thing that breaks it, only where every record is checked."""
    change(path, BROKEN[start])

    quick, full = await examine(path), await examine(path, full=True)

    assert "records do not agree" not in texts(quick)
    found = [each.text for each in full.findings if "records do not agree" in each.text]
    assert any(start in text for text in found), found


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("update inputs set value = '{'", "the input of task"),
        ("update inputs set value = '@' || value", "which is missing"),
        ("update entries set data = 'nul'", "the data of entry"),
        ("insert into memos values ((select min(id) from tasks), 'm', '[1')", "a memo of task"),
        ("update revisions set value = ''", "a revision of document"),
        ("update blobs set bytes = x'00'", "has other bytes than its name says"),
        ("insert into commands values ('c', 'k', 'd', '-', 1, 1)", "the answer to command c"),
    ],
)
async def test_values_that_cannot_be_read_are_found(path: Path, statement: str, said: str) -> None:
    """Stored JSON, references to blobs, and blobs themselves."""
    change(path, statement)

    found = await examine(path, full=True)

    assert said in texts(found)


async def test_a_reference_that_leads_nowhere_is_found(path: Path) -> None:
    """What the schema declares, SQLite checks."""
    change(path, "update conversations set parent = 999")

    assert "refers to a row of conversations that is not there" in texts(
        await examine(path, full=True)
    )


async def test_an_index_that_lacks_a_row_is_found(path: Path) -> None:
    """A query that goes by it would miss a task; every index is held against its rows."""
    connection = apsw.Connection(str(path))
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    connection.execute("pragma writable_schema = on")
    connection.execute(
        "update sqlite_schema set sql = 'create index tasks_live on tasks (id) where status < 1'"
        " where name = 'tasks_live'"
    )
    connection.close()
    change(path, "update tasks set status = 0 where status = 2")
    connection = apsw.Connection(str(path))
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    connection.execute("pragma writable_schema = on")
    connection.execute(
        "update sqlite_schema set sql = 'create index tasks_live on tasks (id) where status < 5'"
        " where name = 'tasks_live'"
    )
    connection.close()

    found = texts(await examine(path, full=True))

    assert "missing from index tasks_live" in found


@pytest.mark.parametrize("full", [False, True])
async def test_a_damaged_page_is_found_and_does_not_stop_the_rest(path: Path, full: bool) -> None:
    """What cannot be read is told, with what to do; what can be read is looked at all the same."""
    connection = apsw.Connection(str(path))
    page = connection.execute("select rootpage from sqlite_schema where name = 'memos'").get
    connection.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xa5" * 64)
    change(path, "insert into checkpoints values (999, 'p', '{', 1)")

    found = await examine(path, full=full)

    assert "the file is damaged: " in texts(found)
    assert any("restore a copy" in each.remedy for each in found.findings)
    assert ("checkpoints of tasks that are not live: 999" in texts(found)) is full
    assert ("a memo of task cannot be looked at" in texts(found)) is full
    assert ("a value cannot be read: the checkpoint of task 999" in texts(found)) is full
    assert found.session_uuid is not None


async def test_a_store_of_which_nothing_can_be_read_is_told(path: Path) -> None:
    """Nothing is raised, and what the file system tells is told."""
    size = os.stat(path).st_size
    with path.open("r+b") as file:
        for page in range(1, size // 4096):
            file.seek(page * 4096)
            file.write(b"\xa5" * 64)

    found = await examine(path, full=True)

    assert any("restore a copy" in each.remedy for each in found.findings)
    assert found.session_uuid is None
    assert found.mode == "0600"


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 300])
async def test_what_is_no_store_is_told(tmp_path: Path, content: bytes) -> None:
    """An empty file, or somebody else's: found, and left alone."""
    path = tmp_path / "s"
    path.write_bytes(content)
    path.chmod(0o600)

    found = await examine(path)

    assert not found.healthy
    assert path.read_bytes() == content


@pytest.mark.parametrize(("schema", "said"), [(1, "older schema 1"), (99, "newer schema 99")])
async def test_a_store_of_another_version_is_told(path: Path, schema: int, said: str) -> None:
    """What to do about it is the one finding; a copy that a migration has kept is a note."""
    change(path, f"pragma user_version = {schema}")
    path.with_name("s.v1.bak").touch(mode=0o600)

    found = await examine(path)

    assert [each.area for each in found.findings] == ["file"]
    assert said in texts(found)
    assert any("s.v1.bak" in note for note in found.notes)


async def test_a_missing_store_is_an_error(tmp_path: Path) -> None:
    """There is nothing to examine, and nothing is created."""
    with pytest.raises(StorageAccessError, match="no such file"):
        await examine(tmp_path / "s")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_no_moment_of_a_busy_session_looks_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """After each commit of a workload that touches every kind of record all rules hold."""
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes seconds; run it with -m slow")
    sys.path.insert(0, str(Path(__file__).parents[1] / "verify"))
    from workload import Ledger, play

    path, wrong, looks = tmp_path / "s", [], 0
    apply = SqliteStorage.apply

    def looked_at(self: SqliteStorage, batch: Any) -> None:
        nonlocal looks
        apply(self, batch)
        looks += 1
        check = StoreCheck(str(path))
        wrong.extend(check.rules())
        check.close()

    monkeypatch.setattr(SqliteStorage, "apply", looked_at)
    play(SqliteStorage(path, durability="process"), Ledger())

    assert looks >= 60
    assert wrong == []
