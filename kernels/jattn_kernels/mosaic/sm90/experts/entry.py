"""A mixture of experts on Hopper: rows in order, two grouped products, and the weighted sum."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jattn_kernels.call import ExpertsCall
from jattn_kernels.lowering.expert_groups import (
    ExpertGroups,
    ProductOperands,
    group_by_expert,
    most_slots,
    sum_in_pieces,
    weighed_rows,
    weighted_sum,
)
from jattn_kernels.lowering.routing import routed
from jattn_kernels.mixture_operands import ExpertsOperands
from jattn_kernels.mosaic.sm90.common.token_heads import TokenHeads
from jattn_kernels.mosaic.sm90.experts import one_token, one_token_fits, one_token_mxfp4, route, route_few
from jattn_kernels.mosaic.sm90.experts.choice import TOKENS, choose_experts, chooses
from jattn_kernels.mosaic.sm90.experts.few_bits import FewBitsOperands, few_bits_product
from jattn_kernels.mosaic.sm90.experts.few_rows import FewRowsOperands, few_rows_product
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes, few_rows_sizes
from jattn_kernels.mosaic.sm90.experts.grouped_product import grouped_product
from jattn_kernels.mosaic.sm90.experts.one_token_few_bits import HALF
from jattn_kernels.mosaic.sm90.experts.one_token_stages import FewBitsWeights, Made, OneTokenOperands
from jattn_kernels.mosaic.sm90.experts.tile_sizes import ProductTiles, few_bits_tiles, product_tiles
from jattn_kernels.mosaic.sm90.experts.two_terms import padded, two_terms
from jattn_kernels.operands import TokenOperands
from jattn_kernels.routing_spec import Routing
from jattn_kernels.splits import Splits, added


def mixture_of_experts(
    call: ExpertsCall, operands: ExpertsOperands
) -> Float[Array, "T D"] | Splits | tuple[Splits, Float[Array, "T D"], Splits | None, Any]:
    """Rows are read where they are, weights in place; what experts return is kept for some columns at a time.

    Of a call that makes its own logits: the mixture, the sum of the rows, a product that follows, and the pages of keys
    and values if it attends.
    """
    if call.router is not None:
        return _of_one_sum(call, operands)
    is_biased = operands.choice_bias is not None
    if operands.logits is not None and (
        one_token_fits.fits(call, is_biased=is_biased) or one_token_fits.fits_few_bits(call, is_biased=is_biased)
    ):
        splits = _of_one_token(call, operands)
        return splits if call.in_splits else added(splits)
    of_few_rows = few_rows_sizes(call)
    if of_few_rows is not None:
        return _of_few_rows(call, operands, of_few_rows)
    sizes = product_tiles(call) if call.scales is None else few_bits_tiles(call)
    weights, groups = _in_order(call, operands, sizes.block_rows)
    num_slots = most_slots(call.num_tokens, call.per_token, call.num_experts)
    rows = weighed_rows(operands.x, weights) if call.weighs_inputs else operands.x
    if call.scales is not None:
        return _of_few_bits(call, operands, sizes, groups, rows, None if call.weighs_inputs else weights)
    hidden = grouped_product(
        ProductOperands.of_first(operands, groups, rows), sizes, num_slots=num_slots, activation=call.activation
    )
    second = ProductOperands.of_second(operands, groups, hidden)

    def product(operands: ProductOperands, columns: slice) -> Float[Array, "S columns"]:
        return grouped_product(operands, sizes, num_slots=num_slots, columns=columns)

    out_type = jax.ShapeDtypeStruct((num_slots, call.hidden_size), operands.x.dtype)
    return sum_in_pieces(product, second, groups.slots, None if call.weighs_inputs else weights, out_type=out_type)


def _of_one_token(call: ExpertsCall, operands: ExpertsOperands) -> Splits:
    """What adds up to the same of one token: what each of its experts returns, times its weight."""
    rows = route_few.token_rows(1)
    given = _of_experts(operands)._replace(x=operands.x, logits=_parts(operands.logits, rows)[:, :rows])
    parts = _one_token(call, given).parts
    return Splits(parts=parts, num_rows=1, dtype=operands.x.dtype)


def _one_token(call: ExpertsCall, operands: OneTokenOperands) -> Made:
    """One token's mixture by the kernel of its weights."""
    return (one_token if call.scales is None else one_token_mxfp4).one_token(call, operands)


def _flat_biases(operands: Any) -> Any:
    """Biases of all layers one after the other."""
    if operands is None:
        return None
    names = [field.name for field in dataclasses.fields(operands) if field.name.endswith("bias")]
    given = {name: bias.reshape(-1) for name in names if (bias := getattr(operands, name)) is not None}
    return dataclasses.replace(operands, **given)


def _of_one_sum(call: ExpertsCall, operands: ExpertsOperands) -> tuple[Splits, Float[Array, "T D"], Splits | None, Any]:
    """The same of a token that is added up, the sum, a product that follows, and pages."""
    router = operands.router
    assert router is not None
    layers_in_arrays = jax.tree.map(lambda leaf: leaf.reshape(1) if leaf.ndim == 0 else leaf, router)
    before, following = dataclasses.replace(layers_in_arrays, next=None), layers_in_arrays.next
    if isinstance(before.attention, TokenOperands):
        before = dataclasses.replace(before, attention=_in_halves(before.attention))
    before, following = (_flat_biases(each) for each in (before, following))
    made = _one_token(call, _of_experts(operands)._replace(router=before, next=following))
    splits, product = (
        None if parts is None else Splits(parts=parts, num_rows=1, dtype=operands.x.dtype)
        for parts in (made.parts, made.next)
    )
    assert splits is not None
    pages = (made.k_pages, made.v_pages) if isinstance(router.attention, TokenOperands) else None
    return splits, made.total, product, pages


def _in_halves(attention: TokenOperands) -> Any:
    """Heads and scales in halves; the numbers of layers are arrays."""
    heads: Any = TokenHeads.of(attention.rotary)
    return dataclasses.replace(
        attention, rotary=dataclasses.replace(attention.rotary, qkv=heads.qkv, norms=heads.norms)
    )


def _of_experts(operands: ExpertsOperands) -> OneTokenOperands:
    """What the kernel for one token reads of the experts."""
    in_few_bits = operands.gate_up_scales is not None
    return OneTokenOperands(
        x=None,
        router=None,
        bias=operands.choice_bias,
        gate_up=None if in_few_bits else operands.gate_up,
        down=None if in_few_bits else operands.down,
        layer=operands.layer_index.reshape(1),
        few_bits=_weights_of_few_bits(operands) if in_few_bits else None,
    )


def _weights_of_few_bits(operands: ExpertsOperands) -> FewBitsWeights:
    """All layers' experts one after the other, outputs in blocks of 32."""

    def of_all_experts(kernel: Any, scales: Any, bias: Any, *parts: int) -> tuple[Any, Any, Any]:
        layers, experts, _, width = kernel.shape
        return (
            kernel.reshape(layers * experts, *parts, -1, HALF, width),
            scales.reshape(layers * experts, scales.shape[2], *parts, -1, HALF),
            None if bias is None else bias.reshape(-1),
        )

    return FewBitsWeights(
        *of_all_experts(operands.gate_up, operands.gate_up_scales, operands.gate_up_bias, 2),
        *of_all_experts(operands.down, operands.down_scales, operands.down_bias),
        layer=operands.layer_index.reshape(1),
    )


def _of_few_bits(
    call: ExpertsCall,
    operands: ExpertsOperands,
    sizes: ProductTiles,
    groups: ExpertGroups,
    rows: Float[Array, "X D"],
    weights: Float32[Array, "k T"] | None,
) -> Float[Array, "T D"]:
    """The same with weights of 8 or 4 bits, beside rows in two terms of fp8."""
    num_slots = most_slots(call.num_tokens, call.per_token, call.num_experts)
    facts: dict[str, Any] = {"num_slots": num_slots, "scales": call.scales, "dtype": operands.x.dtype, "sizes": sizes}

    def given(rows: Any, sources: Any, kernel: Any, scales: Any, bias: Any) -> FewBitsOperands:
        depth = rows.shape[1] if sources is not None else call.units
        terms, factors = two_terms(
            jnp.pad(rows, ((0, 0), (0, padded(depth) - rows.shape[1]))),
            sources,
            columns=depth,
            num_rows=num_slots + sizes.block_rows,
            turned=call.scales == "group",
        )
        return FewBitsOperands(
            x=terms,
            x_scales=factors,
            kernel=kernel,
            scales=scales[..., 0] if call.scales == "channel" else scales,
            bias=bias,
            layer=operands.layer_index.reshape(1),
            work=groups.work,
            num_tiles=groups.num_tiles,
        )

    first = given(rows, groups.sources, operands.gate_up, operands.gate_up_scales, operands.gate_up_bias)
    hidden = few_bits_product(first, activation=call.activation, width=padded(call.units), **facts)
    second = given(hidden, None, operands.down, operands.down_scales, operands.down_bias)

    def product(operands: FewBitsOperands, columns: slice) -> Float[Array, "S columns"]:
        return few_bits_product(operands, columns=columns, **facts)

    out_type = jax.ShapeDtypeStruct((num_slots, call.hidden_size), operands.x.dtype)
    return sum_in_pieces(product, second, groups.slots, weights, out_type=out_type)


def _of_few_rows(
    call: ExpertsCall, operands: ExpertsOperands, sizes: tuple[FewRowsSizes, FewRowsSizes]
) -> Float[Array, "T D"]:
    """The same of few rows an expert: who multiplies rows makes them float16; of few tokens a second depth is split."""
    weights, groups = _in_order(call, operands, sizes[0].rows)
    num_slots = most_slots(call.num_tokens, call.per_token, call.num_experts)
    rows = weighed_rows(operands.x, weights) if call.weighs_inputs else operands.x
    dtype = operands.x.dtype

    def given(rows: Any, sources: Any, kernel: Any, scales: Any, bias: Any, parts: int) -> FewRowsOperands:
        layers, experts, columns, width = kernel.shape
        return FewRowsOperands(
            x=rows,
            sources=sources,
            kernel=kernel.reshape(layers * experts, parts, columns // parts, width),
            scales=scales.reshape(layers * experts, scales.shape[2], parts, columns // parts),
            bias=None if bias is None else bias.reshape(-1),
            layer=operands.layer_index.reshape(1),
            work=groups.work,
            num_tiles=groups.num_tiles,
        )

    facts: dict[str, Any] = {"num_slots": num_slots, "num_experts": call.num_experts}
    first = given(rows, groups.sources, operands.gate_up, operands.gate_up_scales, operands.gate_up_bias, 2)
    (hidden,) = few_rows_product(first, sizes[0], activation=call.activation, out_dtype=dtype, **facts)
    second = given(hidden, None, operands.down, operands.down_scales, operands.down_bias, 1)
    in_splits = sizes[1].splits > 1
    returned = few_rows_product(second, sizes[1], out_dtype=jnp.float32 if in_splits else dtype, **facts)
    returned = returned.sum(axis=0).astype(dtype) if in_splits else returned[0]
    return weighted_sum(returned, groups.slots, None if call.weighs_inputs else weights)


def _in_order(
    call: ExpertsCall, operands: ExpertsOperands, block_rows: int
) -> tuple[Float32[Array, "k T"], ExpertGroups]:
    """Weights, a row a choice, and rows in order: by one kernel, as far as one block can do it."""
    routing, num_tokens, num_experts = call.routing, call.num_tokens, call.num_experts
    shared = 0 if routing is None else routing.shared
    in_one_block = route.fits(num_tokens, num_experts - shared, shared)
    facts: dict[str, Any] = {"rows_of_choices": call.weighs_inputs, "block_rows": block_rows}
    if routing is None:
        routing = Routing(num_experts=num_experts, per_token=call.per_token)
        weights, chosen = operands.weights.T, operands.chosen.T
    elif not chooses(routing, is_biased=operands.choice_bias is not None):
        weights, chosen = (part.T for part in routed(added(operands.logits), routing, operands.choice_bias))
    elif route_few.fits(routing, num_tokens):
        parts = _parts(operands.logits, route_few.token_rows(num_tokens))
        return route_few.route_and_group_few(routing, parts, operands.choice_bias, num_tokens=num_tokens, **facts)
    elif in_one_block and num_tokens <= TOKENS:
        given = route.RouteOperands(logits=added(operands.logits), bias=operands.choice_bias)
        return route.route_and_group(routing, given, num_tokens=num_tokens, **facts)
    else:
        weights, chosen = choose_experts(routing, added(operands.logits), operands.choice_bias)
    if in_one_block:
        return weights, route.group_chosen(routing, chosen, **facts)
    return weights, group_by_expert(chosen.T, num_experts, **facts)


def _parts(logits: Float32[Array, "T E"] | Splits, rows: int) -> Float32[Array, "S rows E"]:
    """What adds up to the logits, in so many rows or more."""
    if not isinstance(logits, Splits):
        return jnp.pad(logits, ((0, rows - logits.shape[0]), (0, 0)))[None]
    return jnp.pad(logits.parts, ((0, 0), (0, max(rows - logits.parts.shape[1], 0)), (0, 0)))
