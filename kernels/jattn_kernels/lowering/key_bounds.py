"""The keys that each query sees: every rule but a custom mask leaves it an interval of them, bounded here in XLA."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.spec import AttentionSpec


class KeyBounds(NamedTuple):
    """Which keys each query sees, keys named by their number in the request's table.

    Attributes:
        first: The first one.
        end: The one past the last; not above `first` where it sees none.
        position: The query's own number among them, which may be outside.
    """

    first: Int[Array, "*rows"]
    end: Int[Array, "*rows"]
    position: Int[Array, "*rows"]


def is_narrow(spec: AttentionSpec) -> bool:
    """Whether some rule hides keys at the beginning, so that `KeyBounds.first` is not always 0."""
    return spec.window_left is not None or spec.chunk_size is not None


def depends_on_places(spec: AttentionSpec, options: AttentionOptions) -> bool:
    """Whether a call's positions give other bounds than its lengths alone would."""
    narrow = is_narrow(spec) or spec.window_right is not None
    causal = spec.causal and options.custom_mask is None
    moved = options.q_start is not None or options.q_positions is not None
    return (moved and (narrow or causal)) or (options.kv_start is not None and spec.chunk_size is not None)


def seen_by_some(bounds: KeyBounds) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """First and end of the keys that some token of each sequence sees; equal if none does.

    Args:
        bounds: [B, tokens] each.
    """
    sees = bounds.first < bounds.end
    end = jnp.max(jnp.where(sees, bounds.end, 0), axis=1)
    return jnp.min(jnp.where(sees, bounds.first, end[:, None]), axis=1), end


def key_bounds(
    q_position: Int[Array, "*rows"],
    kv_start: Int[Array, "*_rows"],
    kv_len: Int[Array, "*_rows"],
    spec: AttentionSpec,
    *,
    masked: bool,
) -> KeyBounds:
    """The bounds of queries at absolute positions.

    Args:
        q_position: Of each query.
        kv_start: Absolute position of its request's first key.
        kv_len: Keys of its request.
        masked: Whether a custom mask replaces the causal rule.
    """
    position = q_position - kv_start
    # How far a query sees to either side. Distances, because a position plus or minus a window may overflow.
    left = [] if spec.window_left is None else [jnp.int32(spec.window_left)]
    right = [] if spec.window_right is None else [jnp.int32(spec.window_right)]
    if spec.causal and not masked:
        right.append(jnp.int32(0))
    if spec.chunk_size is not None:
        in_chunk = q_position % spec.chunk_size
        left.append(in_chunk)
        right.append(spec.chunk_size - 1 - in_chunk)
    first, end = jnp.zeros_like(position), jnp.broadcast_to(kv_len, position.shape)
    for reach in left:
        first = jnp.maximum(first, jnp.maximum(position, 0) - reach)
    within = jnp.minimum(position, kv_len - 1)
    for reach in right:
        seen = jnp.where(position < 0, position + reach, within + jnp.minimum(reach, kv_len - 1 - within))
        end = jnp.minimum(end, jnp.maximum(seen + 1, 0))
    return KeyBounds(first, end, position)
