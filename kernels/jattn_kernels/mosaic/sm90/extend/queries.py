"""Extend's queries, in XLA: rotated by their positions, and in numbers that are multiplied with keys of 8 bits."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.lowering.fp8_parts import in_parts, in_range
from jattn_kernels.lowering.rope import rotate, shrink_of
from jattn_kernels.lowering.scales import logit_factors
from jattn_kernels.lowering.token_bounds import owners
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.spec import AttentionSpec


class Queries(NamedTuple):
    """Queries as the kernel reads them.

    Attributes:
        columns: Of each token and head, `dtypes.q_parts` numbers for each one of its row, part after part, and
            columns without meaning where `dtypes.query_columns` asks for them.
        factor: What the products of each token with a key head are multiplied with; None where keys are as wide as
            queries, and `logit_factors` says that.
    """

    columns: Float[Array, "T N columns"]
    factor: Float[Array, "K T"] | None


def prepared(
    q: Float[Array, "T N H"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    position: Int[Array, " T"] | None,
    *,
    spec: AttentionSpec,
    dtypes: ExtendDtypes,
) -> Queries:
    """Queries rotated, and as numbers that are multiplied with fp8 keys, where either is asked for.

    What is made of a token does not depend on other tokens, neither of its batch nor of its chunk of a prompt.

    Args:
        position: Where queries are rotated, their own numbers among the keys: how far they are from a key is all that
            matters.
    """
    if not dtypes.dequantises:
        return Queries(q if position is None else _rotated(q, position, spec), None)
    num_tokens = q.shape[0]
    factor = logit_factors(options, spec)
    if factor.shape[0] > 1:
        factor = factor[jnp.minimum(owners(cu_q_lens, num_tokens), factor.shape[0] - 1)]
    # A factor that is not negative may be applied after the largest product of a row is taken.
    is_negative = jnp.broadcast_to(factor * spec.scale < 0, (num_tokens, spec.num_kv_heads))
    q = jnp.where(jnp.repeat(is_negative, spec.group_size, axis=1)[..., None], -q, q)
    if dtypes.q.itemsize == 1:
        parts, size = in_parts(q[:, None], dtypes.q, spec)
        columns = jnp.concatenate(parts, axis=-1)[:, 0]
        unused = dtypes.query_columns(spec.head_dim) - columns.shape[-1]
        columns = jnp.pad(columns, ((0, 0), (0, 0), (0, unused))) if unused else columns
    else:
        whole, size = in_range(q[:, None], dtypes.q, spec)
        columns = whole[:, 0]
        if position is not None:
            columns = _rotated(columns, position, spec)
            size = size * shrink_of(dtypes.kv)
    return Queries(columns, (jnp.where(is_negative, -factor, factor) * size).T)


def _rotated(q: Float[Array, "T N H"], position: Int[Array, " T"], spec: AttentionSpec) -> Float[Array, "T N H"]:
    assert spec.rope_theta is not None
    return rotate(q[None], position[None], theta=spec.rope_theta, scale=spec.rope_scale)[0]
