"""What every storage backend has to do, as cases to run: a guide for authors of backends.

**What to implement.** A class with the methods of `pidurable.storage.Storage`. Its docstring and
those of `Batch`, `Op` and the row classes are the contract; `MemoryStorage` is its reference, and
this suite its proof. A backend is synchronous, knows nothing of trio, keeps one session, and copies
everything on its way in and out. Errors are those of `pidurable.errors`:

* `StorageRefusedError` only where it is certain that nothing of the batch was stored; the session
  sends the same batch again. Whatever else leaves `apply` poisons the session;
* `HolderLostError` where the epoch of a batch, a heartbeat or a release is not the stored one,
  compared in the same transaction that writes;
* `StorageHeldError` where a live holder exists, `SessionClosedError` from a closed handle;
* `InternalError` for a batch that contradicts the store: an id or key twice, a state of what does
  not exist, a value of a wrong type. Nothing of such a batch may be left.

**What to give.** A factory: `open()` returns a handle on a new, empty store, `reopen(storage)`
another handle on the store of that one, which may be open or closed. Handles of one store are used
at the same time, also from several threads.

**How to run it.** From the command line, with the factory's address; `--reopen` closes the store
and opens it again after every batch, so that what a case sees is what the store holds::

    python -m pidurable.testing.storage_conformance --backend my_backend:MyFactory
    python -m pidurable.testing.storage_conformance --backend my_backend:MyFactory --reopen

Each case that fails is named with its claim and the first difference; the last line counts, and the
exit status is 1 unless all is well. Without `--backend` the backends of the package are run, plain
and reopened. Under pytest::

    @pytest.mark.parametrize("reopen", [False, True])
    @pytest.mark.parametrize("case", conformance_cases(), ids=lambda case: case.name)
    def test_my_backend(case, reopen):
        factory = MyFactory()
        case.run(ReopeningFactory(factory) if reopen else factory)

**What the cases claim.** Each has a name and a claim in a sentence. There are five groups:

* *holding*: one holder at a time, found dead or silent by its lease, fenced by its epoch;
* *writes*: a batch is stored whole, in order and exactly, or not at all; every `Op` does what its
  comment says; keys are unique where they must be;
* *reads*: every row comes back as it was written; scans give what they should, in order, with
  cursors and limits, while another thread writes;
* *commands*: what comes from outside waits in order, is taken once, and can be taken back before;
* *retention*: answers to commands, records in the order of their keys for whoever copies a session,
  and what is removed, which leaves no trace in any read.

**A small backend that conforms.** This one keeps a tally of what was stored, and leaves the rest to
another; a method that it does not have would be missing in `Storage` too.

>>> from operator import attrgetter
>>> from pidurable.storage import Batch, MemoryStorage, Storage
>>> from pidurable.testing.storage_conformance import run_conformance
>>> class Tallied:
...     def __init__(self, inner, tally):
...         self.inner, self.tally = inner, tally
...
...     @property
...     def store(self):
...         return self.inner.store
...
...     def apply(self, batch: Batch) -> None:
...         self.inner.apply(batch)  # what it refuses is not counted
...         self.tally["batches"] += 1
...
>>> for name in vars(Storage):
...     if not name.startswith("_") and name not in vars(Tallied):
...         setattr(Tallied, name, property(attrgetter(f"inner.{name}")))
>>> class TalliedFactory:
...     def __init__(self):
...         self.tally = {"batches": 0}
...
...     def open(self):
...         return Tallied(MemoryStorage(), self.tally)
...
...     def reopen(self, storage):
...         return Tallied(storage.inner.reopen(), self.tally)
>>> isinstance(TalliedFactory().open(), Storage)
True
>>> run_conformance(TalliedFactory), run_conformance(TalliedFactory, reopen=True)
([], [])

Its reads could now come from a cache, its batches go to a second place as well: the cases say
whether anybody would notice.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence

from pidurable.errors import show
from pidurable.testing._conformance_base import (
    ConformanceCase as ConformanceCase,
    StorageFactory as StorageFactory,
)
from pidurable.testing._conformance_suite import (
    BACKENDS as _BACKENDS,
    FailedCase as FailedCase,
    ReopeningFactory as ReopeningFactory,
    conformance_cases as conformance_cases,
    run_conformance as run_conformance,
)

__all__ = [
    "ConformanceCase",
    "FailedCase",
    "ReopeningFactory",
    "StorageFactory",
    "conformance_cases",
    "main",
    "run_conformance",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite as the command line asks, print what fails and the counts.

    Args:
        arguments: Those of the command line where None.

    Returns:
        The exit status: 0 where every case holds, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pidurable.testing.storage_conformance",
        description="Run the conformance suite of storage backends.",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help=f"{' or '.join(_BACKENDS)}, or MODULE:FACTORY, a class or function without arguments "
        "that gives a factory; all of the package's, plain and reopened, if it is not given",
    )
    parser.add_argument(
        "--reopen", action="store_true", help="close and open the store after every batch"
    )
    given = parser.parse_args(arguments)
    if given.backend is None:
        runs = [(name, reopen) for reopen in (False, True) for name in _BACKENDS]
    else:
        runs = [(given.backend, given.reopen)]
    began = time.monotonic()
    counts: list[str] = []
    failures = 0
    for name, reopen in runs:
        try:
            make_factory = _find(name)
        except (ImportError, AttributeError, ValueError) as error:
            parser.error(f"--backend {show(name)}: {error}")
        failed = run_conformance(make_factory, reopen=reopen)
        shown = f"{name.replace(':', '.')}{'_reopened' if reopen else ''}"
        for each in failed:
            print(f"FAILED {shown}: {each.case.name}: {each.case.claim}\n    {_said(each.error)}")
        counts.append(f"{shown}={len(conformance_cases()) - len(failed)}")
        failures += len(failed)
    print(
        f"conformance: {' '.join(counts)} failures={failures} "
        f"{time.monotonic() - began:.1f}s {'FAIL' if failures else 'PASS'}"
    )
    return 1 if failures else 0


def _find(name: str) -> Callable[[], StorageFactory]:
    """The maker of factories that the command line names."""
    if name in _BACKENDS:
        return _BACKENDS[name]
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        raise ValueError(f"expected {', '.join(_BACKENDS)} or MODULE:FACTORY")
    found: Callable[[], StorageFactory] = getattr(importlib.import_module(module), attribute)
    return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:2_000]}"


if __name__ == "__main__":
    sys.exit(main())
