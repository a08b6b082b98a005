"""Workload W touches every kind of record, ends as was written down, and goes on after crashes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside_ledger import Ledger
from workload import Ack, play
from workload_expected import EFFECTS, EXPECTED
from workload_looks import canonical, first_difference

from pidurable.errors import PidurableError
from pidurable.session._seams import Failpoints
from pidurable.storage import Batch, MemoryStorage, Op, SqliteStorage, Storage


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What fails in W is meant to."""
    level = logging.getLogger("pidurable").level
    logging.getLogger("pidurable").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("pidurable").setLevel(level)


def check(storage: Storage, ledger: Ledger) -> None:
    assert first_difference(EXPECTED, canonical(storage)) is None
    assert ledger.effects() == EFFECTS
    assert ledger.duplicates() == []


class _Die(Failpoints):
    """The process dies at its nth commit: before it is stored, or before anybody is told."""

    def __init__(self, where: str, nth: int) -> None:
        self._where = where
        self._left = nth

    def hit(self, name: str) -> None:
        if name == self._where:
            self._left -= 1
            if self._left == 0:
                raise OSError("died")


def test_an_uninterrupted_run_ends_as_was_written_down(tmp_path: Path) -> None:
    """Store and ledger are as the expectation says; another life finds all done."""
    ledger, acks = Ledger(tmp_path / "ledger"), list[Ack]()
    play(tmp_path / "s.sqlite", ledger, acks=acks)
    again = list[Ack]()
    play(tmp_path / "s.sqlite", ledger, life=1, acks=again)

    assert again == []
    assert ledger.count("charge 250") == 1
    assert sum(ack.flush for ack in acks) > 100
    assert any(not ack.flush for ack in acks)
    assert [ack.seq for ack in acks] == sorted(ack.seq for ack in acks)
    storage = SqliteStorage(tmp_path / "s.sqlite", create=False)
    check(storage, ledger)
    storage.close()


def test_the_workload_writes_rows_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of the contract that a run can have is among those of W."""
    seen: set[Op] = set()
    apply = MemoryStorage.apply

    def looked_at(self: MemoryStorage, batch: Batch) -> None:
        seen.update(op for op, _ in batch.writes)
        apply(self, batch)

    monkeypatch.setattr(MemoryStorage, "apply", looked_at)
    play(MemoryStorage(), Ledger())

    # What only retention and commands from outside write has workloads of its own.
    elsewhere = {"COMMAND", "STUB", "REMOVAL", "REMOVAL_DELETE", "TASK_DELETE"}
    elsewhere |= {f"{name}_DELETE" for name in ("CONVERSATION", "ENTRY", "SUBMISSION", "DOCUMENT")}
    elsewhere |= {"INPUT_DELETE", "BLOB_DELETE", "COMMAND_DELETE"}
    assert {op.name for op in Op} - {op.name for op in seen} <= elsewhere


@pytest.mark.parametrize(
    ("where", "nth"),
    [("commit.before", 40), ("commit.after", 110), ("commit.after", 140), ("commit.before", 150)],
)
def test_a_life_that_was_cut_short_is_gone_on_with(where: str, nth: int) -> None:
    """Killed around a commit, the next life comes to the same end."""
    base = MemoryStorage(uuid="w", created_us=1)
    ledger = Ledger()
    with pytest.RaisesGroup(PidurableError, allow_unwrapped=True, flatten_subgroups=True):
        play(base, ledger, failpoints=_Die(where, nth))
    play(base.reopen(), ledger, life=1)

    check(base.reopen(), ledger)
