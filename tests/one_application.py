"""One application for all the command lines that a process plays; who runs it is told apart.

To build it is most of what a short command costs. A process of its own does so anyway.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pidurable.cli import _app
from pidurable.cli._host import Host


class HostOfNow:
    """Stands for the host of whatever command runs, so that one application serves them all."""

    host: Host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.host, name, value)


HOST_OF_NOW = HostOfNow()
build_app = functools.cache(_app.build_app)


def build_the_application_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every command line of a test be played by the one application of this process."""

    def kept_app(host: Host, version: str) -> Any:
        HostOfNow.host = host
        return build_app(HOST_OF_NOW, version)  # type: ignore[arg-type]

    monkeypatch.setattr(_app, "build_app", kept_app)
