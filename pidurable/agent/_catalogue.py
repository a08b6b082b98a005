"""The catalogue: what is known of a model besides its name.

Windows and prices come from `genai-prices` where it is installed (this is the only module that
names it); a host corrects or adds what it knows better with `ModelInfo`. Nothing here is needed to
talk to a model: an unknown window compacts on overflow only, an unknown price costs 0.0.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import attrs
from attrs import validators as v

from pidurable.records._messages import Usage

__all__ = ["Model", "ModelInfo", "Prices", "lookup"]


@attrs.frozen(kw_only=True)
class Prices:
    """US dollars for a million tokens. A cache price that is not given is that of plain input."""

    input: float = attrs.field(default=0.0, validator=v.ge(0))
    output: float = attrs.field(default=0.0, validator=v.ge(0))
    cache_read: float | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    cache_write: float | None = attrs.field(default=None, validator=v.optional(v.ge(0)))

    def cost(self, usage: Usage) -> float:
        """Return the cost of `usage`, whose input tokens include those of the cache."""
        cached = usage.cache_read_tokens + usage.cache_write_tokens
        plain = max(0, usage.input_tokens - cached)
        read = self.input if self.cache_read is None else self.cache_read
        write = self.input if self.cache_write is None else self.cache_write
        total = (
            plain * self.input
            + usage.cache_read_tokens * read
            + usage.cache_write_tokens * write
            + usage.output_tokens * self.output
        )
        return total / 1_000_000


@attrs.frozen(kw_only=True)
class ModelInfo:
    """What a host knows of a model; None leaves the catalogue's answer."""

    context_window: int | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    """Tokens of input and output together."""
    output_tokens_max: int | None = attrs.field(default=None, validator=v.optional(v.gt(0)))
    prices: Prices | None = None


@attrs.frozen(kw_only=True)
class Model:
    """A model that can be asked, with what is known of it."""

    name: str
    """As it is written everywhere: "provider/model"."""
    provider: str
    id: str
    """What the provider calls it."""
    context_window: int | None = None
    output_tokens_max: int | None = None
    prices: Prices | None = None
    """As a host gave them. Those of the catalogue (tiered, dated) are used, but not shown here."""
    bundled: bool = attrs.field(default=True, repr=False)
    """Whether the bundled catalogue may know its price."""

    def cost(self, usage: Usage) -> float:
        """Estimate what `usage` costs in US dollars; 0.0 where no price is known, never NaN."""
        if self.prices is not None:
            cost = self.prices.cost(usage)
        elif not self.bundled:
            cost = 0.0
        else:
            cost = _catalogue_cost(self.provider, self.id, usage)
        return cost if math.isfinite(cost) and cost > 0 else 0.0


def lookup(
    provider: str, model_id: str, override: ModelInfo | None, *, bundled: bool = True
) -> Model:
    """Return what is known of a model; every unknown fact is None.

    Args:
        provider: The name before the slash.
        model_id: The name after it.
        override: What the host knows, which counts first.
        bundled: Whether to look into the bundled catalogue at all.
    """
    info = override or ModelInfo()
    window = info.context_window
    if window is None and bundled:
        window = _catalogue_window(provider, model_id)
    return Model(
        name=f"{provider}/{model_id}",
        provider=provider,
        id=model_id,
        context_window=window,
        output_tokens_max=info.output_tokens_max,
        prices=info.prices,
        bundled=bundled,
    )


@functools.cache
def _catalogue() -> Any | None:
    # The import costs some 0.2 s, so it waits for the first model that somebody asks for.
    try:
        import genai_prices.data_snapshot
    except ImportError:
        return None
    return genai_prices.data_snapshot.get_snapshot()


@functools.lru_cache(maxsize=256)
def _find(provider: str, model_id: str) -> tuple[Any, Any] | None:
    snapshot = _catalogue()
    if snapshot is None:
        return None
    try:
        found: tuple[Any, Any] = snapshot.find_provider_model(model_id, None, provider, None)
    except LookupError:
        return None
    return found


def _catalogue_window(provider: str, model_id: str) -> int | None:
    found = _find(provider, model_id)
    window = None if found is None else found[1].context_window
    return window if isinstance(window, int) and window > 0 else None


def _catalogue_cost(provider: str, model_id: str, usage: Usage) -> float:
    if _find(provider, model_id) is None:
        return 0.0
    import genai_prices

    counted = genai_prices.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    try:
        price = genai_prices.calc_price(counted, model_id, provider_id=provider)
    except (LookupError, ValueError):
        # Counts that contradict each other (more cached than read at all) have no price.
        return 0.0
    return float(price.total_price)
