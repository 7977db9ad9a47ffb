"""Backends by their names, and their face, as models and engines import it; see `jattn.attention`."""

import importlib

from jattn.attention.backend import (
    AttendsProjected,
    AttentionBackend,
    BackendOptions,
    EngineBackend,
    ExtendsLatent,
    SavesLatents,
    SavesRotated,
    forward,
    forward_latent,
    forward_projected_latent,
    forward_rotary,
)
from jattn.attention.latent_form import HeadWidths
from jattn.attention.latent_heads import LatentHeads
from jattn.attention.layer import AttentionLayer
from jattn_kernels import RawLatents, RawQueries

__all__ = [
    "BACKENDS",
    "AttendsProjected",
    "AttentionBackend",
    "AttentionLayer",
    "BackendOptions",
    "EngineBackend",
    "ExtendsLatent",
    "HeadWidths",
    "LatentHeads",
    "RawLatents",
    "RawQueries",
    "SavesLatents",
    "SavesRotated",
    "backend_class",
    "forward",
    "forward_latent",
    "forward_projected_latent",
    "forward_rotary",
]

# An engine reaches a backend by its name alone; the first one is its own, the others are those of other engines.
BACKENDS = {
    "paged": "jattn.attention.paged:PagedAttentionBackend",
    "flash_attention": "jattn.flash_attention:FlashAttentionBackend",
    "flashinfer": "jattn.flashinfer:FlashInferAttnBackend",
}


def backend_class(backend: str) -> type[EngineBackend]:
    """The backend that goes by the name `backend`.

    Raises:
        ValueError: No backend has that name; the message lists those there are.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(sorted(BACKENDS))}. Got {backend!r}.")
    module, attribute = BACKENDS[backend].split(":")
    return getattr(importlib.import_module(module), attribute)
