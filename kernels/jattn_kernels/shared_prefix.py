"""Decode of sequences that share their first pages: those are read once for all, and the results are merged.

prefix pass: all B * Q queries as one sequence over the common pages    an extend: the pages are read once
suffix pass: each sequence's queries over its own pages                 a decode that starts at kv_start
merge of the two by their lse; sinks, which belong to the whole, come last
"""

import dataclasses
from collections.abc import Collection
from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.attention import make_schedule, paged_decode, paged_extend
from jattn_kernels.merge import merge_states, sink_share
from jattn_kernels.operands import HeadOptions, names_options
from jattn_kernels.shapes.arrays import brief, check_are_arrays, check_axes, check_int32, check_sizes, check_spec
from jattn_kernels.shapes.options import check_one_a_head
from jattn_kernels.spec import AttentionSpec


@names_options(HeadOptions)
def shared_prefix_decode(
    q: Float[Array, "B Q N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    prefix_table: Int[Array, " prefix_pages"],
    prefix_len: Int[Array, ""],
    page_table: Int[Array, "B max_pages"],
    suffix_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    schedule: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
    **options: Unpack[HeadOptions],
) -> Float[Array, "B Q N Hv"] | tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Attention of the last Q tokens of each sequence over a prefix that all share and a suffix of its own.

    Args:
        prefix_table: The pages of the prefix; entries past its last page are padding.
        prefix_len: Tokens of the prefix, not necessarily whole pages; 0 is legal.
        page_table: Each sequence's own pages; the first holds the token at position prefix_len.
        suffix_lens: Keys a sequence after the prefix, this step's included: Q at least, so that no query is within the
            prefix. A row of length 0 is padding.
        schedule: Work lists of `shared_prefix_schedule`.
        q_positions: Absolute position of each query, prefix_len at least.
        custom_mask: Per sequence [Q, suffix_len] row-major, one after the other; replaces the causal rule among the
            suffix. The prefix is seen by all queries, as far as windows and chunks allow.
        q_scale: As in `paged_decode`; a row for each sequence is not taken.
        Others: As in `paged_decode`.

    Returns:
        As `paged_decode`.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`, for either pass.
    """
    check_spec(spec)
    check_are_arrays(q=q, prefix_table=prefix_table, page_table=page_table)
    check_axes("q", q, ("B", "Q", "N", "H"))
    batch_size, num_tokens = q.shape[:2]
    check_int32("prefix_table", prefix_table, (prefix_table.size,))
    check_int32("prefix_len", prefix_len, ())
    check_int32("suffix_lens", suffix_lens, (batch_size,))
    both: dict[str, Any] = dict(options)
    sinks, q_positions, custom_mask = (both.pop(name, None) for name in ("sinks", "q_positions", "custom_mask"))
    check_one_a_head("sinks", sinks, spec)  # of this layer: they come last, and no kernel takes them
    if q_positions is not None:
        check_int32("q_positions", q_positions, (batch_size, num_tokens))
    q_scale: Any = both.get("q_scale")
    if getattr(q_scale, "ndim", None) == 2:
        raise ValueError(
            "`q_scale` must be a scalar or [K]: the queries over a shared prefix are one sequence. "
            f"Got q_scale.shape={q_scale.shape}."
        )
    prefix_schedule, suffix_schedule = _pair(schedule)
    prefix_lens = jnp.broadcast_to(prefix_len, (1,))
    kv_start = jnp.broadcast_to(prefix_len, (batch_size,))
    both |= {"return_lse": True, "implementation": implementation}
    positions = None
    if _needs_positions(spec, both.get("alibi_slopes")):
        first = kv_start + suffix_lens - num_tokens
        counted = first[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
        positions = (counted if q_positions is None else q_positions).reshape(-1)
    prefix_out, prefix_lse = paged_extend(
        q.reshape(batch_size * num_tokens, *q.shape[2:]),
        k_pages,
        v_pages,
        prefix_table[None],
        prefix_lens,
        jnp.array([0, batch_size * num_tokens], jnp.int32),
        spec=_prefix_spec(spec),
        schedule=prefix_schedule,
        q_positions=positions,
        **both,
    )
    suffix_out, suffix_lse = paged_decode(
        q,
        k_pages,
        v_pages,
        page_table,
        suffix_lens,
        spec=spec,
        schedule=suffix_schedule,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
        **both,
    )
    padded = (suffix_lens == 0)[:, None, None]
    prefix_lse = jnp.where(padded, -jnp.inf, prefix_lse.reshape(suffix_lse.shape))
    parts = (x.astype(jnp.float32) for x in (prefix_out.reshape(suffix_out.shape), suffix_out))
    out, lse = merge_states(jnp.stack(list(parts)), jnp.stack([prefix_lse, suffix_lse]))
    if sinks is not None:
        out = out * sink_share(lse, sinks)[..., None]
    out = out.astype(suffix_out.dtype)
    return (out, lse) if return_lse else out


def shared_prefix_schedule(
    prefix_len: Int[Array, ""],
    suffix_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    num_tokens: int,
    dtype: Any,
    page_size: int,
    kv_dtype: Any = None,
    features: Collection[str] = (),
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """The work lists of a step's two passes, which all layers of one spec share; jit-able.

    Args:
        num_tokens: Query tokens a sequence.
        Others: As in `make_schedule`.

    Returns:
        What `schedule` of `shared_prefix_decode` takes.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    check_spec(spec)
    check_int32("prefix_len", prefix_len, ())
    check_are_arrays(suffix_lens=suffix_lens)
    check_axes("suffix_lens", suffix_lens, ("B",))
    check_sizes(num_tokens=num_tokens)
    facts = {"dtype": dtype, "page_size": page_size, "kv_dtype": kv_dtype, "implementation": implementation}
    # What only the pass over the suffixes is given.
    of_prefix = frozenset(features) - {"custom_mask", "sinks"}
    of_suffix = frozenset(features) - {"sinks"}
    num_queries = suffix_lens.shape[0] * num_tokens
    prefix = make_schedule(
        jnp.broadcast_to(prefix_len, (1,)),
        jnp.array([0, num_queries], jnp.int32),
        spec=_prefix_spec(spec),
        num_tokens=num_queries,
        features=of_prefix,
        **facts,
    )
    return prefix, make_schedule(suffix_lens, spec=spec, num_tokens=num_tokens, features=of_suffix, **facts)


def _pair(schedule: Any) -> tuple[Any, Any]:
    if schedule is None:
        return None, None
    if not isinstance(schedule, tuple) or len(schedule) != 2:
        raise ValueError(f"`schedule` must be None or what `shared_prefix_schedule` makes. Got {brief(schedule)}.")
    return schedule


def _prefix_spec(spec: AttentionSpec) -> AttentionSpec:
    """The rules of the prefix pass: no key of the prefix is after a query, so that no rule about later keys is left."""
    return dataclasses.replace(spec, causal=False, window_right=None)


def _needs_positions(spec: AttentionSpec, alibi_slopes: Float[Array, " N"] | None) -> bool:
    """Whether it matters how far a query is from the prefix."""
    return alibi_slopes is not None or any(
        value is not None for value in (spec.window_left, spec.chunk_size, spec.rope_theta)
    )
