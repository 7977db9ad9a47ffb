"""Mixed steps: which requests a prefill launch decodes beside its prompts."""

from jattn.backend import EngineBackend
from jattn.serving.config import EngineConfig

# Tokens of a request. Extend does not cut a sequence's keys, as decode does: over more of them its unit would take
# longer than the decode launch that is saved, as reckoned from an H200's clocks a tile.
LONGEST_MIXED = 16_384


def mixed_rows(config: EngineConfig, backend: EngineBackend) -> int:
    """Requests that a prefill launch may decode; 0 if prefills and decodes have launches of their own.

    At most half of the launch's tokens, so that prompts go on, and one request less than there are: one has a prompt.
    """
    suits = backend.mixes()  # whatever is asked for: it refuses kernels that do not serve the layers
    mixed = suits if config.mixed_steps is None else config.mixed_steps
    if config.speculative or not mixed:
        return 0
    return min(config.max_num_seqs - 1, config.prefill_tokens // 2)
