"""What a collection did, or would do."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import final

import attrs

from pidurable.errors import InvalidArgumentError, show
from pidurable.tasks._gc_rows import Tally
from pidurable.tasks._gc_trees import REASONS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@final
@attrs.frozen(kw_only=True)
class GcReport:
    """What `gc` has removed; with `dry_run`, what it would remove if nothing changed meanwhile."""

    dry_run: bool
    before: datetime
    """Trees of which everything had ended before this moment could go."""
    trees: int
    """Roots with everything below them; with `keep_outcomes`, everything below them alone."""
    tasks: int
    conversations: int
    entries: int
    submissions: int
    documents: int
    """With retired ones that no tree went with."""
    blobs: int
    """Bytes that nothing referred to any more."""
    answers: int = 0
    """To commands of other processes, that were given long ago; see `Harness.gc`."""
    bytes: int
    """Of all values that went, as they were stored, without what the store needs around them."""
    kept: Mapping[str, int]
    """How many trees stay although their roots ended long enough ago, by reason: `live`, `recent`,
    `awaited`, `open`, `forked`, `changed`."""
    pages_freed: int | None
    """Pages that were given back to the file system; None where none were asked for."""
    pages_left: int | None
    """Free pages that stay in the file, to be used again."""

    def reasons(self) -> dict[str, int]:
        """`kept` in words, as sentences end with them."""
        return {REASONS[reason]: number for reason, number in self.kept.items()}


def make_report(
    tally: Tally,
    *,
    dry_run: bool,
    before: datetime,
    kept: Mapping[str, int],
    pages: tuple[int, int] | None = None,
) -> GcReport:
    """The report of a tally."""
    return GcReport(
        dry_run=dry_run,
        before=before,
        kept={reason: kept[reason] for reason in REASONS if kept.get(reason)},
        pages_freed=None if pages is None else pages[0],
        pages_left=None if pages is None else pages[1],
        **attrs.asdict(tally),
    )


def check_older_than(older_than: object) -> timedelta:
    """Return an age.

    Raises:
        InvalidArgumentError: It is none.
    """
    if not isinstance(older_than, timedelta) or older_than < timedelta(0):
        problem = "expected a timedelta of at least 0, as timedelta(days=30) is"
        raise InvalidArgumentError("older_than", problem, show(older_than))
    return older_than


def cutoff(now_us: int, older_than: object) -> datetime:
    """The moment before which something must have ended to be so old.

    Raises:
        InvalidArgumentError: It is no age.
    """
    now = _EPOCH + timedelta(microseconds=now_us)
    return now - min(check_older_than(older_than), now - _EPOCH)


def to_us(moment: datetime) -> int:
    """A moment as UTC microseconds."""
    return (moment - _EPOCH) // timedelta(microseconds=1)
