"""Every limit of the product, with its name and default. Read by the code, the tests and the docs.

`Settings` holds those that a host may change; the others are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from pidurable.errors import InvalidArgumentError, show

KIB = 1024
MIB = 1024 * KIB

VALUE_DEPTH_MAX = 200
BLOB_BYTES_MIN = 64 * KIB
BATCH_BODIES_MAX = 256
BATCH_SECONDS_MAX = 0.02
DELTAS_MAX = 256
DELTA_BYTES_MIN = 4 * KIB
WATCH_FRAMES_MAX = 100
WATCH_BYTES_MAX = 16 * MIB
VIEW_PAGE_ENTRIES = 200
WAL_BYTES_WARN = 64 * MIB
PASS_RECORDS_MAX = 500
SUSPECT_SECONDS = 60.0
SUSPECT_RECOVERIES = 3
"""From this recovery on without progress a task starts alone among its like."""
PROBE_SECONDS = 1.0
STOP_REPORT_SECONDS = 10.0
MEMO_BYTES_MAX = 8 * KIB
MEMOS_MAX = 64
ERROR_MESSAGE_BYTES_MAX = 4 * KIB
TRACEBACK_BYTES_MAX = 32 * KIB
SIGNAL_BYTES_MAX = 256 * KIB
SIGNALS_UNREAD_MAX = 1_000
COMMANDS_WAITING_MAX = 10_000
COMMAND_BYTES_MAX = 16 * MIB + 64 * KIB
"""The largest content that is allowed by default, and what stands around it."""
ANSWER_SECONDS_MIN = 7 * 86_400.0
"""So long the answer to a command is kept at least."""
COMMAND_PART_SECONDS = 3_600.0
"""Older than this, a command that nobody has finished writing is cleared away."""
HANDOFFS_MAX = 5
OUTPUT_BYTES_MAX = 50 * KIB
OUTPUT_LINES_MAX = 2_000


def _whole(least: int) -> Callable[[object, attrs.Attribute[Any], object], None]:
    """Take whole numbers only: what a setting holds is compared and counted in hot paths."""

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problem = f"must be an int of at least {least}"
            raise InvalidArgumentError(field.name, problem, show(value))

    return check


def _seconds(_: object, field: attrs.Attribute[Any], value: object) -> None:
    _check_seconds(field.name, value, value != 0, "above 0")


def _seconds_or_none(_: object, field: attrs.Attribute[Any], value: object) -> None:
    _check_seconds(field.name, value, True, "of at least 0")


def _check_seconds(name: str, value: object, fits: bool, bound: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not fits or not value >= 0:  # type: ignore[operator]
        raise InvalidArgumentError(name, f"must be a number of seconds {bound}", show(value))


def _check_limits(_: object, field: attrs.Attribute[Any], value: object) -> None:
    example = 'must be a dict from kinds to ints, as in {"shop.payment": 8}'
    if not isinstance(value, dict):
        raise InvalidArgumentError(field.name, example, show(value))
    for kind, most in value.items():
        if not isinstance(kind, str):
            raise InvalidArgumentError(field.name, f"{example}; a kind is a text", show(kind))
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            problem = f"the limit of {show(kind)} must be an int of at least 0"
            raise InvalidArgumentError(field.name, problem, show(most))


def _check_names(_: object, field: attrs.Attribute[Any], value: object) -> None:
    named = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if value is not None and not named:
        raise InvalidArgumentError(field.name, "must be a list of names, or None", show(value))


def _check_on_fault(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if value not in ("fault", "park"):
        raise InvalidArgumentError(field.name, 'must be "fault" or "park"', show(value))


def _flag(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(field.name, "must be True or False", show(value))


def _one_or_all(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if value not in ("one", "all"):
        raise InvalidArgumentError(field.name, 'must be "one" or "all"', show(value))


@attrs.frozen(kw_only=True)
class Settings:
    """What a host may set when it opens a harness. Sizes are bytes, durations seconds.

    Raises:
        InvalidArgumentError: A value is of the wrong type or outside its bounds; correct it.
    """

    value_bytes_max: int = attrs.field(default=16 * MIB, validator=_whole(1))
    body_report_seconds: float = attrs.field(default=0.25, validator=_seconds)
    body_seconds_max: float = attrs.field(default=10.0, validator=_seconds)
    storage_retry_seconds: float = attrs.field(default=30.0, validator=_seconds_or_none)
    heartbeat_seconds: float = attrs.field(default=5.0, validator=_seconds)
    lease_seconds: float = attrs.field(default=15.0, validator=_seconds)
    document_report_bytes: int = attrs.field(default=256 * KIB, validator=_whole(1))
    document_bytes_max: int = attrs.field(default=4 * MIB, validator=_whole(1))
    running_max: int = attrs.field(default=1_000, validator=_whole(1))
    limits: dict[str, int] = attrs.field(factory=dict, validator=_check_limits)
    """Most running invocations by task kind; a kind with 0 stays ready and does not run."""
    recoveries_max: int = attrs.field(default=5, validator=_whole(1))
    on_fault: str = attrs.field(default="fault", validator=_check_on_fault)
    """What a fault does where the definition does not say: end the task, or block it, `faulted`."""
    owned_depth_max: int = attrs.field(default=32, validator=_whole(1))
    queued_max: int = attrs.field(default=1_000, validator=_whole(1))
    commands_seconds: float = attrs.field(default=0.05, validator=_seconds)
    """Between two looks for commands of other processes."""
    progress_seconds: float = attrs.field(default=0.1, validator=_seconds)
    extensions: list[str] | None = attrs.field(default=None, validator=_check_names)
    """Those that a conversation has which chose none itself; None for all that are installed."""
    turns_max: int = attrs.field(default=200, validator=_whole(1))
    request_tries: int = attrs.field(default=5, validator=_whole(0))
    retry_after_seconds_max: float = attrs.field(default=600.0, validator=_seconds_or_none)
    deferred_seconds_max: float = attrs.field(default=86_400.0, validator=_seconds_or_none)
    """How long a provider that defers its answer is asked for it; `math.inf` for no end."""
    stream_silence_seconds: float = attrs.field(default=120.0, validator=_seconds)
    reserve_tokens: int = attrs.field(default=16_384, validator=_whole(0))
    """Of a model's window, kept free for the answer; at most a quarter of the window counts."""
    keep_recent_tokens: int = attrs.field(default=20_000, validator=_whole(1))
    """Kept as they are by a compaction; at most half of the window counts."""
    background_tokens: int = attrs.field(default=32_768, validator=_whole(0))
    """So long before a request would have to wait, a compaction starts beside the work; at most a
    quarter of the window counts."""
    permission_seconds_max: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_seconds)
    )
    """Longest time that a permission request stays open; None for no end."""
    steers: str = attrs.field(default="all", validator=_one_or_all)
    """How many waiting steers a boundary places, "one" or "all"."""
    follow_ups: str = attrs.field(default="one", validator=_one_or_all)
    """How many waiting follow-ups the end of a run places, "one" or "all"."""
    sequential_tools: bool = attrs.field(default=False, validator=_flag)
    """Whether the calls of a round run one after the other, whatever their tools say."""
