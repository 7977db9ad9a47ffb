"""All surfaces say the same of the same random batches, which is what the oracle says, and write the same rows."""

import itertools

import numpy as np
import pytest

from tests.jattn.surface_batches import Case, make_batch
from tests.jattn.surfaces import surfaces_of

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
