"""vLLM v1's attention utilities; see `jattn.surfaces.vllm.v1`."""

from jattn.surfaces.vllm.v1 import *  # noqa: F403
from jattn.surfaces.vllm.v1 import __all__ as __all__
