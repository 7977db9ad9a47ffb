"""Experts in mxfp4 are read as what they stand for, whole and in parts, and give transformers' logits."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jattn.checkpoint import Checkpoint
from jattn.matmul import FP8
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_models.gpt_oss import GptOssForCausalLM
from jattn_models.mxfp4 import packed_names, read_packed
from jattn_models.quantization import Mxfp4
from jattn_models.quantization_config import read_quantization
from tests.models.harness import in_mxfp4
from tests.models.harness.goldens import GOLDEN, assert_golden, dense_logits, golden

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """gpt-oss's golden checkpoint with experts in mxfp4, and with what these stand for."""
    return [Checkpoint(path) for path in in_mxfp4.copies(GOLDEN / "gpt_oss", tmp_path_factory.mktemp("both"))]


def loaded(checkpoint, dtype=jnp.float32, parallel=ONE_DEVICE, rank=0):
    model = GptOssForCausalLM.from_checkpoint(checkpoint, dtype=dtype, parallel=parallel, rank=rank)
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(nnx.state(model))}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype
        np.testing.assert_array_equal(found[path], leaf, err_msg=str(path))


def test_logits_are_those_of_transformers(both):
    model = GptOssForCausalLM.from_checkpoint(both[0], dtype=jnp.float32)
    with np.load(GOLDEN / "gpt_oss" / "golden.npz") as arrays:
        expected = arrays["mxfp4_logits"]
    assert np.abs(expected - golden("gpt_oss")[2]).max() > 1
    assert_golden(dense_logits(model, golden("gpt_oss", "tokens")[2]), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_experts_are_loaded_as_what_they_stand_for(both, dtype):
    assert_same(*(loaded(checkpoint, dtype) for checkpoint in both))


@pytest.mark.parametrize("parallel", [Parallel("tensor", 2), Parallel("tensor", 2, by_expert=True)])
def test_share_is_that_of_what_experts_stand_for(both, parallel):
    """Devices that share hidden units have half a group of inputs each."""
    for rank in range(2):
        assert_same(*(loaded(checkpoint, parallel=parallel, rank=rank) for checkpoint in both))


@pytest.mark.parametrize(
    "piece", [None, (slice(1, 2), slice(20, 70), slice(1, 4)), (slice(0, 2), slice(0, 32), slice(0, 5))]
)
def test_a_piece_is_read_with_its_groups_and_no_others(tmp_path, piece, monkeypatch):
    size = 2.0 ** np.repeat([-40, 0, 40], 32)[:, None]  # of each group
    weight = np.random.default_rng(0).normal(size=(2, 96, 5)) * size
    blocks, scales, stands_for = in_mxfp4.quantised(weight.astype(np.float32))
    save_file({"down_blocks": blocks, "down_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')
    sizes, read = [], Checkpoint.read

    def counted(*arguments):
        sizes.append((tensor := read(*arguments)).size)
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counted)
    found = read_packed(Checkpoint(tmp_path), "down", (2, 96, 5), piece, dtype=jnp.float32)
    np.testing.assert_array_equal(found, stands_for if piece is None else stands_for[piece])
    assert np.abs((stands_for - weight) / size).max() <= np.abs(weight / size).max() / 4
    outputs = {None: 2 * 5 * 3, 20: 1 * 3 * 3, 0: 2 * 5 * 1}[None if piece is None else piece[1].start]
    assert sizes == [outputs * 16, outputs]


def test_projections_may_be_rounded_to_fp8_beside_experts_in_mxfp4(both):
    leaves = loaded(both[0].quantized("fp8"))
    dtypes = {path[-3:]: leaf.dtype for path, leaf in leaves.items() if path[:2] == ("layers", 0)}
    assert dtypes["attention", "qkv_proj", "kernel"] == FP8
    assert dtypes["mlp", "gate_up_proj", "kernel"] == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scales": None}, r"must hold the tensor '.*gate_up_proj_scales', which is missing"),
        ({"_scales": np.zeros((4, 64, 2), np.uint8)}, r"_scales' of .* must have shape \[4, 64, 1\]. Got \[4, 64, 2\]"),
        ({"_scales": np.zeros((4, 64, 1), np.float32)}, "_scales' must be of bytes, uint8. Got float32"),
        ({"_blocks": np.zeros((4, 64, 16), np.uint8)}, r"_blocks' of .* must have shape \[4, 64, 1, 16\]"),
        ({"": np.zeros((4, 32, 64), np.float32)}, "must hold only tensors .* Got 2 others, such as '.*_blocks'"),
    ],
)
def test_bytes_that_do_not_go_together_are_named(tmp_path, changes, message):
    packed, _ = in_mxfp4.copies(GOLDEN / "gpt_oss", tmp_path)
    tensors = load_file(packed / "model.safetensors") | {GATE_UP + end: tensor for end, tensor in changes.items()}
    save_file({name: each for name, each in tensors.items() if each is not None}, packed / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        loaded(Checkpoint(packed))


def test_bytes_that_nothing_announces_are_refused(tmp_path):
    checkpoint = Checkpoint(in_mxfp4.copies(GOLDEN / "gpt_oss", tmp_path)[0])
    del checkpoint.config["quantization_config"]
    with pytest.raises(ValueError, match=r"must hold the tensor '.*experts.down_proj', which is missing"):
        loaded(checkpoint)


def test_announcement_of_mxfp4_is_read():
    assert read_quantization({"quantization_config": in_mxfp4.ANNOUNCED}) == Mxfp4()
    with pytest.raises(NotImplementedError, match=r"`quantization_config` must be absent, or .* Got bits=4"):
        read_quantization({"quantization_config": in_mxfp4.ANNOUNCED | {"bits": 4}})
    assert packed_names(GATE_UP) == (GATE_UP + "_blocks", GATE_UP + "_scales")
