"""Pages before a window may be page 0 in the table, and hold NaN: the answer is the same to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn_kernels
from jattn.page_lists import AttentionSpan
from jattn_kernels import AttentionSpec
from jattn_kernels.call import Device
from jattn_kernels.mosaic.sm90.decode import split_kv
from tests.kernels.harness.case_table import Case, assert_close, build
from tests.kernels.harness.extend_calls import interpreted_in_few_blocks
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.triton_interpreter import interpreted as triton_interpreted
from tests.often import often

FACTS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
SPANS = {"window": {"window_left": 37}, "own_key": {"window_left": 0}, "chunk": {"chunk_size": 64}}
CASES = [
    Case(
        name=f"{operation}_{name}_{'_'.join(map(str, q_lens))}",
        operation=operation,
        spec=AttentionSpec(**FACTS, **span),
        q_lens=q_lens,
        kv_lens=(200, 17, 131),
        page_size=16,
        dtype="bfloat16",
        sinks=name == "window",
    )
    for operation, q_lens in (("paged_decode", (1, 1, 1)), ("paged_decode", (3, 3, 3)), ("paged_extend", (20, 17, 1)))
    for name, span in SPANS.items()
]


# Each operation of each implementation, and each rule of most.
OFTEN = {
    "xla": ("paged_decode_window_1_1_1", "paged_decode_chunk_3_3_3", "paged_extend_own_key_20_17_1"),
    "triton": ("paged_decode_own_key_1_1_1", "paged_extend_window_20_17_1", "paged_extend_chunk_20_17_1"),
    "mosaic": ("paged_decode_chunk_3_3_3", "paged_extend_own_key_20_17_1"),
}


def cases_of(kernels):
    """All, those that are not among its frequent ones in the slow tests alone."""
    return pytest.mark.parametrize(
        "case", often(CASES, [case for case in CASES if case.name in OFTEN[kernels]]), ids=lambda case: case.name
    )


def without_unseen(case, inputs):
    """The same call, where pages that no query sees hold NaN, and page 0 stands for them in the table."""
    q, k_pages, v_pages, page_table, *rest = inputs.args
    table, span = np.array(page_table), AttentionSpan(case.spec.window_left, case.spec.chunk_size)
    gone = []
    for row, kv_len, q_len in zip(table, case.kv_lens, case.q_lens, strict=True):
        end = max(0, span.first_page(kv_len - q_len, case.page_size))
        gone += row[:end].tolist()
        row[:end] = 0
    assert gone
    gone = np.array(gone)
    pools = (pages.at[gone].set(jnp.nan) for pages in (k_pages, v_pages))
    return inputs._replace(args=(q, *pools, jnp.asarray(table), *rest))


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU with few multiprocessors."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    monkeypatch.setattr(split_kv, "num_sms", lambda: 3)


def assert_same(case, implementation):
    face = functools.partial(
        getattr(jattn_kernels, case.operation), spec=case.spec, return_lse=True, implementation=implementation
    )
    inputs, attended = build(case), jax.jit(face)
    expected = attended(*inputs.args, **inputs.options)
    assert_close(case, inputs, *expected, narrow_products=implementation == "mosaic")
    unseen = without_unseen(case, inputs)
    for found, each in zip(attended(*unseen.args, **unseen.options), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(each, np.float32))


@cases_of("xla")
def test_xla(case):
    assert_same(case, "xla")


@cases_of("triton")
def test_triton(case):
    with triton_interpreted():
        assert_same(case, "triton")


@cases_of("mosaic")
def test_mosaic(hopper, case):
    is_decode = case.operation == "paged_decode"
    with interpreted() if is_decode else interpreted_in_few_blocks():
        assert_same(case, "mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "triton", "mosaic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gpu(case, implementation):
    assert_same(case, implementation)
