"""Retries: delays are a pure function, and only the named errors are retried."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from hypothesis import given, strategies as st

from pidurable.errors import InvalidArgumentError
from pidurable.tasks._definition import Retry, backoff

TRIES = st.integers(min_value=1, max_value=10**6)
SEEDS = st.integers() | st.text()


def test_delays_double_up_to_the_maximum() -> None:
    """Without jitter the delays are base, base times factor, and so on, up to the maximum."""
    delays = [
        backoff(n, base=0.5, factor=2.0, maximum=5.0, jitter=0.0, seed=1) for n in range(1, 7)
    ]

    assert delays == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


@given(
    try_number=TRIES,
    base=st.floats(0, 1e6),
    factor=st.floats(1, 100),
    maximum=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
    seed=SEEDS,
)
def test_a_delay_is_repeatable_and_bounded(
    try_number: int, base: float, factor: float, maximum: float, jitter: float, seed: Any
) -> None:
    """The same arguments give the same delay, between the jittered and the full one."""
    options: dict[str, Any] = {"base": base, "factor": factor, "maximum": maximum, "seed": seed}
    full = backoff(try_number, jitter=0.0, **options)

    delay = backoff(try_number, jitter=jitter, **options)

    assert delay == backoff(try_number, jitter=jitter, **options)
    assert full <= maximum
    assert full * (1 - jitter) * (1 - 1e-12) <= delay <= full


def test_a_delay_is_the_same_in_every_version() -> None:
    """The jitter does not depend on Python's own random numbers or string hashes."""
    assert backoff(3, seed="a task") == pytest.approx(1.9888866678347774, abs=1e-12)


def test_seeds_spread_the_delays() -> None:
    """Many tasks that failed at one moment do not come back at one moment."""
    delays = {backoff(1, base=1.0, jitter=0.5, seed=seed) for seed in range(100)}

    assert len(delays) == 100
    assert min(delays) < 0.6
    assert max(delays) > 0.9


def test_a_very_late_try_waits_the_maximum() -> None:
    """A try number whose power is beyond a float is no error."""
    assert backoff(10**9, base=0.5, factor=10.0, maximum=60.0, jitter=0.0, seed=1) == 60.0
    assert backoff(10**9, base=0.0, factor=10.0, maximum=60.0, jitter=0.0, seed=1) == 0.0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("try_number", 0),
        ("try_number", True),
        ("try_number", 1.0),
        ("base", -0.1),
        ("base", float("nan")),
        ("base", "1"),
        ("factor", 0.5),
        ("factor", float("inf")),
        ("maximum", float("inf")),
        ("maximum", False),
        ("jitter", 1.1),
        ("jitter", None),
    ],
)
def test_arguments_outside_their_bounds_are_refused(argument: str, value: Any) -> None:
    """The error names the argument and shows the value."""
    arguments: dict[str, Any] = {"try_number": 1, "seed": 1, argument: value}
    try_number = arguments.pop("try_number")

    with pytest.raises(InvalidArgumentError) as caught:
        backoff(try_number, **arguments)

    assert caught.value.argument == argument
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("on", OSError, r"as on=\(OSError,\)"),
        ("on", (), "at least one"),
        ("on", [OSError], "must be a tuple"),
        ("on", (KeyboardInterrupt,), "subclasses of Exception"),
        ("on", (trio.Cancelled,), "subclasses of Exception"),
        ("on", (OSError("x"),), "subclasses of Exception"),
        ("on", (ExceptionGroup,), "not a group class"),
        ("tries", 0, "at least 1"),
        ("tries", True, "at least 1"),
        ("tries", 2.0, "at least 1"),
        ("jitter", 2, "at most 1"),
        ("base", -1, "at least 0"),
    ],
)
def test_a_retry_is_checked_when_it_is_written(field: str, value: Any, message: str) -> None:
    """A wrong Retry fails where it stands, not when the first phase raises."""
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        Retry(**{"on": (OSError,), field: value})

    assert caught.value.argument == field


def test_a_retry_has_the_delays_of_its_fields() -> None:
    """`delay` is `backoff` with the fields of the record."""
    retry = Retry(on=(OSError,), base=1.0, factor=3.0, maximum=20.0, jitter=0.5)

    for try_number, seed in itertools.product((1, 2, 5), ("a", 7)):
        expected = backoff(try_number, base=1.0, factor=3.0, maximum=20.0, jitter=0.5, seed=seed)

        assert retry.delay(try_number, seed=seed) == expected


@pytest.mark.parametrize(
    ("error", "matches"),
    [
        (OSError("x"), True),
        (ConnectionResetError("x"), True),
        (ValueError("x"), False),
        (KeyboardInterrupt(), False),
        (ExceptionGroup("g", [OSError("x"), TimeoutError("y")]), True),
        (ExceptionGroup("g", [OSError("x"), ValueError("y")]), False),
        (ExceptionGroup("g", [ExceptionGroup("h", [OSError("x")])]), True),
        (ExceptionGroup("g", [ExceptionGroup("h", [ValueError("x")]), OSError("x")]), False),
        (BaseExceptionGroup("g", [OSError("x"), KeyboardInterrupt()]), False),
    ],
)
def test_only_the_named_errors_are_retried(error: BaseException, matches: bool) -> None:
    """Of a group every leaf must match, at any depth."""
    assert Retry(on=(OSError,)).matches(error) is matches


def test_an_interrupt_in_a_group_is_never_retried() -> None:
    """A retry on Exception does not take a group for an Exception as a whole."""
    retry = Retry(on=(Exception,))

    assert retry.matches(ExceptionGroup("g", [ValueError("x")]))
    assert not retry.matches(BaseExceptionGroup("g", [ValueError("x"), SystemExit()]))
