"""Merging attention over parts of the keys, lse in base 2 as FlashInfer has it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

import jattn_kernels
from jattn.arguments import array, in_words, shown
from jattn_kernels import lse_from_base2, lse_to_base2


def merge_state(
    v_a: Float[Array, "T N H"],
    s_a: Float[Array, "T N"],
    v_b: Float[Array, "T N H"],
    s_b: Float[Array, "T N"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Output and base-2 lse over all keys from those of two disjoint parts; -inf marks an empty part.

    Raises:
        ValueError: The shapes or dtypes do not belong together.
    """
    v_a, s_a, v_b, s_b = array("v_a", v_a), array("s_a", s_a), array("v_b", v_b), array("s_b", s_b)
    if v_a.shape != v_b.shape or not s_a.shape == s_b.shape == v_a.shape[:-1]:
        raise ValueError(
            "`v_a` and `v_b` must have one shape, and `s_a` and `s_b` that without its last axis. "
            f"Got {v_a.shape}, {v_b.shape}, {s_a.shape}, {s_b.shape}."
        )
    with in_words(out_a="v_a", lse_a="s_a", out_b="v_b", lse_b="s_b"):
        out, lse = jattn_kernels.merge_state(v_a, lse_from_base2(s_a), v_b, lse_from_base2(s_b))
    return out, lse_to_base2(lse)


@in_words(v_a="v", s_a="s", v_b="v_other", s_b="s_other")
def merge_state_in_place(
    v: Float[Array, "T N H"],
    s: Float[Array, "T N"],
    v_other: Float[Array, "T N H"],
    s_other: Float[Array, "T N"],
    mask: Any = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """As `merge_state`: what FlashInfer writes over `v` and `s` is returned, for no JAX array can be written.

    Args:
        mask: Bools [T]; where one is false, `v` and `s` stay as they are.

    Raises:
        ValueError: The shapes or dtypes do not belong together.
    """
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is None:
        return out, lse
    mask = array("mask", mask, "T")
    if mask.dtype != jnp.bool_ or mask.shape != out.shape[:1]:
        raise ValueError(f"`mask` must be {out.shape[0]} bools. Got {shown('mask', mask)}.")
    return jnp.where(mask[:, None, None], out, v), jnp.where(mask[:, None], lse, array("s", s).astype(lse.dtype))


def merge_states(
    v: Float[Array, "T parts N H"], s: Float[Array, "T parts N"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """As `merge_state`, of any number of parts.

    Raises:
        ValueError: The shapes do not belong together.
    """
    v, s = array("v", v, "T", "parts", "N", "H"), array("s", s, "T", "parts", "N")
    if s.shape != v.shape[:-1] or not v.shape[1]:
        raise ValueError(
            "`s` must have the shape of `v` without its last axis, and at least one part. "
            f"Got v.shape={v.shape}, s.shape={s.shape}."
        )
    out, lse = jattn_kernels.merge_states(jnp.moveaxis(v, 1, 0), jnp.moveaxis(lse_from_base2(s), 1, 0))
    return out, lse_to_base2(lse)
