"""Checkpoints in int4 with a scale for each group of inputs: held as stored, whoever wrote them, or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jattn.matmul import QuantizedKernel, dequantize_groups
from jattn.model import load_model, model_class, model_without_weights
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_models.quantization import GroupScales
from jattn_models.quantization_config import read_quantization
from tests.models.harness import in_fp8
from tests.models.harness.goldens import (
    GOLDEN,
    OTHER_CASES,
    WRAPPED_CASES,
    DenseBackend,
    prompts,
    sequence,
    shares,
)
from tests.models.harness.in_int4 import AWQ, GPTQ, KINDS, compressed_tensors, copies, is_projection
from tests.often import slow


def leaves(checkpoint, *, parallel=ONE_DEVICE, rank=0):
    """A model's leaves, kernels in int4 as what they stand for; and the dtype of the scales of those."""
    of = model_class(checkpoint.architecture)
    model = of.from_checkpoint(checkpoint, dtype=jnp.float32, parallel=parallel, rank=rank)
    found = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}
    scaled = {path[:-1]: leaf for path, leaf in found.items() if path[-1] == "scales"}
    for path, scales in scaled.items():
        kernel = found[*path, "kernel"]
        assert kernel.dtype == jnp.int4
        del found[*path, "scales"]
        kernel = QuantizedKernel(values=kernel, scales=scales, zero_points=found.pop((*path, "zero_points"), None))
        kernel = dataclasses.replace(kernel, interleaved=kernel.may_be_interleaved)
        found[*path, "kernel"] = jnp.swapaxes(dequantize_groups(kernel, jnp.float32), -1, -2)
    return {path: np.asarray(leaf) for path, leaf in found.items()}, {p: str(x.dtype) for p, x in scaled.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(found[path], leaf, err_msg=str(path))


OFTEN = ("awq", "compressed_zero_points", "compressed_channel")  # the last one's are interleaved


@pytest.mark.parametrize("kind", [kind if kind in OFTEN else slow(kind) for kind in KINDS])
def test_every_writers_weights_are_held_as_they_are_stored(tmp_path, kind):
    in_int4, in_float32 = copies(GOLDEN / "gqa", tmp_path, kind)
    found, scales = leaves(in_int4)
    assert list(scales.values()) == ["bfloat16" if kind.startswith("compressed") else "float16"] * 4
    assert_same(found, leaves(in_float32)[0])


SLOW_SHARES = [
    ("gqa", "gptq_channel", 4, 1),
    ("deepseek_v3", "awq", 7, 1),
    ("phi3", "awq", 3, 0),
    ("phi3", "gptq", 3, 0),
    ("glm4", "gptq", 3, 1),
    ("glm4", "gptq_v2", 3, 0),
    ("glm4", "compressed", 3, 1),
]


# Groups that two devices share, too small ones among them, and words; parts of heads beside experts; fused tensors;
# heads that turn in pairs.
@pytest.mark.parametrize(
    ("case", "kind", "in_few_bits", "rank"),
    [
        ("gqa", "compressed_zero_points", 4, 1),
        *(slow(*case) for case in SLOW_SHARES),
    ],
)
def test_share_in_int4_is_that_of_what_it_stands_for(tmp_path, case, kind, in_few_bits, rank):
    in_int4, in_float32 = copies(GOLDEN / case, tmp_path, kind)
    share = {"parallel": Parallel("tensor", 2), "rank": rank}
    found, scales = leaves(in_int4, **share)
    assert len(scales) == in_few_bits
    assert_same(found, leaves(in_float32, **share)[0])


def test_projections_that_are_not_all_stored_alike_are_held_as_what_they_stand_for(tmp_path):
    """As where `modules_to_not_convert` or `ignore` name some."""

    def chosen(name, tensor):
        return is_projection(name, tensor) and "layers.0.mlp" not in name and "layers.1.self_attn.k" not in name

    in_int4, in_float32 = copies(GOLDEN / "gqa", tmp_path, "gptq", chosen=chosen)
    found, scales = leaves(in_int4)
    assert len(scales) == 1
    assert_same(found, leaves(in_float32)[0])


def test_projection_to_logits_may_be_in_int4(tmp_path):
    in_int4, in_float32 = copies(GOLDEN / "gqa", tmp_path, "awq", chosen=lambda name, tensor: name == "lm_head.weight")
    found, scales = leaves(in_int4)
    assert list(scales) == [("vocabulary", "lm_head")]
    assert_same(found, leaves(in_float32)[0])


def test_scales_of_several_dtypes_are_held_in_float32(tmp_path):
    dtypes = iter([np.float32, ml_dtypes.bfloat16] * 50)

    def changed(tensors):
        return tensors | {"scales": tensors["scales"].astype(next(dtypes))}

    in_int4, _ = copies(GOLDEN / "gqa", tmp_path, "awq", changed=changed)
    assert set(leaves(in_int4)[1].values()) == {"float32"}


def test_biases_of_zeros_that_the_model_has_no_place_for_are_left(tmp_path):
    def biased(value):
        return lambda tensors: tensors | {"bias": np.full(tensors["qweight"].shape[1], value, np.float16)}

    (tmp_path / "zeros").mkdir()
    in_int4, in_float32 = copies(GOLDEN / "gqa", tmp_path / "zeros", "gptq", changed=biased(0))
    assert_same(leaves(in_int4)[0], leaves(in_float32)[0])
    in_int4, _ = copies(GOLDEN / "gqa", tmp_path, "gptq", changed=biased(1))
    with pytest.raises(ValueError, match=r"must hold only tensors .* such as '.*.bias'"):
        load_model(in_int4, dtype=jnp.float32)


def without(end):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != end}


def with_tensor(end, change):
    return lambda tensors: tensors | {end: change(tensors[end])}


@pytest.mark.parametrize(
    ("kind", "changed", "announced", "message"),
    [
        ("gptq", with_tensor("g_idx", lambda x: np.ascontiguousarray(x[::-1])), None, "g_idx' must have each input in"),
        ("gptq", None, GPTQ | {"sym": True}, "qzeros' must have no zero points but the middle, 8, .* Got others"),
        (
            "compressed",
            with_tensor("weight_shape", lambda x: x[::-1].copy()),
            None,
            r"weight_shape' must be \[.*Got \[",
        ),
        ("compressed", with_tensor("weight_packed", lambda x: x.view(np.uint32)), None, "must be of int32. Got uint32"),
        (
            "awq",
            with_tensor("scales", lambda x: x.astype(np.int32)),
            None,
            "scales' must be one of float32, .* Got int32",
        ),
        ("awq", without("qzeros"), None, r"must hold the tensor '.*.qzeros', which is missing"),
        ("awq", None, AWQ | {"group_size": 32}, r"must have shape \[.*\]. Got \["),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, kind, changed, announced, message):
    changes = {} if changed is None else {"changed": changed}
    in_int4, _ = copies(GOLDEN / "gqa", tmp_path, kind, announced=announced, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(in_int4, dtype=jnp.float32)


def logits(graph, state, tokens):
    model = nnx.merge(graph, state)
    hidden, _ = model(sequence(jnp.asarray(tokens)), None, DenseBackend(), None)
    return model.compute_logits(hidden)


FAMILIES = [slow(case, "awq", 1) for case in (*OTHER_CASES, *WRAPPED_CASES)]


@pytest.mark.parametrize(
    ("case", "kind", "size"),
    [("gqa", "awq", 2), slow("gqa", "gptq_channel", 1), *FAMILIES],
)
def test_logits_are_those_of_weights_that_stand_for_themselves(tmp_path, case, kind, size):
    """Products are of the same numbers, summed in another order."""
    found = []
    for checkpoint in copies(GOLDEN / case, tmp_path, kind):
        graph, states = shares(checkpoint, size)
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *states)
        of_share = functools.partial(logits, graph, tokens=prompts(case)[2])
        found.append(jax.jit(jax.vmap(of_share, axis_name="tensor"))(stacked))
    assert np.linalg.norm(found[0] - found[1]) < 1e-5 * np.linalg.norm(found[1])


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, GroupScales("awq", 64)),
        (GPTQ | {"desc_act": True, "static_groups": True}, GroupScales("gptq", 16)),
        (GPTQ | {"sym": True, "dynamic": {}, "lm_head": False}, GroupScales("gptq", 16, symmetric=True)),
        (GPTQ | {"format": "gptq_v2", "group_size": -1}, GroupScales("gptq_v2", None)),
        (compressed_tensors(actorder="weight"), GroupScales("compressed-tensors", 16, symmetric=True)),
        (compressed_tensors(group_size=None, symmetric=False), GroupScales("compressed-tensors", None)),
    ],
)
def test_announcements_are_read(announced, expected):
    assert read_quantization({"quantization_config": announced}) == expected


def of_group(**changes):
    announced = compressed_tensors()
    announced["config_groups"]["group_0"] |= changes
    return announced


@pytest.mark.parametrize(
    ("announced", "got"),
    [
        (AWQ | {"bits": 8}, "bits=8"),
        (AWQ | {"version": "GEMV"}, "version='gemv'"),
        (AWQ | {"group_size": 0}, "group_size=0"),
        ({"quant_method": "awq", "bits": 4}, "group_size=None"),
        (GPTQ | {"bits": 3}, "bits=3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "dynamic={"),
        (GPTQ | {"rotation": "hadamard"}, "rotation='hadamard'"),
        (compressed_tensors(num_bits=8), "config_groups.group_0.weights.num_bits=8"),
        (compressed_tensors(strategy="tensor"), "config_groups.group_0.weights.strategy='tensor'"),
        (compressed_tensors(group_size="16"), "config_groups.group_0.weights.group_size='16'"),
        (of_group(input_activations={"num_bits": 8}), "config_groups.group_0.input_activations={'num_bits': 8}"),
        (of_group(format="float-quantized"), "config_groups.group_0.format='float-quantized'"),
        (compressed_tensors() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8}"),
    ],
)
def test_other_announcements_are_refused_by_what_would_work(announced, got):
    with pytest.raises(NotImplementedError, match=rf"`quantization_config` must be absent, or .* Got {got}"):
        read_quantization({"quantization_config": announced})


@pytest.mark.parametrize(
    ("announced", "got"),
    [
        (GPTQ | {"desc_act": True}, "desc_act=True"),
        (compressed_tensors(actorder="group"), "config_groups.group_0.weights.actorder='group'"),
        (compressed_tensors(actorder=True), "config_groups.group_0.weights.actorder=True"),
    ],
)
def test_act_order_is_refused_by_name(announced, got):
    with pytest.raises(
        NotImplementedError, match=rf"act-order .* is not built. Quantise with desc_act=false, .* {got}"
    ):
        read_quantization({"quantization_config": announced})


def test_what_is_stored_in_int4_may_be_asked_for_in_int4_alone(tmp_path):
    (tmp_path / "fp8").mkdir()
    in_int4, _ = copies(GOLDEN / "gqa", tmp_path, "awq")
    asked = model_without_weights(in_int4.quantized("int4"), dtype=jnp.float32)
    assert asked is not None
    assert asked.layers[0].mlp.down_proj.kernel.get_value().dtype == jnp.int4
    in_eight, _ = in_fp8.copies(GOLDEN / "gqa", tmp_path / "fp8")
    for checkpoint, other, held in ((in_int4, "fp8", "int4"), (in_eight, "int4", "fp8")):
        with pytest.raises(NotImplementedError, match=rf"must be None or '{held}' for .* Got '{other}'"):
            model_without_weights(checkpoint.quantized(other), dtype=jnp.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_gpu_holds_is_what_is_stored(tmp_path, kind):
    """Numbers of half a byte are unpacked, laid in place, reordered and copied there."""
    in_int4, in_float32 = copies(GOLDEN / "glm4", tmp_path, kind)
    found, scales = leaves(in_int4)
    assert len(scales) == 4
    assert_same(found, leaves(in_float32)[0])
