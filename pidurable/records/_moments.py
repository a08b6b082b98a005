"""Durations and moments as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

__all__ = ["LAST_US", "duration", "moment"]

LAST_US = 253_402_300_799_999_999
"""The end of the year 9999, the last moment that has a name. None that is stored is later."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def duration(seconds: float) -> str:
    """Return a duration as people say it: 0.4s, 12s, 3m05s, 2h10m, 4d02h."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def moment(at_us: int | None) -> str:
    """Return a stored moment as UTC with seconds, or a dash."""
    if at_us is None:
        return "-"
    try:
        return f"{_EPOCH + timedelta(microseconds=at_us):%Y-%m-%d %H:%M:%SZ}"
    except OverflowError:
        return f"{at_us} us"
