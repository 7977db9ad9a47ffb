"""A layout is brought into its canonical form once, and into the one that JAX finds."""

import functools
import importlib
from typing import Any

import jax
import pytest
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import layouts

import jattn_kernels
from jattn_kernels.call import Device
from jattn_kernels.mosaic import kept_layouts
from tests.kernels.harness.case_table import build
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED

NOT_CANONICAL = fa.TiledLayout(
    fa.Tiling(((64, 8), (16, 8), (8, 8), (1, 2))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
    _check_canonical=False,
)


def test_it_is_the_layout_that_jax_finds():
    for layout in (fa.WGMMA_LAYOUT, fa.WGMMA_ROW_LAYOUT, NOT_CANONICAL):
        assert kept_layouts.canonicalize(layout) == kept_layouts._canonical(layout)
    assert kept_layouts.canonicalize(NOT_CANONICAL) == fa.WGMMA_LAYOUT


@pytest.mark.parametrize(
    "case", [case for case in KERNEL_SIZED if case.operation == "paged_decode"][:1], ids=lambda case: case.name
)
def test_a_kernel_asks_for_few(monkeypatch, case):
    importlib.import_module("jattn_kernels.mosaic.entry")
    assert fa.TiledLayout.canonicalize is kept_layouts.canonicalize
    assert layouts.from_layout_attr is kept_layouts.from_attribute
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    args, kwargs = build(case)
    attend = functools.partial(getattr(jattn_kernels, case.operation), spec=kwargs.pop("spec"), implementation="mosaic")
    read: dict[str, Any] = {}

    def noted(attribute):
        layout = from_attribute(attribute)
        assert read.setdefault(str(attribute), layout) is layout  # else it is read twice
        return layout

    from_attribute = kept_layouts._from_attribute
    monkeypatch.setattr(kept_layouts, "_from_attribute", noted)
    monkeypatch.setattr(kept_layouts, "_by_text", {})
    kept_layouts.canonicalize.cache_clear()
    jax.clear_caches()
    jax.jit(attend).trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    asked = kept_layouts.canonicalize.cache_info()
    assert asked.misses < 30 < asked.hits
    assert 1 < len(read) < 30
    assert kept_layouts._by_text == read
