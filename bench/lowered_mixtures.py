"""Of what is lowered for a record, mixtures of experts, and what stands before them."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import jattn_kernels
from bench.lowered import Hashed, array, lowered_hash
from jattn_kernels import (
    AttentionSpec,
    HeadNorms,
    NextProduct,
    QuantizedKernel,
    Routing,
    Splits,
    Unattended,
    UnattendedLatents,
    Unmultiplied,
    Unnormed,
)
from jattn_kernels.unattended import attended


def mixtures() -> Iterator[tuple[str, Hashed]]:
    """Qwen3-30B-A3B's sizes: one token, the most that a tile of memory's speed has, and two kinds of prompts."""
    experts, hidden, units = 128, 2048, 768
    routing = Routing(num_experts=experts, per_token=8, normalised=True)
    stacks = {
        "gate_up": array((2, experts, hidden, 2 * units), "bfloat16"),
        "down": array((2, experts, units, hidden), "bfloat16"),
        "layer_index": array((), "int32"),
    }
    for tokens, implementation in ((1, "mosaic"), (64, "mosaic"), (256, "mosaic"), (2048, "mosaic"), (64, "xla")):
        x, logits = array((tokens, hidden), "bfloat16"), array((tokens, experts), "float32")
        choice = {"weights": array((tokens, 8), "float32"), "chosen": array((tokens, 8), "int32")}
        given = functools.partial(jattn_kernels.mixture_of_experts, implementation=implementation)
        routed = functools.partial(jattn_kernels.routed_experts, routing=routing, implementation=implementation)
        name = f"{implementation}_{tokens}"
        yield f"mixture_of_experts/{name}", functools.partial(lowered_hash, given, x=x, **choice, **stacks)
        yield f"routed_experts/{name}", functools.partial(lowered_hash, routed, x=x, logits=logits, **stacks)
    yield from _beside_shared()
    token = array((1, 4096), "bfloat16")
    yield "routed_experts/of_sum_1", functools.partial(_mixture_of_sum, routing, stacks, token)
    attends = _unattended(stacks["layer_index"], "bfloat16")
    yield "routed_experts/of_attention_1", functools.partial(_mixture_of_sum, routing, stacks, attends)


def _beside_shared() -> Iterator[tuple[str, Hashed]]:
    """DeepSeek-V2-Lite's sizes: few tokens, and more."""
    routing, hidden, units = Routing(num_experts=64, per_token=6, shared=2), 2048, 1408
    stacks = {
        "gate_up": array((2, routing.all_experts, hidden, 2 * units), "bfloat16"),
        "down": array((2, routing.all_experts, units, hidden), "bfloat16"),
        "layer_index": array((), "int32"),
    }
    for tokens in (1, 8, 64):
        x, logits = array((tokens, hidden), "bfloat16"), array((tokens, routing.num_experts), "float32")
        routed = functools.partial(jattn_kernels.routed_experts, routing=routing)
        yield f"routed_experts/shared_{tokens}", functools.partial(lowered_hash, routed, x=x, logits=logits, **stacks)
    latents = _unattended_latents(stacks["layer_index"], "bfloat16")
    of_latents = functools.partial(_mixture_of_sum, routing, stacks, latents, left=(8, 47), columns=3648)
    yield "routed_experts/of_latents_1", of_latents


def _mixture_of_sum(
    routing: Routing,
    stacks: dict[str, Any],
    attended: Any,
    *,
    left: tuple[int, int] = (8, 13),
    columns: int = 5120,
    hidden: int = 2048,
    output_bias: Any = None,
    qkv_bias: Any = None,
    **biases: Any,
) -> str:
    """Of a layer of those sizes all that stands behind its attention, and what the next one begins with.

    Args:
        attended: By attention, or what it is made of, which is part of it then.
        left: Parts of what is added first, and rows of each.
        columns: Of the next layer's product.
        hidden: Numbers of a token.
        biases: Of the router and experts.
    """
    dtype = "bfloat16"

    def run(row, scale, parts, attended, output, router, qkv, gate_up, down, layer, output_bias, qkv_bias, biases):
        left = Splits(parts=parts, num_rows=1, dtype=row.dtype)
        product = Unmultiplied(rows=attended, kernel=output, bias=output_bias, layer_index=layer)
        x = Unnormed(rows=row, additions=(left, product), scale=scale, layer_index=layer, eps=1e-6)
        facts: dict[str, Any] = {"scale_layer": layer, "layer_index": layer, "eps": 1e-6}
        following = NextProduct(scale=scale, kernel=qkv, bias=qkv_bias, **facts)
        mixture = functools.partial(jattn_kernels.routed_experts_of_sum, layer_index=layer, following=following)
        return mixture(x, router, routing, gate_up, down, **biases)

    row, scale = (array((rows, hidden), dtype) for rows in (1, 2))
    shapes = (attended.shape[1], hidden), (hidden, routing.num_experts), (hidden, columns)
    output, router, qkv = (array((2, *shape), dtype) for shape in shapes)
    given = row, scale, array((*left, hidden), "float32"), attended, output, router, qkv
    given = *given, stacks["gate_up"], stacks["down"], stacks["layer_index"]
    return lowered_hash(run, *given, output_bias, qkv_bias, biases)


def projected() -> Iterator[tuple[str, Hashed]]:
    """Decode that turns heads, of Llama-3-8B's sizes."""
    for tokens, dtype in ((1, "bfloat16"), (64, "bfloat16"), (64, "float8_e4m3fn")):
        rows = _unattended(array((), "int32"), "bfloat16", tokens=tokens, kv_heads=8, normed=False, kv_dtype=dtype)
        yield f"projected_decode/{tokens}_{dtype}", functools.partial(lowered_hash, attended, rows)


def _unattended(
    layer: Any, dtype: str, *, tokens: int = 1, kv_heads: int = 4, normed: bool = True, kv_dtype: str | None = None
) -> Unattended:
    """Of tokens that see at most 1,024 keys, 32 query heads."""
    angles, scale = array((tokens, 64), "float32"), array((2, 128), dtype)
    pages, number = array((2, 65, 16, kv_heads, 128), kv_dtype or dtype), array((tokens,), "int32")
    parts = array((5, -(-tokens // 4) * 4, 32 + 2 * kv_heads, 128), "float32")
    return Unattended(
        qkv=Splits(parts=parts, num_rows=tokens, dtype=jnp.dtype(dtype)),
        cos=angles,
        sin=angles,
        slots=number,
        norms=HeadNorms(q_scale=scale, k_scale=scale, layer_index=layer, eps=1e-6) if normed else None,
        k_pages=pages,
        v_pages=pages,
        page_table=array((tokens, 64), "int32"),
        seq_lens=number,
        layer_index=layer,
        spec=AttentionSpec(num_q_heads=32, num_kv_heads=kv_heads, head_dim=128),
    )


def _unattended_latents(layer: Any, dtype: str) -> UnattendedLatents:
    """Of a token that sees at most 4,096 latent rows, 16 query heads."""
    return UnattendedLatents(
        q_nope=array((1, 16, 512), dtype),
        q_pe=array((1, 16, 64), dtype),
        latent_pages=array((2, 65, 64, 576), dtype),
        page_table=array((1, 64), "int32"),
        seq_lens=array((1,), "int32"),
        layer_index=layer,
        v_up=array((2, 16, 128, 512), dtype),
        v_up_layer=layer,
        spec=AttentionSpec(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, sm_scale=0.07),
    )


def mixtures_in_few_bits() -> Iterator[tuple[str, Hashed]]:
    """Qwen3-30B-A3B's experts in fp8 with a scale for each output or block, gpt-oss-20b's in mxfp4."""
    qwen3, gpt_oss = (128, 2048, 768), (32, 2880, 2880)
    for kind, (experts, hidden, units) in {"fp8": qwen3, "blocks": qwen3, "mxfp4": gpt_oss}.items():
        kernels = [_in_few_bits(kind, (2, experts), *shape) for shape in ((2 * units, hidden), (hidden, units))]
        for tokens in (1, 64):
            choice = array((tokens, 4), "float32"), array((tokens, 4), "int32")
            given = functools.partial(jattn_kernels.mixture_of_experts, implementation="mosaic")
            rows, layer = array((tokens, hidden), "bfloat16"), array((), "int32")
            case = functools.partial(lowered_hash, given, rows, *choice, *kernels, layer_index=layer)
            yield f"mixture_of_experts/{kind}_{tokens}", case
    yield "routed_experts/mxfp4_of_sum_1", functools.partial(_mxfp4_of_sum, *gpt_oss)


def _mxfp4_of_sum(experts: int, hidden: int, units: int) -> str:
    """One token of a layer of gpt-oss-20b, behind its attention."""
    routing = Routing(num_experts=experts, per_token=4, scoring="softmax_of_chosen")
    kernels = [_in_few_bits("mxfp4", (2, experts), *shape) for shape in ((2 * units, hidden), (hidden, units))]
    biases = {
        "gate_up_bias": array((2, experts, 2 * units), "bfloat16"),
        "router_bias": array((2, experts), "bfloat16"),
    }
    biases["down_bias"] = array((2, experts, hidden), "bfloat16")
    stacks = {"gate_up": kernels[0], "down": kernels[1], "layer_index": array((), "int32")}
    token, qkv_bias = array((1, 4096), "bfloat16"), array((2, 5120), "bfloat16")
    output_bias = array((2, hidden), "bfloat16")
    return _mixture_of_sum(
        routing, stacks, token, left=(4, 4), output_bias=output_bias, qkv_bias=qkv_bias, hidden=hidden, **biases
    )


def _in_few_bits(kind: str, stack: tuple[int, ...], outputs: int, inputs: int) -> QuantizedKernel:
    if kind == "mxfp4":
        shapes = (*stack, outputs, inputs // 2), (*stack, inputs // 32, outputs)
        return QuantizedKernel(values=array(shapes[0], "uint8"), scales=array(shapes[1], "uint8"))
    scales = (outputs, 1) if kind == "fp8" else (outputs // 128, inputs // 128)
    values = array((*stack, outputs, inputs), "float8_e4m3fn")
    return QuantizedKernel(values=values, scales=array((*stack, *scales), "float32"))
