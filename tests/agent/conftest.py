"""How densely the agent loop is killed: at each second commit, or at each with `-m slow`.

And what holds in every test of it: that what the product sets unchecked needs no check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import agent_world
import pytest

from pidurable.records._json import is_plain
from pidurable.session._document_work import DocumentWork


@pytest.fixture(autouse=True)
def _kill_step(slow_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if slow_run:
        monkeypatch.setattr(agent_world, "KILL_STEP", 1)


@pytest.fixture(autouse=True)
def _plain_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk whatever is said to be plain: where it is not, the commit fails, and the test."""
    monkeypatch.setattr(DocumentWork, "set_fields", _set_walked_fields)


_set_fields = DocumentWork.set_fields


def _set_walked_fields(
    self: DocumentWork,
    definition: Any,
    address: Any,
    fields: Mapping[str, Any],
    *,
    checked: bool = False,
) -> bool:
    assert not checked or is_plain(dict(fields), tuples=False), (address, fields)
    return _set_fields(self, definition, address, fields, checked=checked)
