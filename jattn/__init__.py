"""jattn: paged attention for JAX on NVIDIA GPUs, and the serving loop around it."""

from importlib import import_module
from importlib.metadata import version
from typing import Any

# Each is imported when it is first asked for: JAX takes seconds. Editors read `__init__.pyi`.
_HOMES = {
    "LLM": "jattn.serving.frontend.llm",
    "SamplingParams": "jattn.serving.sampling_params",
    "StructuredOutputsParams": "jattn.serving.structured.params",
    "EngineConfig": "jattn.serving.config",
    "NgramDrafting": "jattn.serving.steps.drafting",
    "DraftModel": "jattn.serving.steps.draft_model",
    "TextPrompt": "jattn.serving.frontend.prompts",
    "TokensPrompt": "jattn.serving.frontend.prompts",
    "RequestOutput": "jattn.serving.frontend.outputs",
    "Completion": "jattn.serving.frontend.outputs",
    "Delta": "jattn.serving.frontend.outputs",
    "Logprob": "jattn.serving.steps.logprobs",
    "RunStats": "jattn.serving.frontend.llm",
}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("jattn")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
