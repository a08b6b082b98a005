"""The guard against what hangs in real time: it ends it, wherever it hangs, and says where."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import trio
from hang_guard import HungError, limited
from trio.testing import MockClock


def test_what_spins_is_ended_though_it_swallows_an_error() -> None:
    """It is interrupted again, and the error names the function that it was in."""

    def spin() -> None:
        with contextlib.suppress(BaseException):
            while True:
                pass
        while True:
            pass

    with pytest.raises(HungError, match="in spin"), limited(0.02, again=0.02, what="a spin"):
        spin()


def test_a_task_that_never_yields_is_ended_though_the_clock_is_virtual() -> None:
    """A call that blocks within a run of trio is interrupted, and the run is over."""

    async def block() -> None:
        time.sleep(60)  # noqa: ASYNC251 - what must not be done is what is tried

    with pytest.raises(HungError, match="in block"), limited(0.02, what="a run"):
        trio.run(block, clock=MockClock(autojump_threshold=0))


def test_an_alarm_that_was_set_before_goes_on() -> None:
    """Of a guard within a guard both count, and afterwards no alarm of theirs is left."""
    before = signal.getsignal(signal.SIGALRM)

    def block() -> None:
        with limited(60, what="inner"):
            pass
        time.sleep(60)

    with pytest.raises(HungError, match="outer hangs"), limited(0.05, what="outer"):
        block()
    assert signal.getsignal(signal.SIGALRM) is before
