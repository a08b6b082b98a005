"""What every test stands on: no settings of the machine, and no deadlines on a slow one."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cattrs.gen
import pytest
from hypothesis import is_hypothesis_test, settings

CHECKOUT = Path(__file__).parents[1]

# A shared machine is slow at random moments; what a test claims is never how long it takes.
# Other examples are drawn at each run, so fewer of them at each are soon more in all.
settings.register_profile("pidurable", deadline=None, max_examples=10)
settings.register_profile("pidurable slow", deadline=None, max_examples=20)
settings.load_profile("pidurable")

# Each test opens a registry of its own, for which cattrs writes the same functions again. Compiling
# them was a tenth of the time of the tests of agents; the same source is the same code.
cattrs.gen.compile = functools.cache(compile)  # type: ignore[attr-defined]

# A shell starts what it runs in the background with Ctrl-C ignored, and so would its children be.
# Tests press it, so it is what it is in a terminal.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Before anything of the product is imported, and for every process that a test starts.
sys.path.append(str(Path(__file__).with_name("strict")))
import strict_guard  # noqa: E402 - found there

if strict_guard.VARIABLE not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["PYTHONPATH"] = strict_guard.inherited_path()
    _guarded = tempfile.NamedTemporaryFile(prefix="strict-", suffix=".txt")  # noqa: SIM115
    os.environ[strict_guard.VARIABLE] = _guarded.name
    strict_guard.watch()

MEMORY_BYTES_MIN = 2**30

LONG_FILES = (
    # With `-m slow`.
    "test_run_killed.py",
    "test_histories.py",
    "test_programs.py",
    "test_turn_programs.py",
    "test_subagent_tree.py",
    "test_turn_kills.py",
    "test_random_compactions.py",
    "test_approval_random.py",
    "test_interrupted_work.py",
    # By default.
    "test_demo.py",
    "test_examples.py",
    "test_provider_ai.py",
    "test_provider_kinds.py",
    "test_interrupts.py",
    "test_watch.py",
    "test_approval_commands.py",
    "test_run.py",
    "test_screens.py",
    "test_style.py",
    "test_layers.py",
    "test_codes.py",
    "test_bad_stores.py",
    "test_crash_points.py",
    "test_teeth.py",
    "test_value_doors.py",
    "test_bad_answers.py",
    "test_conformance.py",
    "test_turns.py",
    "test_trees_killed.py",
    "test_subagent_tree.py",
    "test_settlement.py",
    "test_conversation_writes.py",
    "test_bad_names.py",
    "test_env_run.py",
    "test_cases_long_life.py",
    "test_tool_call.py",
    "test_cases_holding.py",
    "test_cases_documents.py",
    "test_held_stores.py",
    "test_golden_stores.py",
    "test_packaging.py",
    "test_conformance_bites.py",
    "test_compaction_ends.py",
    "test_patch.py",
    "test_history_teeth.py",
    "test_doctor.py",
    "test_sqlite_place.py",
    "test_random_runs.py",
)


# Files in one process, one after the other, that would each pay for the same in theirs.
TOGETHER = {
    # To import the clients of three providers takes seconds.
    "test_provider_kinds.py": "test_provider_ai.py",
    # They read the syntax of all that there is.
    "test_layers.py": "test_style.py",
    "test_codes.py": "test_style.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, those of `TOGETHER` as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder, slash, name = file.rpartition("/")
            return folder + slash + TOGETHER.get(name, name)

    return Scheduling(config, log)


def slow_tests_are_asked_for(config: pytest.Config) -> bool:
    """Whether this is a run of what takes long."""
    return "slow" in str(config.getoption("-m"))


def keep_files_in_memory() -> None:
    """Put the folders of the tests where a flush costs nothing, if there is such a place.

    Every commit of a store is flushed, which takes a disk milliseconds, and no test pulls the plug:
    who is killed loses nothing that the system has been given. With `-m slow`, and wherever TMPDIR
    says so, they lie on a disk.
    """
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not (memory.is_dir() and os.access(memory, os.W_OK)):
        return
    if shutil.disk_usage(memory).free >= MEMORY_BYTES_MIN:
        os.environ["TMPDIR"] = tempfile.tempdir = str(memory)


class _FromTheEnd(pytest.Dir):
    """A folder whose last test files are collected first."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return reversed(list(super().collect()))


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Let each second process collect from the end.

    Every process imports every test file, and who meets a file first writes down the rewritten
    assertions. Processes that begin at both ends share that work, which takes longer than all else
    about collecting; side by side they would each do all of it.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if int(worker.removeprefix("gw")) % 2 and not (path / "__init__.py").exists():
        return _FromTheEnd.from_parent(parent, path=path)
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_one_order_in_all_processes(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Undo the order of collecting, before the one of the tests is drawn.

    pytest takes for a hook only what is called so.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path)
    for item in items:
        # With `-m slow` they draw more examples, so they are asked for by it.
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.slow)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no process ends alone with one of them."""
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """Leave modules and thousands of collected tests to no garbage collection of a test.

    Nor is it a test's business: what depends on it collects by itself. That takes milliseconds, and
    the best part of a second once a test unfreezes what is frozen here: so none may.
    """
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


@pytest.fixture(autouse=True)
def _settings_of_the_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PIDURABLE_") and name != "PIDURABLE_SNAPSHOTS":
            monkeypatch.delenv(name)


# --- the strict provider --------------------------------------------------------------------------

_judged = {"requests": 0, "refusals": 0, "planned": 0}
"""In this process and its workers, over the whole run."""


def pytest_configure(config: pytest.Config) -> None:
    if slow_tests_are_asked_for(config):
        settings.load_profile("pidurable slow")
    else:
        keep_files_in_memory()
    config.addinivalue_line("markers", "refuses: its strict provider refuses a request, as planned")


@pytest.fixture(autouse=True)
def _no_provider_refuses_unplanned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test whose strict provider refused a request that the test did not plan."""
    path = Path(os.environ[strict_guard.VARIABLE])
    before = path.stat().st_size
    yield
    lines: list[str] = []
    if path.stat().st_size > before:
        with path.open() as file:
            file.seek(before)
            lines = file.read().splitlines()
    refused = [line for line in lines if line != "ok"]
    planned = request.node.get_closest_marker("refuses") is not None
    _judged["requests"] += len(lines)
    _judged["planned" if planned else "refusals"] += len(refused)
    problem = strict_guard.verdict(refused, planned=planned)
    if problem is not None:
        pytest.fail(problem)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["strict provider"] = _judged


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    del error
    # The hook is called twice for a worker that ends as it should.
    for name, count in getattr(node, "workeroutput", {}).pop("strict provider", {}).items():
        _judged[name] += count


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many requests were judged, over all tests and the processes that they started."""
    figures = " ".join(f"{name}={count}" for name, count in _judged.items())
    terminalreporter.write_line(f"strict provider: {figures}")


@pytest.fixture(scope="session")
def slow_run(request: pytest.FixtureRequest) -> bool:
    """Whether the slow tests were asked for: with `-m slow` they play all that they have."""
    return slow_tests_are_asked_for(request.config)


@pytest.fixture
def some(slow_run: bool, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Choose a third of many cases, and all of them with `-m slow`.

    Which third depends on the name of the test, so that the tests that share a list of cases
    play all of it between them, and one test the same at every run.
    """

    def choose(cases: Sequence[Any], of: int = 3) -> list[Any]:
        if slow_run:
            return list(cases)
        return list(cases[zlib.crc32(request.node.name.encode()) % of :: of])

    return choose


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder that holds pyproject.toml."""
    return CHECKOUT


@pytest.fixture
def check_public_snapshot() -> Callable[[str, str], None]:
    """Compare a text with `tests/public/snapshots/NAME`; PIDURABLE_SNAPSHOTS=write stores it."""

    def check(name: str, text: str) -> None:
        path = CHECKOUT / "tests" / "public" / "snapshots" / name
        if os.environ.get("PIDURABLE_SNAPSHOTS") == "write":
            path.write_text(text)
        assert path.exists(), f"write it with PIDURABLE_SNAPSHOTS=write: {path.name}"
        assert path.read_text() == text

    return check
