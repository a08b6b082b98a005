"""Every limit of the product, with its name and default. Read by the code, the tests and the docs.

`Settings` holds those that a host may change; the others are constants.
"""

from __future__ import annotations

import attrs
from attrs import validators as v

KIB = 1024
MIB = 1024 * KIB

VALUE_DEPTH_MAX = 200
BLOB_BYTES_MIN = 64 * KIB
BATCH_BODIES_MAX = 256
BATCH_SECONDS_MAX = 0.02
DELTAS_MAX = 256
DELTA_BYTES_MIN = 4 * KIB
WATCH_FRAMES_MAX = 100
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
HANDOFFS_MAX = 5
OUTPUT_BYTES_MAX = 50 * KIB
OUTPUT_LINES_MAX = 2_000


@attrs.frozen(kw_only=True)
class Settings:
    """What a host may set when it opens a harness. Sizes are bytes, durations seconds."""

    value_bytes_max: int = attrs.field(default=16 * MIB, validator=v.gt(0))
    body_report_seconds: float = attrs.field(default=0.25, validator=v.gt(0))
    body_seconds_max: float = attrs.field(default=10.0, validator=v.gt(0))
    storage_retry_seconds: float = attrs.field(default=30.0, validator=v.ge(0))
    heartbeat_seconds: float = attrs.field(default=5.0, validator=v.gt(0))
    lease_seconds: float = attrs.field(default=15.0, validator=v.gt(0))
    document_report_bytes: int = attrs.field(default=256 * KIB, validator=v.gt(0))
    document_bytes_max: int = attrs.field(default=4 * MIB, validator=v.gt(0))
    running_max: int = attrs.field(default=1_000, validator=v.gt(0))
    limits: dict[str, int] = attrs.Factory(dict)
    """Most running invocations by task kind."""
    recoveries_max: int = attrs.field(default=5, validator=v.gt(0))
    on_fault: str = attrs.field(default="fault", validator=v.in_(("fault", "park")))
    """What a fault does where the definition does not say: end the task, or block it, `faulted`."""
    owned_depth_max: int = attrs.field(default=32, validator=v.gt(0))
    queued_max: int = attrs.field(default=1_000, validator=v.gt(0))
    progress_seconds: float = attrs.field(default=0.1, validator=v.gt(0))
    turns_max: int = attrs.field(default=200, validator=v.gt(0))
    request_tries: int = attrs.field(default=5, validator=v.ge(0))
    retry_after_seconds_max: float = attrs.field(default=600.0, validator=v.ge(0))
    stream_silence_seconds: float = attrs.field(default=120.0, validator=v.gt(0))
