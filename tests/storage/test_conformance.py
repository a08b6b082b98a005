"""Every backend does what the contract says, plain, reopened after every batch, and wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from pidurable.storage import MemoryStorage, SqliteStorage, Storage
from pidurable.testing import (
    ConformanceCase,
    FaultyStorage,
    ReopeningFactory,
    StorageFactory,
    conformance_cases,
)


class MemoryFactory:
    def open(self) -> MemoryStorage:
        return MemoryStorage()

    def reopen(self, storage: Storage) -> MemoryStorage:
        assert isinstance(storage, MemoryStorage)
        return storage.reopen()


class SqliteFactory:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "session.sqlite"

    def open(self) -> SqliteStorage:
        return SqliteStorage(self._path)

    def reopen(self, storage: Storage) -> SqliteStorage:
        assert isinstance(storage, SqliteStorage)
        return storage.reopen()


class FaultyFactory:
    def __init__(self, factory: StorageFactory) -> None:
        self._factory = factory

    def open(self) -> FaultyStorage:
        return FaultyStorage(self._factory.open())

    def reopen(self, storage: Storage) -> FaultyStorage:
        assert isinstance(storage, FaultyStorage)
        return FaultyStorage(self._factory.reopen(storage.inner))


PLAIN = ("memory", "sqlite")
WRAPPED = ("memory_reopened", "memory_faulty", "sqlite_reopened")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Play every case on the plain backends, and each on one wrapped one; all with `-m slow`."""
    if "case" not in metafunc.fixturenames:
        return
    whole = "slow" in str(metafunc.config.getoption("-m"))
    played = [
        pytest.param(case, backend, id=f"{backend}-{case.name}", marks=pytest.mark.slow)
        for number, case in enumerate(conformance_cases())
        for backend in (*PLAIN, *(WRAPPED if whole else WRAPPED[number % 3 :][:1]))
    ]
    metafunc.parametrize(("case", "factory"), played, indirect=["factory"])


@pytest.fixture
def factory(request: pytest.FixtureRequest, tmp_path: Path) -> StorageFactory:
    backend, _, wrapped = str(request.param).partition("_")
    plain: StorageFactory = MemoryFactory() if backend == "memory" else SqliteFactory(tmp_path)
    if wrapped == "reopened":
        return ReopeningFactory(plain)
    return FaultyFactory(plain) if wrapped == "faulty" else plain


def test_the_backend_conforms(case: ConformanceCase, factory: StorageFactory) -> None:
    """The case holds on this backend."""
    case.run(factory)


def test_the_suite_is_large_and_documented() -> None:
    """At least 40 cases, each named once and with a claim in words."""
    cases = conformance_cases()

    assert len(cases) >= 40
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.claim.endswith(".") for case in cases)
