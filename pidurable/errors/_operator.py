"""Errors of a store or an export that a person has to look into."""

from __future__ import annotations

import attrs

from pidurable.errors._root import PidurableError


@attrs.define(eq=False)
class StorageCorruptError(PidurableError):
    """The file is damaged. Nothing was changed; restore a copy."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} is damaged: {self.problem}. It was not changed; restore a backup."


@attrs.define(eq=False)
class StorageTooNewError(PidurableError):
    """The store was written by a newer version. Nothing was changed; upgrade this program."""

    store: str
    found: int
    known: int

    def __str__(self) -> str:
        return (
            f"{self.store} has schema {self.found}, this program knows up to {self.known}. "
            "Upgrade pidurable."
        )


@attrs.define(eq=False)
class NotAStoreError(PidurableError):
    """The path does not hold a pidurable store. Nothing was changed."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} is not a pidurable store: {self.problem}"


@attrs.define(eq=False)
class StorageAccessError(PidurableError, OSError):
    """The store cannot be opened, read or written (permissions, missing folder, disk)."""

    store: str
    problem: str

    def __str__(self) -> str:
        return f"{self.store} cannot be used: {self.problem}"


@attrs.define(eq=False)
class ExportFileError(PidurableError, ValueError):
    """An export cannot be written, or is damaged and cannot be imported. Nothing was left of it."""

    file: str
    problem: str
    line: int | None = None
    """From 1; None where it is no matter of one line."""
    path: str = ""
    """The place in the JSON of the line."""
    value: str = ""

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line is not None else ""
        path = f", {self.path}" if self.path else ""
        seen = f", got {self.value}" if self.value else ""
        return f"{self.file}{line}{path}: {self.problem}{seen}. Nothing was left behind."


@attrs.define(eq=False)
class DocumentTooNewError(PidurableError):
    """A document was written by a newer version of its class. It was not changed."""

    document: str
    found: int
    known: int

    def __str__(self) -> str:
        return (
            f"document {self.document!r} has version {self.found}, "
            f"its class here is version {self.known}. Upgrade the extension."
        )


@attrs.define(eq=False)
class MigrationError(PidurableError):
    """Stored data could not be migrated. It was not changed."""

    what: str
    problem: str

    def __str__(self) -> str:
        return f"{self.what} could not be migrated: {self.problem}"
