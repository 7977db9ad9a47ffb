"""Host side of the latent kernel: its operands, and results put back in their places."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall
from jattn_kernels.lowering.key_bounds import KeyBounds, is_narrow
from jattn_kernels.lowering.scales import head_scales, logit_factors
from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.merge import sink_share
from jattn_kernels.mosaic.sm90.common.merge_splits import merge_splits
from jattn_kernels.mosaic.sm90.common.operands import stacked
from jattn_kernels.mosaic.sm90.mla.config import BLOCK_ROWS, LatentConfig, Operands
from jattn_kernels.mosaic.sm90.mla.kernel import attend
from jattn_kernels.operands import AttentionOperands


def attend_rows(
    call: AttentionCall,
    operands: AttentionOperands,
    bounds: KeyBounds,
    schedule: DecodeSchedule,
    *,
    sequence: Int[Array, " B"] | None = None,
    mask: Int[Array, "B keys"] | None = None,
) -> tuple[Float[Array, "B Q N C"], Float[Array, "B Q N"]]:
    """Output and lse of as many tokens of each sequence, or of each group of them.

    Args:
        operands: Queries by sequences or groups, and pages of one head.
        bounds: Of the keys that each token sees.
        sequence: Of each group: a row of the page table, and of scales; None where groups are sequences.
        mask: Words of a custom mask.
    """
    spec, options, q = call.spec, operands.options, operands.q
    assert call.page_size is not None
    batch_size, num_tokens, heads = q.shape[:3]
    config = LatentConfig(spec, call.page_size, num_tokens, q.dtype, operands.k.dtype)

    def padded(x):
        """Rows token by token, in whole blocks."""
        x = x.reshape(batch_size, num_tokens * heads, *x.shape[3:])
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK_ROWS), *[(0, 0)] * (x.ndim - 2)])

    def of_rows(of_tokens):
        return padded(jnp.broadcast_to(of_tokens[..., None], (batch_size, num_tokens, heads)))

    narrow = is_narrow(spec)
    factor = None
    if options.q_scale is not None or options.k_scale is not None:
        factor = logit_factors(options, spec)
        if sequence is not None and factor.shape[0] > 1:
            factor = factor[sequence]
    layer, pages, _ = stacked(operands.k, None, options.layer_index)
    kernel_operands = Operands(
        q_nope=padded(q),
        q_pe=padded(operands.q_pe),
        pages=pages,
        page_table=operands.page_table,
        layer=layer,
        work_tiles=schedule.work_tiles,
        workers=schedule.workers,
        whole_end=jnp.zeros(batch_size, jnp.int32) if mask is not None or narrow else bounds.end.min(axis=1),
        first=of_rows(bounds.first) if narrow else None,
        end=of_rows(bounds.end) if num_tokens > 1 else None,
        logit_factor=factor,
        out_factor=None if options.v_scale is None else head_scales(options.v_scale, 1, options.layer_index),
        mask=mask,
        sequence=sequence,
        places=schedule.places,
    )
    results = attend(config, kernel_operands, schedule)
    out, lse = results.out, results.lse
    if schedule.split.shape[0] > 0:
        out, lse = merge_splits(results, schedule, batch_invariant=spec.batch_invariant)
    rows = num_tokens * heads
    out, lse = out[:, 0, :rows].reshape(q.shape), lse[:, 0, :rows].reshape(q.shape[:-1])
    if (sinks := options.sinks_of_layer) is not None:
        out = (out.astype(jnp.float32) * sink_share(lse, sinks)[..., None]).astype(out.dtype)
    return out, lse
