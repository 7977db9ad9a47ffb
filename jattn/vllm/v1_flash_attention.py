"""vLLM v1's flash_attn backend; see `jattn.surfaces.vllm.v1_flash_attention`."""

from jattn.surfaces.vllm.v1_flash_attention import *  # noqa: F403
from jattn.surfaces.vllm.v1_flash_attention import __all__ as __all__
