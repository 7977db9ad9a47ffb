"""All surfaces say the same of the same random batches, which is what the oracle says, and write the same rows."""

import itertools

import numpy as np
import pytest

from tests.jattn.harness.common_batches import Case, make_batch
from tests.jattn.harness.compile_log import compilations
from tests.jattn.harness.every_surface import SURFACES, surfaces_of
from tests.often import often_together, slow

# Float32 sums of up to 160 terms in another order, of numbers of size about 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
BATCHES = 3
CASES = (
    Case(mode="decode"),
    Case(mode="draft_decode", page_size=1, kv_cache_dtype="fp8_e4m3"),
    Case(mode="idle", page_size=1),
    Case(mode="verify", page_size=16, chunk_size=16),
    Case(mode="verify", page_size=64, page_layout="HND", kv_cache_dtype="fp8_e5m2"),
    Case(mode="extend", page_size=64, page_layout="HND"),
    Case(mode="extend", page_size=64, cross=True, logits_soft_cap=2.0),
    Case(mode="draft_extend", page_size=1, logits_soft_cap=2.0),
    Case(mode="mixed", page_size=16, window_left=5, logits_soft_cap=2.0),
)
# What is theirs is in the cases above, though not together.
SLOW = (
    Case(mode="decode", page_size=1, page_layout="HND", window_left=5, logits_soft_cap=2.0),
    Case(mode="decode", page_size=1, cross=True),
    Case(mode="draft_decode", page_size=16, window_left=9),
    Case(mode="extend", page_size=16, kv_cache_dtype="fp8_e4m3"),
    Case(mode="decode", page_size=64, kv_cache_dtype="fp8_e4m3"),
    Case(mode="mixed", page_size=16, chunk_size=32, page_layout="HND"),
    Case(mode="decode", page_size=16, chunk_size=32),
    Case(mode="decode", page_size=16, cross=True, kv_cache_dtype="fp8_e4m3"),
    Case(mode="draft_decode", page_size=64, chunk_size=64),
    Case(mode="idle", page_size=16, chunk_size=32),
    Case(mode="idle", page_size=64, cross=True),
    Case(mode="verify", page_size=16, window_left=0),
    Case(mode="verify", page_size=16, cross=True),
    Case(mode="extend", page_size=1, window_left=9),
    Case(mode="extend", page_size=64, chunk_size=64),
    Case(mode="mixed", page_size=16, cross=True),
    Case(mode="mixed", page_size=64, window_left=70, kv_cache_dtype="fp8_e5m2"),
    Case(mode="verify", page_size=1),
    Case(mode="extend", page_size=1, kv_cache_dtype="fp8_e5m2"),
    Case(mode="extend", page_size=1, cross=True),
    Case(mode="draft_extend", page_size=16, chunk_size=32),
    Case(mode="mixed", page_size=1),
)


@pytest.mark.parametrize("case", [*CASES, *(slow(case) for case in SLOW)], ids=lambda case: case.name)
def test_surfaces_agree_with_the_oracle_and_with_each_other(case, monkeypatch):
    surfaces = surfaces_of(case, monkeypatch)
    for seed in range(BATCHES):
        batch = make_batch(case, seed)
        said = {name: surface.check(batch) for name, surface in surfaces.items()}
        for name, out in said.items():
            np.testing.assert_allclose(out, batch.out, **CLOSE, err_msg=name)
        for one, other in itertools.combinations(said, 2):
            np.testing.assert_allclose(said[one], said[other], **CLOSE, err_msg=f"{one} and {other}")


# Each surface, each mode at least twice.
MODES = ("extend", "decode", "verify")
STEPS = list(itertools.product(SURFACES, MODES))


@pytest.mark.parametrize(
    ("name", "mode"), often_together(STEPS, [*zip(SURFACES, itertools.cycle(MODES)), (list(SURFACES)[-1], "extend")])
)
def test_whole_step_of_a_surface_does_not_copy_the_donated_pool(name, mode, monkeypatch):
    case = Case(mode=mode, page_size=16)
    pool_bytes, memory = surfaces_of(case, monkeypatch)[name].memory(make_batch(case, 0), num_pages=2048)
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(mode="decode"), ("flashinfer", "vllm_v0", "vllm_v1")),
        (Case(mode="extend", page_size=64, page_layout="HND"), ("sglang", "pymllm")),
        (Case(mode="draft_extend", page_size=1, logits_soft_cap=2.0), ("sglang",)),
        (Case(mode="mixed", window_left=5, logits_soft_cap=2.0), ("sglang", "flashinfer", "vllm_v0", "vllm_v1")),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_surfaces_replay_60_random_batches_without_compiling(case, names, monkeypatch):
    """Each takes the pool that the batch before has left, but for every 15th, whose answers are the oracle's.

    The cases are some of those above, so that nothing is compiled for this test alone.
    The other modes of SGLang and pymllm, which they capture, are in test_flash_attention_capture and
    test_flashinfer_replay.
    """
    of_case = surfaces_of(case, monkeypatch)
    batches = [make_batch(case, seed) for seed in range(60)]
    for name in names:
        surface, pool, answers = of_case[name], None, []
        surface.check(batches[0])
        with compilations() as compiled:
            for number, batch in enumerate(batches):
                out, pool = surface.run(batch, pool if number % 15 else None)
                answers.append(out)
        assert not compiled
        for batch, out in zip(batches[::15], answers[::15], strict=True):
            np.testing.assert_allclose(out[surface.places(batch)], batch.out, **CLOSE, err_msg=name)
