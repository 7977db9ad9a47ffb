"""What pymllm's backend makes of a batch: plans, one for each of its wrappers."""

import enum
from typing import Any

from jattn.arguments import whole
from jattn.dtype_names import named_dtype
from jattn.pytree import pytree, static
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan


class WrapperDispatch(enum.Enum):
    """Why a backend has two wrappers, and so which one a layer uses.

    SLIDING_WINDOW: the first for layers with a window, the second for the others. CROSS_ATTENTION: the first for a
    decoder's own keys, the second for the encoder's.
    """

    SLIDING_WINDOW = enum.auto()
    CROSS_ATTENTION = enum.auto()


@pytree()
class DecodeMetadata:
    """A decode batch.

    Attributes:
        decode_wrappers: The plan of each wrapper; those of the pool's next group follow.
    """

    decode_wrappers: tuple[PagedPlan, ...]


@pytree()
class PrefillMetadata:
    """A batch of many tokens a sequence.

    Attributes:
        prefill_wrappers: As a decode batch's; over the keys before this pass's own if `use_ragged`, else over all.
        use_ragged: This pass's own keys are attended to as they come, and merged with those in pages.
        extend_no_prefix: There are none in pages, so there is nothing to merge with.
        ragged: The plan of this pass's own keys; None without `use_ragged`.
    """

    prefill_wrappers: tuple[PagedPlan, ...]
    use_ragged: bool = static()
    extend_no_prefix: bool = static()
    ragged: RaggedPlan | None = None


def should_use_tensor_core(kv_cache_dtype: Any, num_attention_heads: int, num_kv_heads: int) -> bool:
    """Whether FlashInfer's decode would use tensor cores: in fp8 always, in half precision for groups of 4 or more.

    jattn's kernels choose for themselves; engines ask all the same.

    Raises:
        ValueError: `kv_cache_dtype` means no dtype that is taken, or the numbers of heads do not divide.
    """
    dtype = named_dtype("kv_cache_dtype", kv_cache_dtype)
    group_size, rest = divmod(whole("num_attention_heads", num_attention_heads), whole("num_kv_heads", num_kv_heads))
    if rest:
        raise ValueError(
            "`num_attention_heads` must be a multiple of `num_kv_heads`. "
            f"Got num_attention_heads={num_attention_heads}, num_kv_heads={num_kv_heads}."
        )
    return dtype.itemsize == 1 or (dtype.itemsize == 2 and group_size >= 4)
