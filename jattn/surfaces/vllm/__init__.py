"""vLLM's attention surfaces: `v1`, the helpers of its builders, and `v0`, its flash_attn backend."""
