"""What calls do under the modes and the transformations of JAX."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jattn_kernels
from jattn_kernels import (
    AttentionSpec,
    mla_decode,
    paged_decode,
    ragged_extend,
    rms_norm,
    shared_prefix_decode,
)
from jattn_kernels.call import AttentionCall, Device, NormCall
from jattn_kernels.dispatch import choose
from tests.kernels.harness.case import build
from tests.kernels.harness.case_table import CASES
from tests.kernels.harness.tolerance import assert_close

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
HOPPER = Device("gpu", (9, 0))
ONE_OF_EACH = [
    next(case for case in CASES if case.operation == operation)
    for operation in sorted({case.operation for case in CASES})
]
OPERATIONS = pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.operation)


def face_of(case):
    return getattr(jattn_kernels, case.operation)


@OPERATIONS
def test_attention_has_no_derivative_and_says_so(case):
    args, kwargs = build(case)

    def summed(q):
        return jnp.sum(jax.jit(lambda q: face_of(case)(q, *args[1:], **kwargs))(q).astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="Attention here has no derivative"):
        jax.grad(summed)(args[0])


@OPERATIONS
def test_xla_serves_a_shard_map_that_tracks_what_varies(case):
    inputs = build(case)
    mesh = Mesh(jax.devices()[:1], ("devices",))
    arrays = {name: value for name, value in inputs.kwargs.items() if hasattr(value, "shape")}
    others = {name: value for name, value in inputs.kwargs.items() if name not in arrays}

    def attend(q, rest, arrays):
        return face_of(case)(q, *rest, **arrays, **others, return_lse=True)

    specs = P("devices"), P(), P()
    out, lse = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("devices"))(
        inputs.args[0], inputs.args[1:], arrays
    )
    assert_close(case, inputs, out, lse)


@OPERATIONS
def test_xla_serves_under_x64(case):
    inputs = build(case)
    with jax.enable_x64(True):
        out, lse = face_of(case)(*inputs.args, **inputs.kwargs, return_lse=True)
    assert_close(case, inputs, out, lse)


@pytest.mark.parametrize(
    ("mode", "sentence"), [("jax_enable_x64", "`jax_enable_x64`"), ("check_vma", "check_vma=False")]
)
def test_mosaic_refuses_the_modes_that_its_kernels_are_not_made_for(mode, sentence):
    facts = {"device": HOPPER, "modes": frozenset({mode})}
    attention = AttentionCall(
        operation="paged_decode", spec=SPEC, q_dtype="bfloat16", kv_dtype="bfloat16", page_size=16, **facts
    )
    norm = NormCall(num_rows=2, columns=1024, dtype="bfloat16", scale_dtype="bfloat16", eps=1e-5, offset=0.0, **facts)
    for call in (attention, norm):
        assert choose(call).implementation.name == "xla"
        assert sentence in choose(call).reason


def test_calls_know_the_modes_that_they_are_traced_in(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: HOPPER)
    x = jnp.ones((2, 1024), jnp.bfloat16)
    mesh = Mesh(jax.devices()[:1], ("devices",))

    def norm(x):
        return rms_norm(x, x[0], eps=1e-5, implementation="mosaic")

    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="`jax_enable_x64`"):
        norm(x)
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        jax.eval_shape(jax.shard_map(norm, mesh=mesh, in_specs=P("devices"), out_specs=P("devices")), x)


def test_faces_show_their_optional_arguments_by_name():
    options = ["layer_index", "q_positions", "custom_mask", "q_scale", "alibi_slopes", "sinks"]
    for face, more in (
        (paged_decode, ["k_scale", "v_scale", "q_start", "kv_start"]),
        (mla_decode, ["q_start", "kv_start", "kv_scale"]),
        (shared_prefix_decode, ["k_scale", "v_scale"]),
    ):
        parameters = inspect.signature(face).parameters
        assert [name for name in parameters if name in options + more] == options + more
        assert all(parameters[name].default is None for name in options + more)


@pytest.mark.parametrize(
    ("face", "option"),
    [
        (paged_decode, "kv_scale"),
        (ragged_extend, "schedule"),
        (mla_decode, "k_scale"),
        (shared_prefix_decode, "q_start"),
    ],
)
def test_faces_take_no_option_of_other_operations(face, option):
    with pytest.raises(TypeError, match=rf"^{face.__name__}\(\) got an unexpected keyword argument '{option}'$"):
        face(spec=SPEC, **{option: 1})
