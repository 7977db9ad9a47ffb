"""vLLM v0's attention; see `jattn.surfaces.vllm.v0`."""

from jattn.surfaces.vllm.v0 import *  # noqa: F403
from jattn.surfaces.vllm.v0 import __all__ as __all__
