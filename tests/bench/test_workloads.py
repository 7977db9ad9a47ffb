"""The workloads' bytes and FLOPs are those of the peers' files, and their arrays are what they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.comparison import FLASHINFER, TORCH_STEP
from bench.named_workloads import ACCURACY, DECODE, DECODE_FEATURES, EXTEND, EXTEND_FEATURES, LATENT, STEPS
from bench.record_files import read_rows
from bench.workloads import AttentionWorkload, random_normal, random_page_table

TINY = AttentionWorkload(batch=3, ctx=21, hq=4, hkv=2, d=16, page=8)
# Over fp8 pages the record has rows of 32 query heads only.
FLASHINFER_ROWS = [row for row in read_rows(FLASHINFER) if row.get("kv") != "fp8_e4m3" or row["hq"] == 32]


def workload_of(row, table):
    """The workload whose row bears the same names."""
    names = [name for name in ("batch", "ctx", "q", "kv", "hq", "hkv", "d", "page") if name in row]
    same = [w for w in table if "layout" not in w.fields() and all(w.fields()[name] == row[name] for name in names)]
    (found,) = same
    return found


@pytest.mark.parametrize("row", [row for row in FLASHINFER_ROWS if row["case"] == "decode"])
def test_decode_counts_bytes_as_the_peers_do(row):
    workload = workload_of(row, DECODE)
    assert sum(workload.kv_lens) == row["tokens"]
    assert workload.fields()["kv_MB"] == pytest.approx(row["kv_MB"], rel=1e-5)
    assert workload.rate(row["time_us"])["GBps"] == pytest.approx(row["GBps"], rel=1e-4)


@pytest.mark.parametrize("row", [row for row in FLASHINFER_ROWS if row["case"] == "prefill"])
def test_prefill_counts_flops_as_the_peers_do(row):
    workload = workload_of(row, EXTEND)
    assert workload.rate(row["time_us"])["TFLOPs"] == pytest.approx(row["TFLOPs"], rel=1e-4)


@pytest.mark.parametrize("row", [row for row in FLASHINFER_ROWS if row["case"] == "mla_decode"])
def test_latent_decode_counts_bytes_and_flops_as_the_peers_do(row):
    rates = workload_of(row, [w for w in LATENT if not {"q", "kv_dtype"} & {*w.fields()}]).rate(row["time_us"])
    assert [rates[name] for name in ("GBps", "TFLOPs")] == pytest.approx([row["GBps"], row["TFLOPs"]], rel=1e-3)


@pytest.mark.parametrize("row", read_rows(TORCH_STEP))
def test_step_has_the_peers_roofline(row):
    (workload,) = (w for w in STEPS if (w.batch, w.ctx) == (row["batch"], row["ctx"]))
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    weight_bytes = 2 * (32 * layer + 4096 + 4096 * 128256)
    roofline = workload.roofline_ms(weight_bytes=weight_bytes, kv_bytes_per_token=2 * 2 * 32 * 8 * 128)
    assert roofline == pytest.approx(row["roofline_ms"], abs=0.006)


def test_names_are_unique():
    for table in ((*DECODE, *DECODE_FEATURES, *EXTEND, *EXTEND_FEATURES, *LATENT, *STEPS), ACCURACY):
        names = [workload.name for workload in table]
        assert len(set(names)) == len(names)


def test_a_window_hides_keys_and_a_token_more_reads_none():
    plain = AttentionWorkload(batch=32, ctx=4096)
    windowed = AttentionWorkload(batch=32, ctx=32768, window=4095)
    assert windowed.kv_bytes == plain.kv_bytes
    assert windowed.flops == plain.flops
    verify = AttentionWorkload(batch=32, ctx=4096, verify=4)
    assert verify.kv_bytes == plain.kv_bytes
    assert verify.flops == plain.flops // 4096 * (4 * 4096 - 6)
    assert windowed.fields().items() >= {"case": "decode", "window": 4095}.items()
    assert verify.fields()["q_tokens"] == 4
    assert "q_tokens" not in plain.fields()


@pytest.mark.parametrize("change", [{"verify": 3}, {"window": 4}, {"chunk": 8}, {"rope": True}])
def test_features_change_what_a_call_gives(change):
    plain = dataclasses.replace(TINY, batch=2, ctx=20, **({"verify": 3} if "verify" in change else {}))
    arrays = dataclasses.replace(plain, **change).arrays(1, "xla")
    out = dataclasses.replace(plain, **change).call(arrays, jnp.int32(0), "xla")
    assert out.shape == arrays.q.shape
    if "verify" not in change:
        assert not jnp.array_equal(out, plain.call(arrays, jnp.int32(0), "xla"))


def test_chunks_and_windows_hide_pairs_of_a_prefill():
    chunks = AttentionWorkload(batch=1, ctx=131072, q_tokens=131072, chunk=8192)
    assert chunks.flops == AttentionWorkload(batch=16, ctx=8192, q_tokens=8192).flops
    tiny = AttentionWorkload(batch=1, ctx=5, q_tokens=5, window=1, d=1, hq=1)
    assert tiny.flops == 4 * (1 + 2 + 2 + 2 + 2)


def test_invariant_rows_are_of_such_calls():
    rows = [w for w in (*DECODE_FEATURES, *EXTEND_FEATURES) if w.invariant]
    assert {w.case for w in rows} == {"decode", "prefill"}
    assert all(w.spec.batch_invariant and w.fields()["batch_invariant"] for w in rows)
    assert not TINY.spec.batch_invariant


def test_a_mixed_batch_is_the_work_of_both_launches():
    mixed, decodes, prompts = (w for w in EXTEND_FEATURES if w.batch in ("mixed", 60, 4))
    assert mixed.flops == decodes.flops + prompts.flops
    assert mixed.kv_bytes == decodes.kv_bytes + prompts.kv_bytes
    arrays = jax.eval_shape(lambda: mixed.arrays(1, "xla"))
    assert arrays.q.shape == (60 + 4 * 2048, 32, 128)
    assert arrays.cu_q_lens.shape == (65,)


def test_two_passes_are_one_over_the_pages_before_and_one_over_rows():
    plain = dataclasses.replace(TINY, batch=2, ctx=20, q_tokens=5)
    workload = dataclasses.replace(plain, two_passes=True)
    arrays = workload.arrays(1, "xla")
    assert arrays.seq_lens.tolist() == [15, 15]
    page, of_sequence = arrays.k_pages.shape[2], arrays.page_table.shape[1]
    for pages, rows in zip((arrays.k_pages, arrays.v_pages), arrays.rows, strict=True):
        assert rows.shape == (10, *pages.shape[3:])
    # The rows, written where one pass reads them.
    place = arrays.page_table[:, jnp.arange(15, 20) // page], jnp.arange(15, 20) % page
    assert of_sequence * page >= 20
    pools = [
        pages.at[0, place[0], place[1]].set(rows.reshape(2, 5, *rows.shape[1:]))
        for pages, rows in zip((arrays.k_pages, arrays.v_pages), arrays.rows, strict=True)
    ]
    whole = arrays._replace(k_pages=pools[0], v_pages=pools[1], seq_lens=jnp.array([20, 20]), rows=None)
    once = plain.call(whole, jnp.int32(0), "xla").astype(jnp.float32)
    twice = workload.call(arrays, jnp.int32(0), "xla").astype(jnp.float32)
    assert jnp.allclose(once, twice, atol=0.02)
    assert workload.flops == plain.flops


def test_ragged_lens_are_their_own():
    (workload,) = (w for w in DECODE if w.batch == "ragged64" and w.hq == 32 and w.kv == "bf16")
    assert len(workload.kv_lens) == 64
    assert min(workload.kv_lens) >= 128
    assert max(workload.kv_lens) <= 32768


@pytest.mark.parametrize(
    ("change", "q_shape", "page_shape"),
    [
        ({}, (3, 1, 4, 16), (8, 2, 16)),
        ({"layout": "HND"}, (3, 1, 4, 16), (2, 8, 16)),
        ({"q_tokens": 5}, (15, 4, 16), (8, 2, 16)),
        ({"kv": "fp8_e4m3"}, (3, 1, 4, 16), (8, 2, 16)),
        ({"kv": "fp8_e4m3", "q": "fp8_e4m3", "q_tokens": 5}, (15, 4, 16), (8, 2, 16)),
        ({"verify": 4, "window": 7, "rope": True}, (3, 4, 4, 16), (8, 2, 16)),
    ],
)
def test_arrays_have_the_shapes_of_a_call(change, q_shape, page_shape):
    arrays = dataclasses.replace(TINY, **change).arrays(2, "xla")
    assert arrays.q.shape == q_shape
    assert arrays.q.dtype == (jnp.float8_e4m3fn if "q" in change else jnp.bfloat16)
    assert arrays.k_pages.shape == arrays.v_pages.shape == (2, 10, *page_shape)
    assert arrays.k_pages.dtype == (jnp.float8_e4m3fn if "kv" in change else jnp.bfloat16)
    num_tokens = change.get("q_tokens", change.get("verify", 1))
    assert arrays.cu_q_lens.tolist() == [i * num_tokens for i in range(4)]
    assert float(jnp.std(arrays.k_pages.astype(jnp.float32))) == pytest.approx(1, abs=0.1)
    assert not jnp.array_equal(arrays.k_pages[0], arrays.k_pages[1])


def test_page_table_gives_every_page_once_in_random_order():
    table, num_pages = random_page_table((21, 8, 1), 8)
    assert num_pages == 6
    assert sorted(table[table > 0]) == [1, 2, 3, 4, 5]
    assert (table > 0).sum(axis=1).tolist() == [3, 1, 1]
    long, _ = random_page_table((8000,), 8)
    assert not np.array_equal(long[0], np.sort(long[0]))


@pytest.mark.parametrize("shape", [(64, 64), (4, 32, 32)])
def test_random_normal_has_its_size(shape):
    made = random_normal(jax.random.key(0), shape, "bfloat16", 0.02)
    assert made.shape == shape
    assert float(jnp.std(made.astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
