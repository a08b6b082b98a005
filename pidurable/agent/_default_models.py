"""The models of a host that names none: what the environment holds keys for, and scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pidurable.agent._models import ModelInfo, Models, Provider
from pidurable.agent._provider_ai import AiProvider, Kind
from pidurable.agent._scripted import ScriptedProvider

__all__ = ["default_models"]


def default_models(
    environ: Mapping[str, str] | None = None,
    *,
    scripted: ScriptedProvider | None = None,
    catalogue: Mapping[str, ModelInfo] | None = None,
    stream_silence_seconds: float | None = None,
) -> Models:
    """Return the providers `openai`, `anthropic`, `google` and `scripted`.

    Nothing is imported or opened before the first request. A provider without a key is there too,
    and its requests fail with an error that names the variable to set. With OPENAI_BASE_URL,
    `openai` is that compatible server, spoken to by chat completions, and needs no key.

    Args:
        environ: OPENAI_API_KEY, OPENAI_BASE_URL, ANTHROPIC_API_KEY, GOOGLE_API_KEY; None takes
            those of the process.
        scripted: Scripted models by name; a YAML file is always served by its path.
        catalogue: What the host knows of models, before the bundled catalogue.
        stream_silence_seconds: Longest silence within one request.
    """
    known = os.environ if environ is None else environ
    base_url = known.get("OPENAI_BASE_URL") or None
    kind: Kind = "openai-responses" if base_url is None else "openai-chat"
    providers: list[Provider] = [
        AiProvider(
            "openai", kind=kind, base_url=base_url, api_key=known.get("OPENAI_API_KEY") or None
        ),
        AiProvider("anthropic", kind="anthropic", api_key=known.get("ANTHROPIC_API_KEY") or None),
        AiProvider("google", kind="google", api_key=known.get("GOOGLE_API_KEY") or None),
        scripted or ScriptedProvider(),
    ]
    return Models(providers, catalogue=catalogue, stream_silence_seconds=stream_silence_seconds)
