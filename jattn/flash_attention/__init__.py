"""SGLang's FlashAttention backend; see `jattn.surfaces.sglang`."""

from jattn.surfaces.sglang import *  # noqa: F403
from jattn.surfaces.sglang import __all__ as __all__
