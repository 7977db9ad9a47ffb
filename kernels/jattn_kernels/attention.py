"""The faces of the attention kernels: check, pack, choose an implementation, run it."""

from collections.abc import Collection
from typing import Any, Unpack, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, Operation, Schedule, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.operands import AttentionKwargs, AttentionOperands, AttentionOptions, names_options
from jattn_kernels.serve import attend
from jattn_kernels.shapes.attention import (
    check_paged_decode,
    check_paged_extend,
    check_ragged_extend,
    check_schedule_sizes,
)
from jattn_kernels.shapes.options import check_features
from jattn_kernels.spec import AttentionSpec


@names_options(AttentionKwargs)
def paged_decode(
    q: Float[Array, "B Q N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    schedule: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
    **options: Unpack[AttentionKwargs],
) -> Float[Array, "B Q N Hv"] | tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Attention of the last Q tokens of each sequence over its pages.

    Args:
        k_pages, v_pages: Pages in the spec's layout, with a leading layer axis exactly if `layer_index` is given. A
            combined pool is passed whole as `k_pages`, with `v_pages` None. Rows that a sequence owns, those of its
            seq_lens keys, must be finite: one that is not may reach all queries of that sequence, also those whose mask
            hides it, as 0 * NaN is NaN. It never reaches another sequence. All other rows may hold anything.
        page_table: Entries past a sequence's last page are padding and are not read.
        seq_lens: Keys a sequence in tokens, this step's included and already written. A row of length 0 is padding.
        schedule: Work list of `make_schedule`; implementations that need none ignore it.
        layer_index: Which layer of the pages; may be traced.
        q_start: Absolute position of each sequence's first query; kv_start + seq_lens - Q if None.
        kv_start: Absolute position of the table's first key; 0 if None.
        q_positions: Absolute position of each query, in place of q_start + i.
        custom_mask: Per sequence [Q, seq_len] row-major, one after the other; replaces the causal rule.
        q_scale: Factor of fp8 queries: a scalar, one a KV head, or a row of those for each sequence, [B, K].
        k_scale, v_scale: Factors of fp8 keys and values: a scalar, one a KV head, or a row of those for each layer of
            pages that have layers, [L, K]. Logits are multiplied by q_scale * k_scale, the output by v_scale.
        alibi_slopes: Of each head: its logits get slope * (key's position - query's), minus the distance's size times
            slope if the layer is not causal.
        sinks: A logit of each head that counts in the denominator only, and not in the lse; or a row of those for each
            layer of pages that have layers, [L, N]. A part whose result will be merged must get none.
        return_lse: Also return the float32 natural log-sum-exp of the logits.
        implementation: Which one to use; None lets dispatch choose.

    Returns:
        The output in the dtype of `q`, in bfloat16 if that is fp8, and the lse if asked for; 0 and -inf for a query
        that sees no key.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: No implementation, or not the one asked for, serves this call.
    """
    given = AttentionOptions(**options)
    page_size = check_paged_decode(q, k_pages, v_pages, page_table, seq_lens, given, spec)
    operands = AttentionOperands(q=q, k=k_pages, v=v_pages, page_table=page_table, seq_lens=seq_lens, options=given)
    return attend(
        "paged_decode",
        operands,
        spec=spec,
        page_size=page_size,
        schedule=schedule,
        return_lse=return_lse,
        implementation=implementation,
    )


@names_options(AttentionKwargs)
def paged_extend(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    spec: AttentionSpec,
    schedule: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
    **options: Unpack[AttentionKwargs],
) -> Float[Array, "T N Hv"] | tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Attention of ragged queries, the last of each sequence, over its pages.

    Work is dealt out by query tokens and heads, and no sequence's keys are split: a sequence of few queries and very
    many keys beside little else is faster by `paged_decode`.

    Args:
        cu_q_lens: Sequence b owns the queries cu_q_lens[b] .. cu_q_lens[b + 1] - 1; those from cu_q_lens[-1] on are
            padding, with output 0 and lse -inf.
        custom_mask: Per sequence [q_len, seq_len] row-major, one after the other; replaces the causal rule.
        q_positions: Absolute position of each query, [T].
        Others: As in `paged_decode`, q_len in place of Q.

    Returns:
        As `paged_decode`.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    given = AttentionOptions(**options)
    page_size = check_paged_extend(q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, given, spec)
    operands = AttentionOperands(
        q=q,
        k=k_pages,
        v=v_pages,
        page_table=page_table,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        options=given,
    )
    return attend(
        "paged_extend",
        operands,
        spec=spec,
        page_size=page_size,
        schedule=schedule,
        return_lse=return_lse,
        implementation=implementation,
    )


@names_options(AttentionKwargs)
def ragged_extend(
    q: Float[Array, "T N H"],
    k: Float[Array, "*L S K H"],
    v: Float[Array, "*L S K Hv"],
    cu_q_lens: Int[Array, " B_plus_1"],
    cu_kv_lens: Int[Array, " B_plus_1"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    implementation: str | None = None,
    **options: Unpack[AttentionKwargs],
) -> Float[Array, "T N Hv"] | tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Attention of ragged queries over ragged keys and values that are not paged.

    Args:
        k, v: The rows of a sequence's keys must be finite, as in `paged_decode`.
        cu_kv_lens: Sequence b owns the keys cu_kv_lens[b] .. cu_kv_lens[b + 1] - 1; those from cu_kv_lens[-1] on are
            padding.
        layer_index: Which layer of `k` and `v`, which then have a leading layer axis; may be traced.
        Others: As in `paged_extend`.

    Returns:
        As `paged_decode`.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    given = AttentionOptions(**options)
    check_ragged_extend(q, k, v, cu_q_lens, cu_kv_lens, given, spec)
    operands = AttentionOperands(q=q, k=k, v=v, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, options=given)
    return attend(
        "ragged_extend",
        operands,
        spec=spec,
        page_size=None,
        return_lse=return_lse,
        implementation=implementation,
    )


def make_schedule(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"] | None = None,
    *,
    spec: AttentionSpec,
    num_tokens: int,
    dtype: Any,
    page_size: int,
    kv_dtype: Any = None,
    operation: Operation | None = None,
    max_seq_len: int | None = None,
    features: Collection[str] = (),
    implementation: str | None = None,
) -> Schedule | None:
    """The work list of a step, which all layers of one spec share; jit-able.

    For calls that leave `q_start` and `kv_start` to their defaults.

    Args:
        cu_q_lens: None for `paged_decode`.
        num_tokens: Query tokens a sequence in decode; in all, padded ones included, in extend.
        dtype: Of the queries.
        page_size: Tokens a page.
        kv_dtype: Of keys and values; that of the queries if None.
        operation: Of the calls; `paged_decode` or `paged_extend`, by `cu_q_lens`, if None.
        max_seq_len: Keys that no sequence exceeds; `batch_invariant` work lists need it.
        features: Names of the optional arguments that the calls will be given, as far as dispatch looks at them.
        implementation: Of the calls.

    Returns:
        What `schedule` takes; None where the implementation that serves these calls needs none, or more than is given.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
        TypeError: JAX does not know `dtype` or `kv_dtype`.
    """
    if operation is None:
        operation = "paged_decode" if cu_q_lens is None else "paged_extend"
    if operation not in get_args(Operation):
        raise ValueError(f"`operation` must be one of {', '.join(get_args(Operation))}. Got operation={operation!r}.")
    check_schedule_sizes(seq_lens, cu_q_lens, num_tokens, page_size, max_seq_len, spec)
    dtype = jnp.dtype(dtype)
    call = AttentionCall(
        operation=operation,
        spec=spec,
        q_dtype=dtype.name,
        kv_dtype=dtype.name if kv_dtype is None else jnp.dtype(kv_dtype).name,
        page_size=page_size,
        num_tokens=num_tokens,
        num_seqs=seq_lens.shape[0],
        features=check_features(features),
        modes=modes_of(seq_lens),
    )
    chosen = choose(call, implementation).implementation
    call = call.for_schedule()
    work = chosen.make_schedule(call, seq_lens, cu_q_lens, max_seq_len)
    return None if work is None else Schedule(work=work, call=call, implementation=chosen.name)
