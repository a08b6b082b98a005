"""Retries: how often, and after which delays, a phase that raised runs again.

Idea: a delay is a pure function of the try number and a seed. Nothing random is drawn when a delay
is computed, so a task that is recovered in the middle of its wait computes the same moment again,
and two tasks with different seeds do not strike the other side together.

* A delay never exceeds `maximum`: the jitter only shortens it.
* `Retry.matches` asks the leaves of an exception group, never the group itself, so that a
  cancellation or a KeyboardInterrupt inside a group is never retried.
"""

from __future__ import annotations

import hashlib
import math

import attrs

from pidurable.errors import InvalidArgumentError, show

__all__ = ["Retry", "backoff"]


def backoff(
    try_number: int,
    *,
    base: float = 0.5,
    factor: float = 2.0,
    maximum: float = 60.0,
    jitter: float = 0.1,
    seed: int | str,
) -> float:
    """Compute the delay, in seconds, after the try `try_number` has failed.

    The same arguments give the same delay in every process and on every machine. Make the seed
    differ between tasks (its id, or `ctx.key("retry")`), or they all come back at one moment.

    Args:
        try_number: The try that failed, counted from 1.
        base: Seconds after the first try.
        factor: What each further delay is multiplied by; at least 1.
        maximum: Most seconds, jitter included.
        jitter: The part of the delay, 0 to 1, by which it may be shortened.
        seed: What the jitter is derived from.

    Raises:
        InvalidArgumentError: An argument is outside these bounds; correct the call.
    """
    _check_try_number(try_number)
    _check_delays(base=base, factor=factor, maximum=maximum, jitter=jitter)
    try:
        delay = min(float(maximum), base * float(factor) ** (try_number - 1))
    except OverflowError:  # A very late try: the power is beyond a float, the delay is not.
        delay = float(maximum) if base > 0 else 0.0
    digest = hashlib.blake2b(f"{seed}:{try_number}".encode(errors="surrogatepass"), digest_size=8)
    # 53 bits are what a float holds exactly, so the fraction stays below 1.
    fraction = (int.from_bytes(digest.digest(), "big") >> 11) / (1 << 53)
    return delay * (1.0 - jitter * fraction)


@attrs.frozen(kw_only=True)
class Retry:
    """When a phase that raised is run again, from its checkpoint, after a durable wait.

    It holds for the phases and for the abort handler of a definition. The phase starts over from
    its committed checkpoint, so whatever it did before it raised is done again: use it where that
    is harmless.
    """

    on: tuple[type[Exception], ...] = attrs.field()
    """The errors that are retried; of an exception group, every leaf must be one of them."""

    tries: int = 5
    """Most tries in all, the first one included; at least 1."""

    base: float = 0.5
    """Seconds to wait after the first try."""

    factor: float = 2.0
    """What each further delay is multiplied by; at least 1."""

    maximum: float = 60.0
    """Most seconds to wait, jitter included."""

    jitter: float = 0.1
    """The part of a delay, 0 to 1, by which it may be shortened."""

    def __attrs_post_init__(self) -> None:
        _check_on(self.on)
        if not _is_int(self.tries) or self.tries < 1:
            raise InvalidArgumentError("tries", "must be an int of at least 1", show(self.tries))
        _check_delays(base=self.base, factor=self.factor, maximum=self.maximum, jitter=self.jitter)

    def matches(self, error: BaseException) -> bool:
        """Tell whether this error is retried: it, or each leaf of it, is one of `on`."""
        if isinstance(error, BaseExceptionGroup):
            pending: list[BaseException] = [error]
            while pending:
                leaf = pending.pop()
                if isinstance(leaf, BaseExceptionGroup):
                    pending.extend(leaf.exceptions)
                elif not isinstance(leaf, self.on):
                    return False
            return True
        return isinstance(error, self.on)

    def delay(self, try_number: int, *, seed: int | str) -> float:
        """Compute the seconds to wait after the try `try_number` (counted from 1) has failed."""
        return backoff(
            try_number,
            base=self.base,
            factor=self.factor,
            maximum=self.maximum,
            jitter=self.jitter,
            seed=seed,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_try_number(try_number: object) -> None:
    if not isinstance(try_number, int) or isinstance(try_number, bool) or try_number < 1:
        raise InvalidArgumentError("try_number", "must be an int, from 1", show(try_number))


def _check_on(on: object) -> None:
    """Refuse what a newcomer writes instead of a tuple of exception classes."""
    if isinstance(on, type):
        raise InvalidArgumentError("on", f"must be a tuple, as on=({on.__name__},)", show(on))
    if not isinstance(on, tuple) or not on:
        raise InvalidArgumentError("on", "must be a tuple with at least one error", show(on))
    for kind in on:
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise InvalidArgumentError("on", "may hold subclasses of Exception only", show(kind))
        if issubclass(kind, BaseExceptionGroup):
            raise InvalidArgumentError(
                "on", "names the errors inside of groups, not a group class", show(kind)
            )


def _check_delays(*, base: object, factor: object, maximum: object, jitter: object) -> None:
    bounds = (
        ("base", base, 0.0, math.inf),
        ("factor", factor, 1.0, math.inf),
        ("maximum", maximum, 0.0, math.inf),
        ("jitter", jitter, 0.0, 1.0),
    )
    for name, value, low, high in bounds:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgumentError(name, "must be a number", show(value))
        # The comparison also refuses NaN, which is neither above nor below anything.
        if not low <= value <= high or math.isinf(value):
            top = f" and at most {high:g}" if math.isfinite(high) else " and finite"
            raise InvalidArgumentError(name, f"must be at least {low:g}{top}", show(value))
