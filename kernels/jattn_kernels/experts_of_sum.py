"""Mixtures of experts of rows that are added up and normed first, and whose router is part of it."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall, ExpertsCall, NextCall, RouterCall
from jattn_kernels.dispatch import choose, serves
from jattn_kernels.experts import ExpertsKwargs, packed_experts, routed_experts
from jattn_kernels.matmul import matmul_splits_of_sum, multiplied
from jattn_kernels.mixture_operands import ExpertsOperands, NextOperands, RouterOperands
from jattn_kernels.norm import check_additions, packed_norm
from jattn_kernels.operands import MatmulOperands, names_options
from jattn_kernels.packed_product import product_bias, product_operands
from jattn_kernels.quantized import QuantizedKernel
from jattn_kernels.routing_spec import Routing
from jattn_kernels.shapes.experts import check_logits
from jattn_kernels.splits import Splits
from jattn_kernels.unattended import Pages, Unattended, attended, unattended_call
from jattn_kernels.unattended_latents import UnattendedLatents, attended_latents, unattended_latents_call
from jattn_kernels.unmultiplied import NextProduct, Unmultiplied
from jattn_kernels.unnormed import Unnormed

_NOT_ATTENDED = Unattended, UnattendedLatents


@names_options(ExpertsKwargs)
def routed_experts_of_sum(
    x: Unnormed,
    router: Float[Array, "*L D E"],
    routing: Routing,
    gate_up: Float[Array, "*L A D F2"] | QuantizedKernel,
    down: Float[Array, "*L A F D"] | QuantizedKernel,
    *,
    router_bias: Float[Array, "*L E"] | None = None,
    choice_bias: Float[Array, " E"] | None = None,
    weighs_inputs: bool = False,
    following: NextProduct | None = None,
    **options: Unpack[ExpertsKwargs],
) -> tuple[Float[Array, "T D"] | Splits, Float[Array, "T D"], Splits | None, Pages | None]:
    """`routed_experts` of rows that are added up and normed first, by a router's logits of them; and the rows' sum.

    On Hopper all of it is one kernel for one token, the product too that is added last, if it is not taken yet, with
    the attention that its rows are made by, and the product that the next layer begins with: it is the third of what is
    returned, None where it is still to do. The last are pages with the token's key and value, if rows are Unattended.

    Args:
        x: Its `additions` may be Unmultiplied.
        router: The product's weights; their layer is the experts'.
        router_bias: Added to the logits.
        following: The next layer's product.

    Raises:
        ValueError, NotImplementedError: As `matmul_splits_of_sum` and `routed_experts`.
    """
    facts = {"router_bias": router_bias, "choice_bias": choice_bias, "weighs_inputs": weighs_inputs}
    return _of_sum(x, router, routing, gate_up, down, options, following=following, **facts)


def _of_sum(
    x: Unnormed,
    router: Any,
    routing: Routing,
    gate_up: Any,
    down: Any,
    options: ExpertsKwargs,
    *,
    router_bias: Any,
    choice_bias: Any,
    weighs_inputs: bool,
    following: NextProduct | None,
    leaves_for: AttentionCall | None = None,
) -> tuple[Float[Array, "T D"] | Splits, Float[Array, "T D"], Splits | None, Pages | None]:
    """The same; `leaves_for` as of RouterCall."""
    implementation = options.get("implementation")
    facts: dict[str, Any] = {"weighs_inputs": weighs_inputs, "in_splits": True}
    last = x.additions[-1] if x.additions else None
    is_of_two = len(x.additions) == 2 and isinstance(x.additions[0], Splits)
    if following is not None and isinstance(following.kernel, QuantizedKernel):
        following = None  # no mixture's kernel takes it
    if is_of_two and isinstance(last, Unmultiplied) and not isinstance(last.kernel, QuantizedKernel):
        asked = implementation or (last.rows.implementation if isinstance(last.rows, _NOT_ATTENDED) else None)
        for wanted in [None] if following is None else [following, None]:
            given = (x, last, router, routing, gate_up, down, router_bias, choice_bias, wanted, options)
            call, operands = _in_one(*given, leaves_for=leaves_for, **facts)
            if serves(call, asked):
                return choose(call, asked).implementation.run(call, operands)
    if isinstance(last, Unmultiplied) and isinstance(last.rows, _NOT_ATTENDED):
        pages = None
        if isinstance(last.rows, UnattendedLatents):
            leaves_for, _ = unattended_latents_call(last.rows)
            rows = attended_latents(last.rows)
        else:
            rows, pages = attended(last.rows)
        x = dataclasses.replace(x, additions=(*x.additions[:-1], dataclasses.replace(last, rows=rows)))
        again: dict[str, Any] = {"router_bias": router_bias, "choice_bias": choice_bias, "following": following}
        again |= {"weighs_inputs": weighs_inputs, "leaves_for": leaves_for}
        return *_of_sum(x, router, routing, gate_up, down, options, **again)[:-1], pages
    additions = tuple(multiplied(addition, implementation=implementation) for addition in x.additions)
    given = dataclasses.replace(x, additions=additions)
    product = {"layer_index": options.get("layer_index"), "implementation": implementation}
    logits, total, normed = matmul_splits_of_sum(given, router, bias=router_bias, out_dtype=jnp.float32, **product)
    facts["choice_bias"] = choice_bias
    return routed_experts(normed, logits, routing, gate_up, down, **facts, **options), total, None, None


def _in_one(
    x: Unnormed,
    last: Unmultiplied,
    router: Any,
    routing: Routing,
    gate_up: Any,
    down: Any,
    router_bias: Any,
    choice_bias: Any,
    following: NextProduct | None,
    options: ExpertsKwargs,
    *,
    leaves_for: AttentionCall | None,
    **facts: Any,
) -> tuple[ExpertsCall, ExpertsOperands]:
    """The call of the whole, and its operands."""
    check_additions(x, products=True)
    check_logits(x.rows, jax.ShapeDtypeStruct((*x.shape[:-1], router.shape[-1]), jnp.float32), routing, choice_bias)
    first = x.additions[:-1]
    norm_call, norm = packed_norm(x.rows, x.scale, x.eps, x.offset, x.layer_index, first)
    rows, attention_call, attention = last.rows, None, None
    if isinstance(rows, UnattendedLatents):
        attention_call, attention = unattended_latents_call(rows)
        leaves_for = attention_call
    elif isinstance(rows, Unattended):
        attention_call, attention = unattended_call(rows)
    if isinstance(rows, _NOT_ATTENDED):
        rows = jnp.zeros(rows.shape, rows.dtype)  # for their shape
    product, layer = product_operands(rows, last.kernel, last.layer_index), options.get("layer_index")
    of_router = product_operands(x.rows, router, layer)
    operands = RouterOperands(
        norm=norm,
        attended=product.x if attention is None else None,
        attention=attention,
        output=product.kernel,
        output_layer=product.layer_index,
        output_bias=_bias(last.bias, product, last.layer_index),
        kernel=of_router.kernel,
        bias=_bias(router_bias, of_router, layer),
        next=None if following is None else _next_operands(x, following),
    )
    left = first[0]
    assert isinstance(left, Splits)
    facts |= {"per_token": routing.choices, "routing": routing}
    facts["router"] = RouterCall(
        norm=norm_call,
        left=(left.parts.shape[0], left.parts.shape[1]),
        depth=last.rows.shape[1],
        choice_biased=choice_bias is not None,
        output_biased=last.bias is not None,
        biased=router_bias is not None,
        attention=attention_call,
        leaves_for=leaves_for,
        next=None if following is None else _next_call(x, following),
    )
    choice: dict[str, Any] = {
        "router": operands,
        "choice_bias": None if choice_bias is None else choice_bias.astype(jnp.float32),
    }
    return packed_experts(x.rows, gate_up, down, choice, options, **facts)


def _next_call(x: Unnormed, following: NextProduct) -> NextCall:
    norm, _ = packed_norm(x.rows, following.scale, following.eps, following.offset, following.scale_layer)
    return NextCall(norm=norm, columns=following.kernel.shape[-1], biased=following.bias is not None)


def _next_operands(x: Unnormed, following: NextProduct) -> NextOperands:
    product = product_operands(x.rows, following.kernel, following.layer_index)
    scale_layer = jnp.asarray(following.scale_layer, jnp.int32)
    return NextOperands(
        scale=following.scale,
        scale_layer=scale_layer,
        kernel=product.kernel,
        layer=product.layer_index,
        bias=_bias(following.bias, product, following.layer_index),
    )


def _bias(bias: Any, product: MatmulOperands, layer_index: Any) -> Float[Array, "L F"] | None:
    return None if bias is None else product_bias(bias, product.kernel.shape[-1], product, layer_index)
