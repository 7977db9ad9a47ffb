"""Which products' splits are rounded as they are stored."""

from jattn_kernels.call import MatmulCall

_MOST_EXACT_ROWS = 16


def rounds_splits(call: MatmulCall) -> bool:
    """Whether a product with weights of few bits leaves its splits in bfloat16, not in float32.

    Of more rows than a few, their stores are what such a product waits for most: on an H100 26 of 84 us of a layer of
    Llama-3-8B's, 64 rows. A sum of them is off by about as much more as rounding itself costs.
    """
    return call.in_splits and call.num_rows > _MOST_EXACT_ROWS and call.dtype == call.out_dtype == "bfloat16"
