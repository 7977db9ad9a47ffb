"""What of jattn is lowered to tell whether a GPU record is of the code as it is: every case of the kernels' tests."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jattn_kernels
from bench.lowered import lowered_hash
from jattn_kernels import (
    Ahead,
    AttentionSpec,
    HeadNorms,
    NextProduct,
    QuantizedKernel,
    RawLatents,
    RawQueries,
    Routing,
    Splits,
    Unattended,
    Ungated,
    Unmultiplied,
    Unnormed,
)
from jattn_kernels.call import Device, assume_device
from jattn_kernels.lowering.expert_groups import silu_gate
from jattn_kernels.spec import PageLayout
from jattn_kernels.unattended import attended
from tests.kernels.harness.case_table import CASES, Case, build
from tests.kernels.harness.kernel_sized_batches import case_of, spec_of
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED

_HOPPER = Device("gpu", (9, 0), 132)  # an H200: kernels whose blocks wait for each other must know of how many SMs
Hashed = Callable[[], str]


def lowered_cases() -> dict[str, Hashed]:
    """By name, what hashes a case."""
    calls = [
        *((f"mosaic/{case.name}", functools.partial(_attention, case, "mosaic")) for case in KERNEL_SIZED),
        *((f"xla/{case.name}", functools.partial(_attention, case, "xla")) for case in CASES),
        *_others(),
    ]
    return {name: functools.partial(_on_hopper, call) for name, call in calls}


def _on_hopper(call: Hashed) -> str:
    """A hash as dispatch would have it there."""
    assume_device(_HOPPER)
    try:
        return call()
    finally:
        assume_device(None)


def _attention(case: Case, implementation: str) -> str:
    args, kwargs = build(case)
    spec = kwargs.pop("spec")
    attend = getattr(jattn_kernels, case.operation)
    try:
        return lowered_hash(functools.partial(attend, spec=spec, implementation=implementation), *args, **kwargs)
    except NotImplementedError:
        return "refused"


def _others() -> Iterator[tuple[str, Hashed]]:
    yield from _schedules()
    yield from _shared_prefixes()
    yield from _rotations()
    yield from _projected()
    yield from _mixtures()
    yield from _mixtures_in_few_bits()
    yield from _products()
    yield from _gated_products()
    norms = [(16, 1024, "bfloat16"), (16, 4096, "bfloat16"), (3, 8192, "float16")]
    for tokens, columns, dtype in norms:
        x, scale = _array((tokens, columns), dtype), _array((2, columns), dtype)
        norm = functools.partial(jattn_kernels.rms_norm, eps=1e-6, offset=1.0)
        yield f"rms_norm/{columns}", functools.partial(lowered_hash, norm, x, scale, layer_index=_array((), "int32"))
    sums = Splits(parts=_array((4, 4, 2048), "float32"), num_rows=3, dtype=jnp.dtype("bfloat16"))
    rows, scale = _array((3, 2048), "bfloat16"), _array((2048,), "bfloat16")
    add_norm = functools.partial(jattn_kernels.add_rms_norm, eps=1e-6)
    yield "add_rms_norm/2048", functools.partial(lowered_hash, add_norm, rows, sums, scale)
    outs, lses = _array((2, 8, 8, 128), "float32"), _array((2, 8, 8), "float32")
    yield "merge_states", functools.partial(lowered_hash, jattn_kernels.merge_states, outs, lses)
    pages, latent = _array((16, 16, 2, 128), "float8_e4m3fn"), _array((16, 16, 576), "bfloat16")
    rows, scale, slots = _array((8, 2, 128), "bfloat16"), _array((2,), "float32"), _array((8,), "int32")
    yield (
        "write_pages",
        functools.partial(
            lowered_hash, jattn_kernels.write_pages, pages, pages, rows, rows, slots, k_scale=scale, v_scale=scale
        ),
    )
    parts = _array((8, 512), "bfloat16"), _array((8, 64), "bfloat16")
    yield (
        "write_latent_pages",
        functools.partial(lowered_hash, jattn_kernels.write_latent_pages, latent, *parts, slots),
    )
    angle = _array((8, 32), "float32")
    for name, rows in (
        ("rows", _array((8, 576), "bfloat16")),
        ("splits", Splits(parts=_array((4, 8, 576), "float32"), num_rows=8, dtype=jnp.dtype("bfloat16"))),
    ):
        raw = RawLatents(rows=rows, scale=_array((512,), "bfloat16"), cos=angle, sin=angle, eps=1e-6)
        yield f"mla_write/{name}", functools.partial(lowered_hash, jattn_kernels.mla_write, raw, latent, slots)
    rows = Splits(parts=_array((2, 8, 3648), "float32"), num_rows=8, dtype=jnp.dtype("bfloat16"))
    raw = RawLatents(rows=rows, scale=_array((512,), "bfloat16"), cos=angle, sin=angle, eps=1e-6, begin=3072)
    queries = RawQueries(rows=rows, k_up=_array((16, 128, 512), "bfloat16"), rope_dim=64)
    absorbed = functools.partial(lowered_hash, jattn_kernels.absorb_and_write, queries, raw, latent, slots)
    yield "mla_write/absorbed", absorbed
    yield "copy_pages", functools.partial(lowered_hash, jattn_kernels.copy_pages, pages, slots, slots)


def _products() -> Iterator[tuple[str, Hashed]]:
    """Of few rows with weights, or with weights of few bits."""
    for rows, depth, columns in ((1, 2048, 5120), (8, 4096, 2048), (3, 2048, 128)):
        operands = _array((rows, depth), "bfloat16"), _array((2, depth, columns), "bfloat16")
        for face in (jattn_kernels.matmul, jattn_kernels.matmul_splits):
            case = functools.partial(lowered_hash, face, *operands, layer_index=_array((), "int32"))
            yield f"{face.__name__}/{rows}x{depth}x{columns}", case
    rows, scale = _array((1, 2048), "bfloat16"), _array((48, 2048), "bfloat16")
    given = (
        Unnormed(rows=rows, scale=scale, layer_index=_array((), "int32"), eps=1e-6),
        _array((2, 2048, 5120), "bfloat16"),
    )
    case = functools.partial(lowered_hash, jattn_kernels.matmul_splits, *given, layer_index=_array((), "int32"))
    yield "matmul_splits/normed", case
    rows, values, scales = _array((16, 4096), "bfloat16"), _array((2, 6144, 4096), "float8_e4m3fn"), (2, 6144, 1)
    kernel = QuantizedKernel(values=values, scales=_array(scales, "float32"))
    case = functools.partial(lowered_hash, jattn_kernels.matmul, rows, kernel, layer_index=_array((), "int32"))
    yield "matmul/fp8", case
    ungated = Ungated(rows=_array((64, 8192), "bfloat16"), activation=silu_gate)
    case = functools.partial(lowered_hash, jattn_kernels.matmul, ungated, kernel, layer_index=_array((), "int32"))
    yield "matmul/fp8_ungated", case
    sums = Splits(parts=_array((4, 4, 4096), "float32"), num_rows=3, dtype=jnp.dtype("bfloat16"))
    add_norm = functools.partial(jattn_kernels.add_rms_norm, eps=1e-6, rounded=True)
    given = _array((3, 4096), "bfloat16"), sums, _array((4096,), "bfloat16")
    yield "matmul/fp8_rows_of_a_norm", functools.partial(lowered_hash, add_norm, *given)
    packed, of_groups = _array((2, 6144, 4096), "int4"), _array((2, 32, 6144), "bfloat16")
    for rows, held in ((512, kernel), (1, QuantizedKernel(values=packed, scales=of_groups, interleaved=True))):
        x = _array((rows, 4096), "bfloat16")
        case = functools.partial(lowered_hash, jattn_kernels.matmul, x, held, layer_index=_array((), "int32"))
        yield f"matmul/{held.values.dtype.name}_{rows}", case
    held, x = QuantizedKernel(values=packed, scales=of_groups, interleaved=True), _array((64, 4096), "bfloat16")
    summed = Unnormed(
        rows=_array((1, 4096), "bfloat16"),
        additions=(Splits(parts=_array((2, 4, 4096), "float32"), num_rows=1, dtype=jnp.dtype("bfloat16")),),
        scale=_array((2, 4096), "bfloat16"),
        layer_index=_array((), "int32"),
        eps=1e-6,
    )
    up = QuantizedKernel(
        values=_array((2, 28672, 4096), "int4"), scales=_array((2, 32, 28672), "bfloat16"), interleaved=True
    )
    ahead = (Ahead(values=packed, layer_index=_array((), "int32")),)
    face = functools.partial(jattn_kernels.matmul_gated_of_sum, activation=silu_gate)
    case = functools.partial(lowered_hash, face, summed, up, layer_index=_array((), "int32"), ahead=ahead)
    yield "matmul/int4_1_gated_of_sum", case
    in_int4 = {
        "splits": jattn_kernels.matmul_splits,
        "gated": functools.partial(jattn_kernels.matmul_gated, activation=silu_gate),
    }
    for name, face in in_int4.items():
        case = functools.partial(lowered_hash, face, x, held, layer_index=_array((), "int32"))
        yield f"matmul/int4_64_{name}", case


def _gated_products() -> Iterator[tuple[str, Hashed]]:
    """Of many rows, with the activation."""
    for rows, depth, units in ((256, 4096, 14336), (2304, 4096, 14336)):
        operands = _array((rows, depth), "bfloat16"), _array((2, depth, 2 * units), "bfloat16")
        face = functools.partial(jattn_kernels.matmul_gated, activation=silu_gate)
        case = functools.partial(lowered_hash, face, *operands, layer_index=_array((), "int32"))
        yield f"matmul_gated/{rows}x{depth}x{units}", case


def _schedules() -> Iterator[tuple[str, Hashed]]:
    """Work lists, and calls that are given one."""
    for case in (
        case_of("paged_decode", "plain"),
        case_of("paged_decode", "invariant", spec=spec_of(batch_invariant=True)),
        case_of("paged_decode", "window", spec=spec_of(window_left=200)),
        case_of("paged_decode", "many", q_lens=(16,) * 64, kv_lens=(700,) * 64),
        case_of("paged_extend", "plain"),
        case_of("paged_extend", "fp8", kv_dtype="float8_e4m3fn"),
    ):
        yield f"schedule/{case.name}", functools.partial(_scheduled, case)


def _scheduled(case: Case) -> str:
    args, _ = build(case)
    q, k_pages = args[:2]

    def attend(*arrays: Any) -> Any:
        schedule = jattn_kernels.make_schedule(
            arrays[4],
            *arrays[5:],
            spec=case.spec,
            num_tokens=q.shape[1] if case.is_decode else q.shape[0],
            dtype=q.dtype,
            kv_dtype=k_pages.dtype,
            page_size=case.page_size,
            max_seq_len=4096,
        )
        return getattr(jattn_kernels, case.operation)(*arrays, spec=case.spec, schedule=schedule)

    return lowered_hash(attend, *args)


def _shared_prefixes() -> Iterator[tuple[str, Hashed]]:
    pages = _array((64, 16, 2, 128), "bfloat16")
    for name, fields in (("plain", {}), ("window", {"window_left": 100})):
        attend = functools.partial(jattn_kernels.shared_prefix_decode, spec=spec_of(**fields), return_lse=True)
        ints = (_array(shape, "int32") for shape in ((8,), (), (4, 8), (4,)))
        q = _array((4, 2, 8, 128), "bfloat16")
        yield f"shared_prefix/{name}", functools.partial(lowered_hash, attend, q, pages, pages, *ints)


def _rotations() -> Iterator[tuple[str, Hashed]]:
    sizes: tuple[tuple[PageLayout, int, int], ...] = (
        ("NHD", 128, 8),
        ("HND", 128, 8),
        ("NHD", 64, 600),
        ("NHD", 256, 8),
    )
    for layout, head_dim, tokens in sizes:
        spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=head_dim, page_layout=layout)
        inner = (16, spec.num_kv_heads) if layout == "NHD" else (spec.num_kv_heads, 16)
        pages, qkv = _array((2, 64, *inner, head_dim), "bfloat16"), _array((tokens, 48, head_dim), "bfloat16")
        angle = _array((tokens, head_dim // 2), "float32")
        rotate = functools.partial(jattn_kernels.rotate_and_write, num_kv_heads=spec.num_kv_heads, layout=layout)
        slots, layer = _array((tokens,), "int32"), _array((), "int32")
        call = functools.partial(lowered_hash, rotate, qkv, angle, angle, pages, pages, slots, layer_index=layer)
        yield f"rotate_and_write/{layout}_{head_dim}_{tokens}", call
        if (layout, tokens) == ("NHD", 8):
            scale = _array((2, head_dim), "bfloat16")
            norms = jattn_kernels.HeadNorms(q_scale=scale, k_scale=scale, layer_index=layer, eps=1e-6)
            yield f"rotate_and_write/normed_{head_dim}_{tokens}", functools.partial(call, norms=norms)
            parts = _array((4, tokens, *qkv.shape[1:]), "float32")
            sums = Splits(parts=parts, num_rows=tokens, dtype=jnp.dtype("bfloat16"))
            given = sums, *call.args[2:]
            yield (
                f"rotate_and_write/splits_{head_dim}_{tokens}",
                functools.partial(lowered_hash, rotate, *given, layer_index=layer),
            )


def _mixtures() -> Iterator[tuple[str, Hashed]]:
    """Qwen3-30B-A3B's sizes: one token, the most that a tile of memory's speed has, and two kinds of prompts."""
    experts, hidden, units = 128, 2048, 768
    routing = Routing(num_experts=experts, per_token=8, normalised=True)
    stacks = {
        "gate_up": _array((2, experts, hidden, 2 * units), "bfloat16"),
        "down": _array((2, experts, units, hidden), "bfloat16"),
        "layer_index": _array((), "int32"),
    }
    for tokens, implementation in ((1, "mosaic"), (64, "mosaic"), (256, "mosaic"), (2048, "mosaic"), (64, "xla")):
        x, logits = _array((tokens, hidden), "bfloat16"), _array((tokens, experts), "float32")
        choice = {"weights": _array((tokens, 8), "float32"), "chosen": _array((tokens, 8), "int32")}
        given = functools.partial(jattn_kernels.mixture_of_experts, implementation=implementation)
        routed = functools.partial(jattn_kernels.routed_experts, routing=routing, implementation=implementation)
        name = f"{implementation}_{tokens}"
        yield f"mixture_of_experts/{name}", functools.partial(lowered_hash, given, x=x, **choice, **stacks)
        yield f"routed_experts/{name}", functools.partial(lowered_hash, routed, x=x, logits=logits, **stacks)
    yield from _beside_shared()
    yield "routed_experts/of_sum_1", functools.partial(_mixture_of_sum, routing, stacks, attends=False)
    yield "routed_experts/of_attention_1", functools.partial(_mixture_of_sum, routing, stacks, attends=True)


def _beside_shared() -> Iterator[tuple[str, Hashed]]:
    """DeepSeek-V2-Lite's sizes: few tokens, and more."""
    routing, hidden, units = Routing(num_experts=64, per_token=6, shared=2), 2048, 1408
    stacks = {
        "gate_up": _array((2, routing.all_experts, hidden, 2 * units), "bfloat16"),
        "down": _array((2, routing.all_experts, units, hidden), "bfloat16"),
        "layer_index": _array((), "int32"),
    }
    for tokens in (1, 8, 64):
        x, logits = _array((tokens, hidden), "bfloat16"), _array((tokens, routing.num_experts), "float32")
        routed = functools.partial(jattn_kernels.routed_experts, routing=routing)
        yield f"routed_experts/shared_{tokens}", functools.partial(lowered_hash, routed, x=x, logits=logits, **stacks)


def _mixture_of_sum(routing: Routing, stacks: dict[str, Any], *, attends: bool) -> str:
    """Of a layer of those sizes all that stands behind its attention, and what the next one begins with.

    Args:
        attends: Whether attention is part of it.
    """
    dtype = "bfloat16"

    def run(row, scale, parts, attended, output, router, qkv, gate_up, down, layer):
        left = Splits(parts=parts, num_rows=1, dtype=row.dtype)
        product = Unmultiplied(rows=attended, kernel=output, layer_index=layer)
        x = Unnormed(rows=row, additions=(left, product), scale=scale, layer_index=layer, eps=1e-6)
        facts: dict[str, Any] = {"scale_layer": layer, "layer_index": layer, "eps": 1e-6}
        following = NextProduct(scale=scale, kernel=qkv, **facts)
        mixture = functools.partial(jattn_kernels.routed_experts_of_sum, layer_index=layer, following=following)
        return mixture(x, router, routing, gate_up, down)

    row, scale, attended = (_array(shape, dtype) for shape in ((1, 2048), (2, 2048), (1, 4096)))
    if attends:
        attended = _unattended(stacks["layer_index"], dtype)
    output, router, qkv = (_array((2, *shape), dtype) for shape in ((4096, 2048), (2048, 128), (2048, 5120)))
    given = row, scale, _array((8, 13, 2048), "float32"), attended, output, router, qkv
    return lowered_hash(run, *given, stacks["gate_up"], stacks["down"], stacks["layer_index"])


def _projected() -> Iterator[tuple[str, Hashed]]:
    """Decode that turns heads, of which 4 or 8 see one key's."""
    for tokens, dtype in ((1, "bfloat16"), (64, "bfloat16"), (64, "float8_e4m3fn")):
        rows = _unattended(_array((), "int32"), "bfloat16", tokens=tokens, kv_dtype=dtype)
        yield f"projected_decode/{tokens}_{dtype}", functools.partial(lowered_hash, attended, rows)


def _unattended(layer: Any, dtype: str, *, tokens: int = 1, kv_dtype: str | None = None) -> Unattended:
    """Of tokens that see at most 1,024 keys, 32 query heads and 4 of keys."""
    angles, scale = _array((tokens, 64), "float32"), _array((2, 128), dtype)
    pages, number = _array((2, 65, 16, 4, 128), kv_dtype or dtype), _array((tokens,), "int32")
    return Unattended(
        qkv=Splits(parts=_array((5, -(-tokens // 4) * 4, 40, 128), "float32"), num_rows=tokens, dtype=jnp.dtype(dtype)),
        cos=angles,
        sin=angles,
        slots=number,
        norms=HeadNorms(q_scale=scale, k_scale=scale, layer_index=layer, eps=1e-6),
        k_pages=pages,
        v_pages=pages,
        page_table=_array((tokens, 64), "int32"),
        seq_lens=number,
        layer_index=layer,
        spec=AttentionSpec(num_q_heads=32, num_kv_heads=4, head_dim=128),
    )


def _mixtures_in_few_bits() -> Iterator[tuple[str, Hashed]]:
    """Qwen3-30B-A3B's experts in fp8 with a scale for each output or block, gpt-oss-20b's in mxfp4."""
    qwen3, gpt_oss = (128, 2048, 768), (32, 2880, 2880)
    for kind, (experts, hidden, units) in {"fp8": qwen3, "blocks": qwen3, "mxfp4": gpt_oss}.items():
        kernels = [_in_few_bits(kind, (2, experts), *shape) for shape in ((2 * units, hidden), (hidden, units))]
        for tokens in (1, 64):
            choice = _array((tokens, 4), "float32"), _array((tokens, 4), "int32")
            given = functools.partial(jattn_kernels.mixture_of_experts, implementation="mosaic")
            rows, layer = _array((tokens, hidden), "bfloat16"), _array((), "int32")
            case = functools.partial(lowered_hash, given, rows, *choice, *kernels, layer_index=layer)
            yield f"mixture_of_experts/{kind}_{tokens}", case


def _in_few_bits(kind: str, stack: tuple[int, ...], outputs: int, inputs: int) -> QuantizedKernel:
    if kind == "mxfp4":
        shapes = (*stack, outputs, inputs // 2), (*stack, inputs // 32, outputs)
        return QuantizedKernel(values=_array(shapes[0], "uint8"), scales=_array(shapes[1], "uint8"))
    scales = (outputs, 1) if kind == "fp8" else (outputs // 128, inputs // 128)
    values = _array((*stack, outputs, inputs), "float8_e4m3fn")
    return QuantizedKernel(values=values, scales=_array((*stack, *scales), "float32"))


def _array(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
