"""FlashInfer's wrappers and pymllm's backend; see `jattn.surfaces.flashinfer`."""

from jattn.surfaces.flashinfer import *  # noqa: F403
from jattn.surfaces.flashinfer import __all__ as __all__
