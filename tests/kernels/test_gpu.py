"""On an NVIDIA GPU, every implementation against the oracle: the table of cases, and cases of kernels' sizes."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import jattn_kernels
from jattn_kernels.call import AttentionCall, default_device
from jattn_kernels.dispatch import implementations
from jattn_kernels.mosaic.sm90 import paged_decode as decode_entry
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.prepass import has_prepass
from tests.kernels.harness.case_table import CASES, assert_close, build
from tests.kernels.harness.chunked_prompt import chunked_prompt, prompt_behind
from tests.kernels.harness.kernel_sized_batches import case_of, spec_of
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED
from tests.kernels.harness.mosaic_calls import schedule_call

pytestmark = pytest.mark.gpu

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    assert jax.default_backend() == "gpu", "these tests were asked for, and JAX's default device is no GPU"


@pytest.mark.parametrize("implementation", [entry.name for entry in implementations()])
@pytest.mark.parametrize("case", [*CASES, *KERNEL_SIZED], ids=lambda case: case.name)
def test_gpu_agrees_with_the_oracle(case, implementation):
    inputs = build(case)
    attend = getattr(jattn_kernels, case.operation)
    try:
        out, lse = attend(*inputs.args, **inputs.kwargs, return_lse=True, implementation=implementation)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert_close(case, inputs, out, lse, narrow_products=implementation == "mosaic")


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in KERNEL_SIZED
        if case.operation == "paged_decode" and case.q_lens[0] > 1
        if case.kv_dtype is None and case.spec.rope_theta is None
    ],
    ids=lambda case: case.name,
)
def test_mosaic_decode_of_several_tokens_by_extends_kernel_agrees_with_the_oracle(monkeypatch, case):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    monkeypatch.setattr(decode_entry, "num_sms", lambda: 1)
    monkeypatch.setattr(decode_entry, "_MANY_ROWS", 1)
    inputs = build(case)
    batch_size, num_tokens = inputs.args[0].shape[:2]
    call = schedule_call("paged_decode", case.spec, num_tokens, case.dtype)
    assert decode_entry.suits_extend(call, batch_size, num_tokens)
    attend = functools.partial(jattn_kernels.paged_decode, return_lse=True, implementation="mosaic")
    assert_close(case, inputs, *attend(*inputs.args, **inputs.kwargs))


def is_converted(case):
    """Whether it is worth a look both ways, with keys converted ahead of the kernel and in it."""
    is_small = case.page_size == 8 or case.spec.combined_pool is not None
    return is_small or case.spec.rope_theta is not None or case.name.startswith("paged_extend_fp8")


@pytest.mark.parametrize(
    "case",
    [case for case in KERNEL_SIZED if case.operation == "paged_extend" and is_converted(case)],
    ids=lambda case: case.name,
)
def test_mosaic_extend_converts_keys_the_other_way_too(monkeypatch, case):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    monkeypatch.setattr(extend, "has_prepass", lambda *facts, **sizes: not has_prepass(*facts, **sizes))
    inputs = build(case)
    attend = functools.partial(jattn_kernels.paged_extend, return_lse=True, implementation="mosaic")
    assert_close(case, inputs, *attend(*inputs.args, **inputs.kwargs))


_NARROW = spec_of(num_q_heads=1, num_kv_heads=1, head_dim=64)  # a token's queries take 128 bytes
_VIEWS = {"page_size": 8, "kv_lens": (130, 1, 64, 0, 248, 90), "alibi": True, "spec": _NARROW}
_SCALED = {"kv_dtype": "float8_e4m3fn", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}


@pytest.mark.parametrize(
    ("case", "ahead"),
    [
        *((case_of(operation, "views", **_VIEWS), False) for operation in ("paged_decode", "ragged_extend")),
        *((case_of("paged_extend", "views", **_VIEWS), ahead) for ahead in (False, True)),
        (case_of("paged_decode", "views_scaled", **_SCALED, spec=spec_of(num_q_heads=32, num_kv_heads=32)), False),
    ],
    ids=["decode", "ragged", "extend", "extend_ahead", "decode_scaled"],
)
def test_mosaic_takes_what_begins_128_bytes_into_a_larger_array(monkeypatch, case, ahead):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    monkeypatch.setattr(extend, "has_prepass", lambda *facts, **sizes: ahead)
    inputs = build(case)
    kwargs = dict(inputs.kwargs)
    given = [*inputs.args, *(kwargs.pop(name) for name in ("alibi_slopes",) if name in kwargs)]
    skipped = [next((n for n in (1, 32) if n * x[0].nbytes % 256 == 128), 0) for x in given]
    larger = [jnp.concatenate([jnp.zeros((n, *x.shape[1:]), x.dtype), x]) for n, x in zip(skipped, given, strict=True)]

    @jax.jit
    def attend(larger):
        parts = [x[n:] for n, x in zip(skipped, larger, strict=True)]
        named = {"alibi_slopes": parts[-1]} if case.alibi else {}
        args = parts[: len(inputs.args)]
        run = getattr(jattn_kernels, case.operation)
        return run(*args, **kwargs, **named, return_lse=True, implementation="mosaic")

    assert any(skipped) or case.kv_scale is not None
    assert_close(case, inputs, *attend(larger), narrow_products=True)


def test_mosaic_decode_may_be_stacked_by_a_scan():
    """A step's lse of 32 heads is 128 bytes: every second row of the stack begins at an odd multiple of them."""
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    case = case_of("paged_decode", "stacked", kv_lens=(130,), q_lens=(1,), padding_rows=0, spec=spec_of(num_q_heads=32))
    inputs = build(case)

    @jax.jit
    def attend():
        def step(carry, _):
            found = jattn_kernels.paged_decode(*inputs.args, **inputs.kwargs, return_lse=True, implementation="mosaic")
            return carry, found

        return jax.lax.scan(step, None, length=4)[1]

    outs, lses = attend()
    for out, lse in zip(outs, lses, strict=True):
        assert_close(case, inputs, out, lse)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("facts", [{}, {"window_left": 200}, {"logits_soft_cap": 5.0}, {"rope_theta": 1e4}], ids=str)
def test_mosaic_extend_of_a_prompt_is_the_same_to_the_bit_in_chunks_beside_another(facts, kv_dtype):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    spec = spec_of(batch_invariant=True, **facts)
    prompt = chunked_prompt(spec, num_tokens=1000, cut=333, kv_dtype=kv_dtype)
    attend = functools.partial(jattn_kernels.paged_extend, spec=spec, return_lse=True, implementation="mosaic")
    for alone, beside in zip(attend(*prompt.whole), attend(*prompt.chunked), strict=True):
        chex.assert_trees_all_equal(alone, beside[prompt.tokens])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_mosaic_extend_over_ragged_keys_is_the_same_to_the_bit_behind_another(kv_dtype):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    spec = spec_of(batch_invariant=True)
    prompt = prompt_behind(spec, num_tokens=1000, kv_dtype=kv_dtype)
    attend = functools.partial(jattn_kernels.ragged_extend, spec=spec, return_lse=True, implementation="mosaic")
    for alone, behind in zip(attend(*prompt.whole), attend(*prompt.chunked), strict=True):
        chex.assert_trees_all_equal(alone, behind[prompt.tokens])


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_mosaic_decode_of_a_request_is_the_same_to_the_bit_in_any_batch_and_bucket(kv_dtype, num_tokens):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    lens = (700, 3000, 1025, 64, 5000, 0, 20)
    spec, q_lens = spec_of(batch_invariant=True), (num_tokens,) * len(lens)
    case = case_of("paged_decode", "bits", spec=spec, kv_lens=lens, q_lens=q_lens, padding_rows=0)
    q, *pools, page_table, seq_lens = build(case).args
    pools = [pool.astype(kv_dtype) for pool in pools]
    attend = functools.partial(jattn_kernels.paged_decode, spec=case.spec, return_lse=True, implementation="mosaic")
    whole = attend(q, *pools, page_table, seq_lens)
    wider = jnp.pad(page_table, ((0, 0), (0, 100)))
    for rows, table in (
        ([1], page_table),
        ([4, 1], wider),
        ([6, 6, 1, 0, 2, 4, 5, 3], page_table),
        ([*range(7), *(5,) * 57], wider),
    ):
        index = jnp.array(rows, jnp.int32)
        part = attend(q[index], *pools, table[index], seq_lens[index])
        chex.assert_trees_all_equal([x[index] for x in whole], list(part))


@pytest.mark.parametrize("case", KERNEL_SIZED, ids=lambda case: case.name)
def test_mosaic_refuses_nothing_that_it_is_made_for(case):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    (mosaic,) = (entry for entry in implementations() if entry.name == "mosaic")
    options = build(case).kwargs.keys() - {"spec"}
    call = AttentionCall(
        operation=case.operation,
        spec=case.spec,
        q_dtype=case.dtype,
        kv_dtype=case.kv_dtype or case.dtype,
        page_size=None if case.operation == "ragged_extend" else case.page_size,
        features=frozenset(options),
    )
    assert mosaic.refuses(call) is None
