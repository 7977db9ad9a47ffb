"""On an NVIDIA GPU, every implementation against the oracle: the table of cases, and cases of kernels' sizes."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import jattn_kernels
from jattn_kernels.call import AttentionCall, default_device
from jattn_kernels.dispatch import implementations
from jattn_kernels.mosaic.sm90 import paged_decode as many_rows
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.prepass import readies_ahead
from tests.kernels.harness.case_table import CASES, assert_close, build
from tests.kernels.harness.chunked_prompt import chunked_prompt, prompt_behind
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED, case_of, spec_of

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
    monkeypatch.setattr(many_rows, "num_sms", lambda: 1)
    monkeypatch.setattr(many_rows, "_MANY_ROWS", 1)
    inputs = build(case)
    batch_size, num_tokens = inputs.args[0].shape[:2]
    assert many_rows.is_for_extend(case.spec, batch_size=batch_size, num_tokens=num_tokens, kv_itemsize=2)
    attend = functools.partial(jattn_kernels.paged_decode, return_lse=True, implementation="mosaic")
    assert_close(case, inputs, *attend(*inputs.args, **inputs.kwargs))


def is_readied(case):
    """Whether it is worth a look both ways, with keys made ready ahead of the kernel and in it."""
    is_small = case.page_size == 8 or case.spec.combined_pool is not None
    return is_small or case.spec.rope_theta is not None or case.name.startswith("paged_extend_fp8")


@pytest.mark.parametrize(
    "case",
    [case for case in KERNEL_SIZED if case.operation == "paged_extend" and is_readied(case)],
    ids=lambda case: case.name,
)
def test_mosaic_extend_readies_keys_the_other_way_too(monkeypatch, case):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    monkeypatch.setattr(extend, "readies_ahead", lambda *facts, **sizes: not readies_ahead(*facts, **sizes))
    inputs = build(case)
    attend = functools.partial(jattn_kernels.paged_extend, return_lse=True, implementation="mosaic")
    assert_close(case, inputs, *attend(*inputs.args, **inputs.kwargs))


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
