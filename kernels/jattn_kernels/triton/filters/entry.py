"""What dispatch runs: the last token that is kept of each row, and from it which are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jattn_kernels.call import FiltersCall
from jattn_kernels.operands import FiltersOperands
from jattn_kernels.triton.filters.config import config_of
from jattn_kernels.triton.filters.kernel import keep_tokens
from jattn_kernels.triton.launch import launch


def kept_tokens(call: FiltersCall, operands: FiltersOperands) -> Bool[Array, "B V"]:
    """Which tokens are kept: those that are not behind the last one."""
    config, logits = config_of(call.vocab_size), operands.logits
    last_logit, last_token = launch(
        keep_tokens,
        logits,
        operands.temperature,
        operands.top_k,
        operands.top_p,
        jnp.log(operands.min_p),
        config=config,
        grid=call.num_rows,
        out_type=[jax.ShapeDtypeStruct((call.num_rows,), dtype) for dtype in (jnp.float32, jnp.int32)],
        warps=config.warps,
    )
    token = jnp.arange(call.vocab_size, dtype=jnp.int32)[None]
    last_logit, last_token = last_logit[:, None], last_token[:, None]
    return (logits > last_logit) | ((logits == last_logit) & (token <= last_token))
