"""jattn: paged attention for JAX on NVIDIA GPUs, and the serving loop around it."""

from importlib import import_module

_LAZY = {
    "LLM": "jattn.serving.frontend.llm",
    "SamplingParams": "jattn.serving.request",
    "NgramDrafting": "jattn.serving.steps.drafting",
    "DraftModel": "jattn.serving.steps.draft_model",
    "RequestOutput": "jattn.serving.frontend.outputs",
    "Completion": "jattn.serving.frontend.outputs",
    "Delta": "jattn.serving.frontend.outputs",
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
