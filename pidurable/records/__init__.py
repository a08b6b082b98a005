"""Immutable records, their JSON codec, ids, limits and codes."""
