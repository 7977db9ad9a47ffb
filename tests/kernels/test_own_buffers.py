"""What kernels read as it is has a barrier before it on a GPU, where XLA would hand over views."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jattn_kernels
from jattn_kernels import attention, rotary
from jattn_kernels.call import Device
from jattn_kernels.own_buffers import own_buffers
from tests.kernels.cases import build
from tests.kernels.kernel_cases import case_of

HOPPER = Device("gpu", (9, 0))
GIVEN = {"kv_dtype": "float8_e4m3fn", "kv_scale": "rows", "num_layers": 2, "layer_index": 1, "alibi": True}


def barriers(jaxpr):
    """The arguments that are read by barriers alone, and how many barriers there are."""

    def readers(var):
        return {eqn.primitive.name for eqn in jaxpr.eqns if var in eqn.invars}

    places = [place for place, var in enumerate(jaxpr.invars) if readers(var) == {"optimization_barrier"}]
    return places, sum(eqn.primitive.name == "optimization_barrier" for eqn in jaxpr.eqns)


def test_barriers_are_of_gpus_and_of_arrays():
    x, y = jnp.arange(3), jnp.arange(4)
    assert own_buffers((x, None), Device("cpu"))[0] is x
    jaxpr = jax.make_jaxpr(lambda x, y: own_buffers((x, None, y), HOPPER))(x, y).jaxpr
    assert barriers(jaxpr) == ([0, 1], 2)


@pytest.mark.parametrize(
    ("operation", "places", "count"),
    [
        ("paged_decode", [0, 3], 4),  # q, page_table; slopes, and a layer's row of v_scale
        ("paged_extend", [0, 3, 4], 5),  # seq_lens too
        ("ragged_extend", [0, 1, 2, 4], 6),  # q, k, v, cu_kv_lens
    ],
)
def test_what_kernels_read_is_behind_a_barrier(monkeypatch, operation, places, count):
    monkeypatch.setattr(attention, "default_device", lambda: HOPPER)
    args, kwargs = build(case_of(operation, "all", **GIVEN))
    attend = functools.partial(getattr(jattn_kernels, operation), implementation="mosaic", **kwargs)
    assert barriers(jax.make_jaxpr(attend)(*args).jaxpr) == (places, count)


def test_what_the_rotary_write_reads_is_behind_a_barrier(monkeypatch):
    monkeypatch.setattr(rotary, "default_device", lambda: HOPPER)
    qkv, angles, pages = jnp.ones((3, 12, 64)), jnp.ones((3, 32)), jnp.ones((4, 8, 4, 64))
    write = functools.partial(jattn_kernels.rotate_and_write, num_kv_heads=4, implementation="mosaic")
    arrays = [x.astype(jnp.bfloat16) for x in (qkv, pages)]
    jaxpr = jax.make_jaxpr(write)(arrays[0], angles, angles, arrays[1], arrays[1], jnp.arange(3, dtype=jnp.int32))
    assert barriers(jaxpr.jaxpr) == ([0, 1, 2, 5], 4)


def test_the_portable_implementation_has_none_on_a_cpu():
    args, kwargs = build(case_of("paged_decode", "all", **GIVEN))
    attend = functools.partial(jattn_kernels.paged_decode, **kwargs)
    assert barriers(jax.make_jaxpr(attend)(*args).jaxpr) == ([], 0)
