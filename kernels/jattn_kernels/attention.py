"""The faces of the attention kernels: check, choose an implementation, run it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn_kernels import shapes
from jattn_kernels.call import AttentionCall, AttentionOptions, Operation, default_device
from jattn_kernels.dispatch import choose
from jattn_kernels.spec import AttentionSpec


def paged_decode(
    q: Float[Array, "B Q N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    *,
    spec: AttentionSpec,
    schedule: Any = None,
    layer_index: Int[Array, ""] | int | None = None,
    q_start: Int[Array, " B"] | None = None,
    kv_start: Int[Array, " B"] | None = None,
    q_positions: Int[Array, "B Q"] | None = None,
    custom_mask: Bool[Array, " M"] | None = None,
    q_scale: Float[Array, "..."] | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
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
        sinks: A logit of each head that counts in the denominator only, and not in the lse. A part whose result will
            be merged must get none.
        return_lse: Also return the float32 natural log-sum-exp of the logits.
        implementation: Which one to use; None lets dispatch choose.

    Returns:
        The output in the dtype of `q`, in bfloat16 if that is fp8, and the lse if asked for; 0 and -inf for a query
        that sees no key.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: No implementation, or not the one asked for, serves this call.
    """
    options = AttentionOptions(
        layer_index=layer_index,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        schedule=schedule,
    )
    page_size = shapes.check_paged_decode(q, k_pages, v_pages, page_table, seq_lens, options, spec)
    run = chosen("paged_decode", q, k_pages, page_size, options, spec, implementation)
    _check_schedule(schedule, "paged_decode", q, k_pages, q.shape[0], q.shape[1], spec, page_size, implementation)
    options = _with_own_rows(options)
    out, lse = run(q, k_pages, v_pages, page_table, seq_lens, options, spec=spec, page_size=page_size)
    return (out, lse) if return_lse else out


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
    layer_index: Int[Array, ""] | int | None = None,
    q_start: Int[Array, " B"] | None = None,
    kv_start: Int[Array, " B"] | None = None,
    q_positions: Int[Array, " T"] | None = None,
    custom_mask: Bool[Array, " M"] | None = None,
    q_scale: Float[Array, "..."] | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T N Hv"] | tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Attention of ragged queries, the last of each sequence, over its pages.

    Work is dealt out by query tokens and heads, and no sequence's keys are split: a sequence of few queries and very
    many keys beside little else is faster by `paged_decode`.

    Args:
        cu_q_lens: Sequence b owns the queries cu_q_lens[b] .. cu_q_lens[b + 1] - 1; those from cu_q_lens[-1] on are
            padding, with output 0 and lse -inf.
        custom_mask: Per sequence [q_len, seq_len] row-major, one after the other; replaces the causal rule.
        Others: As in `paged_decode`, q_len in place of Q.

    Returns:
        As `paged_decode`.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    options = AttentionOptions(
        layer_index=layer_index,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        schedule=schedule,
    )
    page_size = shapes.check_paged_extend(q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, options, spec)
    run = chosen("paged_extend", q, k_pages, page_size, options, spec, implementation)
    _check_schedule(
        schedule, "paged_extend", q, k_pages, seq_lens.shape[0], q.shape[0], spec, page_size, implementation
    )
    options = _with_own_rows(options)
    out, lse = run(q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, options, spec=spec, page_size=page_size)
    return (out, lse) if return_lse else out


def ragged_extend(
    q: Float[Array, "T N H"],
    k: Float[Array, "*L S K H"],
    v: Float[Array, "*L S K Hv"],
    cu_q_lens: Int[Array, " B_plus_1"],
    cu_kv_lens: Int[Array, " B_plus_1"],
    *,
    spec: AttentionSpec,
    schedule: Any = None,
    layer_index: Int[Array, ""] | int | None = None,
    q_start: Int[Array, " B"] | None = None,
    kv_start: Int[Array, " B"] | None = None,
    q_positions: Int[Array, " T"] | None = None,
    custom_mask: Bool[Array, " M"] | None = None,
    q_scale: Float[Array, "..."] | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
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
    options = AttentionOptions(
        layer_index=layer_index,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        schedule=schedule,
    )
    shapes.check_ragged_extend(q, k, v, cu_q_lens, cu_kv_lens, options, spec)
    run = chosen("ragged_extend", q, k, None, options, spec, implementation)
    options = _with_own_rows(options)
    out, lse = run(q, k, v, cu_q_lens, cu_kv_lens, options, spec=spec)
    return (out, lse) if return_lse else out


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
    implementation: str | None = None,
) -> Any:
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
    shapes.check_schedule_sizes(seq_lens, cu_q_lens, num_tokens, page_size, max_seq_len, spec)
    dtype = jnp.dtype(dtype)
    call = AttentionCall(
        operation=operation,
        spec=spec,
        q_dtype=dtype.name,
        kv_dtype=dtype.name if kv_dtype is None else jnp.dtype(kv_dtype).name,
        page_size=page_size,
        num_tokens=num_tokens if operation.endswith("decode") else None,
        device=default_device(),
    )
    plan = choose(call, implementation).implementation.schedules.get(operation)
    if plan is None:
        return None
    kv_itemsize = jnp.dtype(call.kv_dtype).itemsize
    return plan(seq_lens, cu_q_lens, spec=spec, num_tokens=num_tokens, kv_itemsize=kv_itemsize, max_seq_len=max_seq_len)


def _check_schedule(
    schedule: Any,
    operation: Operation,
    q: jax.Array,
    k_pages: jax.Array,
    num_seqs: int,
    num_tokens: int,
    spec: AttentionSpec,
    page_size: int,
    implementation: str | None,
) -> None:
    """Refuses a work list of another call: its kernel would read what is not there.

    Raises:
        ValueError: It has not the form of what `make_schedule` makes for such calls.
    """
    if schedule is None:
        return
    make = functools.partial(
        make_schedule,
        spec=spec,
        num_tokens=num_tokens,
        dtype=q.dtype,
        page_size=page_size,
        kv_dtype=k_pages.dtype,
        max_seq_len=page_size,
        implementation=implementation,
    )
    lens, offsets = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_seqs, num_seqs + 1))
    made = jax.eval_shape(make, lens, offsets if operation == "paged_extend" else None)
    if made is not None and _form(schedule, spec) != _form(made, spec):
        raise ValueError(
            "`schedule` must be what `make_schedule` makes for as many sequences and tokens, the dtypes and the spec "
            f"of the call. Got {shapes.brief(schedule)} that is not, for {num_tokens} tokens and {num_seqs} sequences "
            f"of a `{operation}`."
        )


def _form(schedule: Any, spec: AttentionSpec) -> Any:
    """Of which class, with which static fields and shapes; a `batch_invariant` one's depend on `max_seq_len`."""
    leaves, tree = jax.tree.flatten(schedule)
    return tree, None if spec.batch_invariant else [jnp.shape(leaf) for leaf in leaves]


def _with_own_rows(options: AttentionOptions) -> AttentionOptions:
    """The options with a layer's own row in place of scales of all layers, where a row is an odd multiple of 128 bytes.

    XLA would hand a kernel every second layer's as a view that Mosaic refuses; a sum is no view.
    """

    def own_row(scales: Any) -> Any:
        if scales is None or scales.ndim != 2 or scales.shape[1] * scales.dtype.itemsize % 256 != 128:
            return scales
        is_layer = jnp.arange(scales.shape[0]) == options.layer_index
        return jnp.sum(jnp.where(is_layer[:, None], scales, jnp.zeros_like(scales)), axis=0)

    return dataclasses.replace(options, k_scale=own_row(options.k_scale), v_scale=own_row(options.v_scale))


def chosen(
    operation: Operation,
    q: jax.Array,
    k: jax.Array,
    page_size: int | None,
    options: AttentionOptions,
    spec: AttentionSpec,
    implementation: str | None,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The function of the implementation that serves a call.

    Raises:
        ValueError, NotImplementedError: As `paged_decode`.
    """
    call = AttentionCall(
        operation=operation,
        spec=spec,
        q_dtype=q.dtype.name,
        kv_dtype=k.dtype.name,
        page_size=page_size,
        num_tokens=q.shape[1] if operation.endswith("decode") else None,
        features=options.given(),
        device=default_device(),
    )
    return choose(call, implementation).implementation.operations[operation]
