"""Mixed steps: which requests a prefill launch decodes beside its prompts."""

from jattn.backend import AttentionLayer, BackendOptions
from jattn.kv_cache_dtype import stored_dtype
from jattn.serving.config import EngineConfig
from jattn.attention.specs import spec_of
from jattn_kernels.dispatch import works_per_sequence

# Tokens of a request. Extend does not cut a sequence's keys, as decode does: over more of them its unit would take
# longer than the decode launch that is saved, as reckoned from an H200's clocks a tile.
LONGEST_MIXED = 16_384


def mixed_rows(config: EngineConfig, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> int:
    """Requests that a prefill launch may decode; 0 if prefills and decodes have launches of their own.

    At most half of the launch's tokens, so that prompts go on, and one request less than there are: one has a prompt.

    Args:
        layers: One of each kind that the model has.
    """
    mixed = config.mixed_steps
    if mixed is None:
        mixed = all(_goes_by_work_list(layer, options) for layer in layers)
    if config.speculative or not mixed:
        return 0
    return min(config.max_num_seqs - 1, config.prefill_tokens // 2)


def _goes_by_work_list(layer: AttentionLayer, options: BackendOptions) -> bool:
    """Whether extend's kernel for a layer does the work that each sequence has, and no more."""
    return works_per_sequence(
        "paged_extend",
        spec=spec_of(layer),
        dtype=options.dtype,
        kv_dtype=stored_dtype(options.kv_cache_dtype, options.dtype),
        page_size=options.page_size,
        features=("layer_index",),
        implementation=options.implementation,
    )
