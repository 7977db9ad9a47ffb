"""Flash-style attention of query tiles: online softmax in float32 over tiles of keys.

for t in range(the most tiles of keys that any query tile needs):      one while loop, data-dependent length
    k, v = fetch(tile t of each query tile's own range)                [W, S, K, H]: memory by T, not by context
    fp8 -> the queries' dtype (exact), rotated if asked for            here, so that stored keys are read once
    logits -> running maximum, sum, accumulator                        an all-hidden tile changes no bit
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import varying_axes
from jattn_kernels.lowering.rope import rotate, shrink_of
from jattn_kernels.lowering.scales import head_scales, logit_factors
from jattn_kernels.merge import sink_share
from jattn_kernels.operands import AttentionOptions
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.xla.fetch import Fetcher
from jattn_kernels.xla.scores import compute_dtype, logits_of
from jattn_kernels.xla.tiles import QueryTiles
from jattn_kernels.xla.visibility import TileKeys, key_range, visible


def attend(
    tiles: QueryTiles, keys: TileKeys, fetch: Fetcher, options: AttentionOptions, spec: AttentionSpec
) -> tuple[Float[Array, "W R N Hv"], Float[Array, "W R N"]]:
    """Output and natural-log lse of every row; 0 and -inf where a row sees no key."""
    num_tiles, rows, num_heads, head_dim = tiles.q.shape
    dtype = compute_dtype(tiles.q.dtype)
    q = tiles.q.astype(dtype)
    if spec.rope_theta is not None:
        q = rotate(q, tiles.position, theta=spec.rope_theta, scale=spec.rope_scale)
    q = q.reshape(num_tiles, rows, spec.num_kv_heads, spec.group_size, head_dim)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    factor = logit_factors(options, spec)
    factor = factor if factor.shape[0] == 1 else factor[tiles.request]
    first, end = key_range(tiles, keys, spec)
    origin = first // fetch.align * fetch.align
    trips = jnp.max(-(-(end - origin) // fetch.tile_keys), initial=0)

    def step(trip, state):
        running_max, running_sum, acc = state
        first_key = origin + trip * fetch.tile_keys
        k, v = fetch(tiles.request, first_key, end)
        shrink = 1.0 if spec.rope_theta is None else shrink_of(k.dtype)
        k, v = k.astype(dtype), v.astype(dtype)
        key = first_key[:, None] + jnp.arange(fetch.tile_keys, dtype=jnp.int32)[None]
        seen = visible(tiles, keys, key, spec)
        position = keys.kv_start[:, None] + key
        if spec.rope_theta is not None:
            k = rotate(k, position, theta=spec.rope_theta, scale=spec.rope_scale, shrink=shrink)
        products = jnp.einsum("wrkgh,wskh->wkgrs", q, k, precision=precision, preferred_element_type=jnp.float32)
        logits = logits_of(products, factor * shrink, position[:, None] - tiles.position[:, :, None], options, spec)
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)

        new_max = jnp.maximum(running_max, jnp.max(logits, axis=-1))
        shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        p = jnp.exp(logits - shift[..., None])
        keep = jnp.exp(running_max - shift)
        # A row that nobody owns may hold NaN, and 0 * NaN is NaN: masking p is not enough.
        v = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], v, jnp.zeros((), v.dtype))
        new = jnp.einsum(
            "wkgrs,wskh->wkgrh", p.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return new_max, running_sum * keep + jnp.sum(p, axis=-1), acc * keep[..., None] + new

    stats = (num_tiles, spec.num_kv_heads, spec.group_size, rows)
    none_yet = (
        jnp.full(stats, -jnp.inf, jnp.float32),
        jnp.zeros(stats, jnp.float32),
        jnp.zeros((*stats, spec.value_dim), jnp.float32),
    )
    # What a loop carries must vary over a mesh from the first as it does after a step.
    varying = varying_axes((tiles, keys, options, vars(fetch)))
    start = tuple(jax.lax.pcast(x, tuple(varying), to="varying") if varying else x for x in none_yet)
    top, total, acc = jax.lax.fori_loop(0, trips, step, start)
    # Judged by the maximum, not the sum: a NaN logit must reach the output.
    empty = top == -jnp.inf
    safe_total = jnp.where(empty, 1.0, total)
    v_scale = head_scales(options.v_scale, spec.num_kv_heads, options.layer_index)[None, :, None, None, None]
    out = jnp.where(empty[..., None], 0.0, acc / safe_total[..., None] * v_scale)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(safe_total))
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_tiles, rows, num_heads, spec.value_dim)
    lse = lse.transpose(0, 3, 1, 2).reshape(num_tiles, rows, num_heads)
    if (sinks := options.sinks_of_layer) is not None:
        out = out * sink_share(lse, sinks)[..., None]
    return out.astype(dtype), lse
