"""All surfaces say the same of the same random batches, which is what the oracle says, and write the same rows."""

import itertools

import numpy as np
import pytest

from tests.jattn.listening import compilations
from tests.jattn.surface_batches import Case, make_batch
from tests.jattn.surfaces import SURFACES, surfaces_of

# Float32 sums of up to 160 terms in another order, of numbers of size about 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
BATCHES = 3
CASES = (
    Case(mode="decode"),
    Case(mode="decode", page_size=1, page_layout="HND", window_left=5, logits_soft_cap=2.0),
    Case(mode="decode", page_size=16, chunk_size=32),
    Case(mode="decode", page_size=64, kv_cache_dtype="fp8_e4m3"),
    Case(mode="verify", page_size=16, window_left=0),
    Case(mode="extend", page_size=64, page_layout="HND"),
    Case(mode="extend", page_size=1, window_left=9),
    Case(mode="extend", page_size=64, chunk_size=64),
    Case(mode="extend", page_size=16, kv_cache_dtype="fp8_e4m3"),
    Case(mode="mixed", page_size=16, window_left=5, logits_soft_cap=2.0),
    Case(mode="mixed", page_size=16, chunk_size=32, page_layout="HND"),
    Case(mode="mixed", page_size=64, window_left=70, kv_cache_dtype="fp8_e5m2"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_surfaces_agree_with_the_oracle_and_with_each_other(case, monkeypatch):
    surfaces = surfaces_of(case, monkeypatch)
    for seed in range(BATCHES):
        batch = make_batch(case, seed)
        said = {name: surface.check(batch) for name, surface in surfaces.items()}
        for name, out in said.items():
            np.testing.assert_allclose(out, batch.out, **CLOSE, err_msg=name)
        for one, other in itertools.combinations(said, 2):
            np.testing.assert_allclose(said[one], said[other], **CLOSE, err_msg=f"{one} and {other}")
    assert {surface.step._cache_size() for surface in surfaces.values()} == {1}


@pytest.mark.parametrize("name", SURFACES)
def test_whole_step_of_a_surface_does_not_copy_the_donated_pool(name, monkeypatch):
    case = Case(mode="mixed", page_size=16)
    pool_bytes, memory = surfaces_of(case, monkeypatch)[name].memory(make_batch(case, 0), num_pages=8192)
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8


def test_vllm_replays_500_random_batches_without_compiling(monkeypatch):
    case = Case(mode="mixed", page_size=16, window_left=40)
    surfaces = [surfaces_of(case, monkeypatch)[name] for name in ("vllm_v0", "vllm_v1")]
    batches = [make_batch(case, seed) for seed in range(500)]
    for surface in surfaces:
        surface.check(batches[0])
    with compilations() as compiled:
        answers = [[surface.run(batch)[0] for surface in surfaces] for batch in batches]
    assert not compiled
    for batch, answer in zip(batches, answers, strict=True):
        for surface, out in zip(surfaces, answer, strict=True):
            np.testing.assert_allclose(out[surface.places(batch)], batch.out, **CLOSE)
