"""An agent run, killed with SIGKILL at every pass of every crash point, ends as undisturbed.

Once with the scripted model in the process, once over HTTP against a strict server that lives on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Some sixty processes are started, each of which imports a provider's library.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HERE = Path(__file__).parent

SCRIPT = """
steps:
  - text: Let me look at it first.
    piece_chars: 6
    delay: 0.01
    calls:
      - {name: safe, arguments: {what: a}}
      - {name: once, arguments: {what: b}}
  - text: Once more.
    expect: {results: [saw a, ""]}
    calls: [{name: once, arguments: {what: c}}]
  - text: All is done.
    piece_chars: 4
    delay: 0.005
"""

Case = dict[str, Any]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of the model."""
    path = tmp_path_factory.mktemp("script") / "model.yaml"
    path.write_text(SCRIPT)
    return path


def cases_of(folder: Path, *arguments: str) -> list[Case]:
    """Run all lives, and read what they tell."""
    command = [sys.executable, str(HERE / "agent_lives.py"), str(folder), *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environ, check=False
    )
    assert made.returncode == 0, made.stderr
    cases: list[Case] = [json.loads(line) for line in made.stdout.splitlines()]
    return sorted(cases, key=lambda case: (case["nth"], case["point"]))


@pytest.fixture(scope="module")
def scripted(script: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Case], Path]:
    """The cases with the scripted model, and its log."""
    log = script.parent / "log.jsonl"
    logged = script.parent / "logged.yaml"
    logged.write_text(f"log: {log}\n{SCRIPT}")
    return cases_of(tmp_path_factory.mktemp("scripted"), f"scripted/{logged}"), log


@pytest.fixture(scope="module")
def server(script: Path) -> Iterator[tuple[str, Path]]:
    """The address of a strict server, a process of its own, and its log."""
    log = script.parent / "server.jsonl"
    command = [sys.executable, "-m", "pidurable.testing._strict_server"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "--script", str(script), "--log", str(log)],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    with process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        yield f"http://127.0.0.1:{port}/v1", log
        process.terminate()


@pytest.fixture(scope="module")
def over_http(
    server: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Case], Path]:
    """The cases over HTTP, and the server's log."""
    if importlib.util.find_spec("pydantic_ai") is None:
        pytest.skip("needs the extra `llm`: pydantic_ai is not installed")
    address, log = server
    return cases_of(tmp_path_factory.mktemp("http"), "openai/strict", address), log


def judge(cases: list[Case]) -> None:
    """Check that every resumed run ended as the undisturbed one, and repeated nothing."""
    undisturbed, *killed = cases
    assert not undisturbed["killed"]
    assert [case["killed"] for case in killed if case["point"] == "CP3"] == [True] * 3 + [False]
    assert undisturbed["text"] == "All is done."
    assert len(undisturbed["ledger"]) == 3
    for case in killed:
        where = f"{case['point']} {case['nth']}"
        assert (case["status"], case["text"]) == ("done", undisturbed["text"]), where
        once = [line for line in case["ledger"] if line.startswith("once")]
        assert len(once) == len(set(once)), where
        assert {line.split()[2] for line in case["ledger"]} >= {"a"}, where
        assert sorted(case["calls"]) == sorted(call for call, _, _ in case["results"]), where
        codes = [(name, code) for _, name, code in case["results"] if code is not None]
        if case["killed"] and case["point"] in ("CP2", "CP3"):
            # Never more than the round that was running, and only what may not be repeated.
            assert set(codes) <= {("once", "interrupted")}, where
            assert len(once) + len(codes) >= 2, where
        else:
            assert codes == [], where
            assert len(once) == 2, where


def passes(cases: list[Case]) -> dict[str, int]:
    """How often each point was died at."""
    found: dict[str, int] = {}
    for case in cases:
        if case["killed"]:
            found[case["point"]] = found.get(case["point"], 0) + 1
    return found


def test_kills_at_every_point_change_no_outcome(scripted: tuple[list[Case], Path]) -> None:
    """On SQLite with the scripted model: the same answer, no repeated effect, no odd request."""
    cases, log = scripted
    lines = [json.loads(line) for line in log.read_text().splitlines()]

    # C001, C005, C032, C033
    judge(cases)
    died = passes(cases)
    assert died["CP5"] == 1
    assert died["CP1"] == 3
    assert died["CP2"] == died["CP3"] == died["CP4"] == 3
    assert died["CP7"] == 5
    assert [line for line in lines if line["refused"] is not None] == []


def test_kills_over_http_change_no_outcome(over_http: tuple[list[Case], Path]) -> None:
    """The same over a connection: the strict server refuses nothing, and streams break off."""
    cases, log = over_http
    lines = [json.loads(line) for line in log.read_text().splitlines()]

    # C001, C005, C032, C033
    judge(cases)
    died = passes(cases)
    assert died["CP1"] == died["CP2"] == died["CP3"] == died["CP4"] == 3
    assert died["CP7"] == 5
    assert [line["problem"] for line in lines if line["problem"] is not None] == []
    assert {line["status"] for line in lines} == {200}


def test_a_kill_in_mid_stream_keeps_what_was_shown(over_http: tuple[list[Case], Path]) -> None:
    """What was committed of a broken stream stays as an aborted entry, and the answer is whole."""
    cases, _ = over_http
    kept = [
        text
        for case in cases
        if case["killed"] and case["point"] == "CP7"
        for status, text in case["answers"]
        if status == "aborted"
    ]

    assert kept
    whole = ("Let me look at it first.", "Once more.", "All is done.")
    assert all(any(each.startswith(text) for each in whole) for text in kept)
    for case in cases:
        complete = [text for status, text in case["answers"] if status == "complete"]
        assert complete == list(whole)
