"""Changes of documents as clients see them: JSON Patch, plus `append` for growing a string."""

from __future__ import annotations

from pidurable.records._patch import (
    PatchOp as PatchOp,
    apply as apply,
    diff as diff,
    lower as lower,
)

__all__ = ["PatchOp", "apply", "diff", "lower"]
