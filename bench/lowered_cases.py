"""What of jattn is lowered to tell whether a GPU record is of the code as it is: every case of the kernels' tests."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import jattn_kernels
from bench.lowered import Hashed, array, lowered_hash
from bench.lowered_mixtures import mixtures, mixtures_in_few_bits, projected
from jattn_kernels import (
    AttentionSpec,
    QuantizedKernel,
    RawLatents,
    RawQueries,
    Splits,
    Ungated,
    Unnormed,
)
from jattn_kernels.call import Device, assume_device
from jattn_kernels.lowering.expert_groups import silu_gate
from jattn_kernels.spec import PageLayout
from jattn_kernels.unmultiplied import NextProduct, Unmultiplied
from tests.kernels.harness.case_table import CASES, Case, build
from tests.kernels.harness.kernel_sized_batches import case_of, spec_of
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED

_HOPPER = Device("gpu", (9, 0), 132)  # an H200: kernels whose blocks wait for each other must know of how many SMs


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
    yield from projected()
    yield from mixtures()
    yield from mixtures_in_few_bits()
    yield from _products()
    yield from _gated_products()
    norms = [(16, 1024, "bfloat16"), (16, 4096, "bfloat16"), (3, 8192, "float16")]
    for tokens, columns, dtype in norms:
        x, scale = array((tokens, columns), dtype), array((2, columns), dtype)
        norm = functools.partial(jattn_kernels.rms_norm, eps=1e-6, offset=1.0)
        yield f"rms_norm/{columns}", functools.partial(lowered_hash, norm, x, scale, layer_index=array((), "int32"))
    sums = Splits(parts=array((4, 4, 2048), "float32"), num_rows=3, dtype=jnp.dtype("bfloat16"))
    rows, scale = array((3, 2048), "bfloat16"), array((2048,), "bfloat16")
    add_norm = functools.partial(jattn_kernels.add_rms_norm, eps=1e-6)
    yield "add_rms_norm/2048", functools.partial(lowered_hash, add_norm, rows, sums, scale)
    outs, lses = array((2, 8, 8, 128), "float32"), array((2, 8, 8), "float32")
    yield "merge_states", functools.partial(lowered_hash, jattn_kernels.merge_states, outs, lses)
    pages, latent = array((16, 16, 2, 128), "float8_e4m3fn"), array((16, 16, 576), "bfloat16")
    rows, scale, slots = array((8, 2, 128), "bfloat16"), array((2,), "float32"), array((8,), "int32")
    yield (
        "write_pages",
        functools.partial(
            lowered_hash, jattn_kernels.write_pages, pages, pages, rows, rows, slots, k_scale=scale, v_scale=scale
        ),
    )
    parts = array((8, 512), "bfloat16"), array((8, 64), "bfloat16")
    yield (
        "write_latent_pages",
        functools.partial(lowered_hash, jattn_kernels.write_latent_pages, latent, *parts, slots),
    )
    angle = array((8, 32), "float32")
    for name, rows in (
        ("rows", array((8, 576), "bfloat16")),
        ("splits", Splits(parts=array((4, 8, 576), "float32"), num_rows=8, dtype=jnp.dtype("bfloat16"))),
    ):
        raw = RawLatents(rows=rows, scale=array((512,), "bfloat16"), cos=angle, sin=angle, eps=1e-6)
        yield f"mla_write/{name}", functools.partial(lowered_hash, jattn_kernels.mla_write, raw, latent, slots)
    rows = Splits(parts=array((2, 8, 3648), "float32"), num_rows=8, dtype=jnp.dtype("bfloat16"))
    raw = RawLatents(rows=rows, scale=array((512,), "bfloat16"), cos=angle, sin=angle, eps=1e-6, begin=3072)
    queries = RawQueries(rows=rows, k_up=array((16, 128, 512), "bfloat16"), rope_dim=64)
    absorbed = functools.partial(lowered_hash, jattn_kernels.absorb_and_write, queries, raw, latent, slots)
    yield "mla_write/absorbed", absorbed
    yield "copy_pages", functools.partial(lowered_hash, jattn_kernels.copy_pages, pages, slots, slots)


def _products() -> Iterator[tuple[str, Hashed]]:
    """Of few rows with weights, or with weights of few bits."""
    for rows, depth, columns in ((1, 2048, 5120), (8, 4096, 2048), (3, 2048, 128)):
        operands = array((rows, depth), "bfloat16"), array((2, depth, columns), "bfloat16")
        for face in (jattn_kernels.matmul, jattn_kernels.matmul_splits):
            case = functools.partial(lowered_hash, face, *operands, layer_index=array((), "int32"))
            yield f"{face.__name__}/{rows}x{depth}x{columns}", case
    rows, scale = array((1, 2048), "bfloat16"), array((48, 2048), "bfloat16")
    given = (
        Unnormed(rows=rows, scale=scale, layer_index=array((), "int32"), eps=1e-6),
        array((2, 2048, 5120), "bfloat16"),
    )
    case = functools.partial(lowered_hash, jattn_kernels.matmul_splits, *given, layer_index=array((), "int32"))
    yield "matmul_splits/normed", case
    rows, values, scales = array((16, 4096), "bfloat16"), array((2, 6144, 4096), "float8_e4m3fn"), (2, 6144, 1)
    kernel = QuantizedKernel(values=values, scales=array(scales, "float32"))
    case = functools.partial(lowered_hash, jattn_kernels.matmul, rows, kernel, layer_index=array((), "int32"))
    yield "matmul/fp8", case
    ungated = Ungated(rows=array((64, 8192), "bfloat16"), activation=silu_gate)
    case = functools.partial(lowered_hash, jattn_kernels.matmul, ungated, kernel, layer_index=array((), "int32"))
    yield "matmul/fp8_ungated", case
    sums = Splits(parts=array((4, 4, 4096), "float32"), num_rows=3, dtype=jnp.dtype("bfloat16"))
    add_norm = functools.partial(jattn_kernels.add_rms_norm, eps=1e-6, rounded=True)
    given = array((3, 4096), "bfloat16"), sums, array((4096,), "bfloat16")
    yield "matmul/fp8_rows_of_a_norm", functools.partial(lowered_hash, add_norm, *given)
    packed, of_groups = array((2, 6144, 4096), "int4"), array((2, 32, 6144), "bfloat16")
    for rows, held in ((512, kernel), (1, QuantizedKernel(values=packed, scales=of_groups, interleaved=True))):
        x = array((rows, 4096), "bfloat16")
        case = functools.partial(lowered_hash, jattn_kernels.matmul, x, held, layer_index=array((), "int32"))
        yield f"matmul/{held.values.dtype.name}_{rows}", case
    held, x = QuantizedKernel(values=packed, scales=of_groups, interleaved=True), array((64, 4096), "bfloat16")
    summed = Unnormed(
        rows=array((1, 4096), "bfloat16"),
        additions=(Splits(parts=array((2, 4, 4096), "float32"), num_rows=1, dtype=jnp.dtype("bfloat16")),),
        scale=array((2, 4096), "bfloat16"),
        layer_index=array((), "int32"),
        eps=1e-6,
    )
    up = QuantizedKernel(
        values=array((2, 28672, 4096), "int4"), scales=array((2, 32, 28672), "bfloat16"), interleaved=True
    )
    face = functools.partial(jattn_kernels.matmul_gated_of_sum, activation=silu_gate)
    case = functools.partial(lowered_hash, face, summed, up, layer_index=array((), "int32"))
    yield "matmul/int4_1_gated_of_sum", case
    in_int4 = {
        "splits": jattn_kernels.matmul_splits,
        "gated": functools.partial(jattn_kernels.matmul_gated, activation=silu_gate),
    }
    as_awq = dataclasses.replace(held, zero_points=array((2, 32, 6144), "int8"))
    for (name, face), (suffix, kernel) in itertools.product(in_int4.items(), (("", held), ("_awq", as_awq))):
        case = functools.partial(lowered_hash, face, x, kernel, layer_index=array((), "int32"))
        yield f"matmul/int4_64_{name}{suffix}", case
    yield "matmul/int4_1_mlp_of_sum", _mlp_of_sum
    yield "matmul/int4_1_mlp_of_sum_awq", functools.partial(_mlp_of_sum, zero_points=True)


def _mlp_of_sum(*, zero_points: bool = False) -> str:
    """One token of a layer of Llama-3-8B in int4, behind its attention."""
    layer, width = array((), "int32"), 4096

    def held(columns: int, depth: int) -> QuantizedKernel:
        values, scales = array((2, columns, depth), "int4"), array((2, depth // 128, columns), "bfloat16")
        taken = array(scales.shape, "int8") if zero_points else None
        return QuantizedKernel(values=values, scales=scales, zero_points=taken, interleaved=True)

    row, scale = array((1, width), "bfloat16"), array((2, width), "bfloat16")
    left = Splits(parts=array((1, 16, width), "float32"), num_rows=1, dtype=jnp.dtype("bfloat16"))
    product = Unmultiplied(rows=row, kernel=held(width, width), layer_index=layer)
    x = Unnormed(rows=row, additions=(left, product), scale=scale, layer_index=layer, eps=1e-6)
    following = NextProduct(scale=scale, scale_layer=layer, kernel=held(6144, width), layer_index=layer, eps=1e-6)
    face = functools.partial(jattn_kernels.mlp_of_sum, activation=silu_gate)
    kernels = held(28672, width), held(width, 14336)
    return lowered_hash(face, x, *kernels, following=following, layer_index=layer)


def _gated_products() -> Iterator[tuple[str, Hashed]]:
    """Of many rows, with the activation."""
    for rows, depth, units in ((256, 4096, 14336), (2304, 4096, 14336)):
        operands = array((rows, depth), "bfloat16"), array((2, depth, 2 * units), "bfloat16")
        face = functools.partial(jattn_kernels.matmul_gated, activation=silu_gate)
        case = functools.partial(lowered_hash, face, *operands, layer_index=array((), "int32"))
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
    pages = array((64, 16, 2, 128), "bfloat16")
    for name, fields in (("plain", {}), ("window", {"window_left": 100})):
        attend = functools.partial(jattn_kernels.shared_prefix_decode, spec=spec_of(**fields), return_lse=True)
        ints = (array(shape, "int32") for shape in ((8,), (), (4, 8), (4,)))
        q = array((4, 2, 8, 128), "bfloat16")
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
        pages, qkv = array((2, 64, *inner, head_dim), "bfloat16"), array((tokens, 48, head_dim), "bfloat16")
        angle = array((tokens, head_dim // 2), "float32")
        rotate = functools.partial(jattn_kernels.rotate_and_write, num_kv_heads=spec.num_kv_heads, layout=layout)
        slots, layer = array((tokens,), "int32"), array((), "int32")
        call = functools.partial(lowered_hash, rotate, qkv, angle, angle, pages, pages, slots, layer_index=layer)
        yield f"rotate_and_write/{layout}_{head_dim}_{tokens}", call
        if (layout, tokens) == ("NHD", 8):
            scale = array((2, head_dim), "bfloat16")
            norms = jattn_kernels.HeadNorms(q_scale=scale, k_scale=scale, layer_index=layer, eps=1e-6)
            yield f"rotate_and_write/normed_{head_dim}_{tokens}", functools.partial(call, norms=norms)
            parts = array((4, tokens, *qkv.shape[1:]), "float32")
            sums = Splits(parts=parts, num_rows=tokens, dtype=jnp.dtype("bfloat16"))
            given = sums, *call.args[2:]
            yield (
                f"rotate_and_write/splits_{head_dim}_{tokens}",
                functools.partial(lowered_hash, rotate, *given, layer_index=layer),
            )
