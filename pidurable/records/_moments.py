"""Durations and moments as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["duration", "moment"]


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
        return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{at_us} us"
