"""A device's share of a checkpoint: what it is, and that no more is read for it; its logits are in test_decoder."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn.parallel import Parallel
from jattn_models.sharding import Rank, pieces, whole_shape
from tests.models.harness.goldens import GOLDEN, OTHER_CASES, load, shares

TWO = Parallel("tensor", 2)


def flat(state):
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(state)}


@pytest.mark.parametrize(
    ("sharded", "blocks", "columns"),
    [
        ("outputs", (8,), [4, 5, 6, 7]),
        ("outputs", (4, 2, 2), [2, 3, 5, 7]),
        ("inputs", (8,), [*range(8)]),
        (None, (8,), [*range(8)]),
    ],
)
def test_second_devices_pieces_are_its_part_of_each_block(sharded, blocks, columns):
    whole = np.arange(6 * 8).reshape(6, 8)
    share = np.concatenate([whole[piece] for piece in pieces(whole.shape, blocks, sharded, Rank(1, 2))], axis=-1)
    rows = slice(3, 6) if sharded == "inputs" else slice(None)
    np.testing.assert_array_equal(share, whole[rows, columns])
    assert whole_shape(share.shape, sharded, 2) == whole.shape


def test_shares_of_a_fused_kernel_have_each_their_own_heads():
    """queries, keys and values side by side in one tensor of the checkpoint (phi3), or in three (mistral)."""
    for case in ("phi3", "mistral"):
        config = load(case).config
        q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        whole = np.split(load(case).layers[0].attention.qkv_proj.kernel[...], (q, q + kv), axis=-1)
        for number, state in enumerate(shares(Checkpoint(GOLDEN / case), 2)[1]):
            expected = [np.split(block, 2, axis=-1)[number] for block in whole]
            kernel = flat(state)["layers", 0, "attention", "qkv_proj", "kernel"]
            np.testing.assert_array_equal(kernel, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize("case", ["gqa", *OTHER_CASES])
def test_no_more_is_read_than_a_share_holds(case, monkeypatch):
    """What makes keys and values from compressed rows is read for two leaves, each of which has a part of each head."""
    sizes = []

    def read(self, name, shape=None, piece=None):
        tensor = original(self, name, shape, piece)
        sizes.append(tensor.size // (2 if "kv_b_proj" in name else 1))
        return tensor

    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", read)
    _, states = shares(Checkpoint(GOLDEN / case), 2)
    held = sum(leaf.size for state in states for leaf in flat(state).values())
    assert sum(sizes) == held < 2 * sum(leaf.size for leaf in flat(nnx.state(load(case))).values())


def test_every_weight_of_a_share_says_how_it_is_split():
    """Norms, routers, gates of shared experts, what makes compressed rows and what is added once are whole on each."""
    once = {("o_proj", "bias"), ("down_proj", "bias")}
    for case in ("gqa", *OTHER_CASES):
        whole, (first, _) = flat(nnx.state(load(case))), shares(Checkpoint(GOLDEN / case), 2)[1]
        alike = [path[-2:] for path, leaf in flat(first).items() if leaf.shape == whole[path].shape]
        same = {path[0] for path in alike if path not in once}
        assert {name for name in same if "norm" not in name} <= {"router", "shared_gate", "in_proj"}


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_that_there_is_not_is_refused(rank):
    checkpoint = Checkpoint(GOLDEN / "gqa")
    with pytest.raises(ValueError, match=f"`rank` must be at least 0 and below .* Got {rank} of 2"):
        model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=jnp.float32, parallel=TWO, rank=rank)


@pytest.mark.parametrize(
    ("case", "parallel", "what"),
    [
        ("gqa", Parallel("tensor", 3), "`num_attention_heads` must divide by the number of devices. Got 4 over 3"),
        ("qwen3_moe", Parallel("tensor", 4, by_expert=True), "The number of experts must divide .* Got 6 over 4"),
        ("deepseek_v2", Parallel("tensor", 8), "`num_attention_heads` must divide .* Got 4 over 8"),
    ],
)
def test_what_does_not_divide_is_refused_before_a_weight_is_read(case, parallel, what, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", None)
    checkpoint = Checkpoint(GOLDEN / case)
    without_weights = model_class(checkpoint.architecture).without_weights
    with pytest.raises(ValueError, match=what):
        without_weights(checkpoint, dtype=jnp.float32, parallel=parallel)


def test_devices_with_one_head_of_keys_have_it_each():
    """Four devices, two heads of keys: the queries of the first two see the first one."""
    whole = load("gqa")
    config, kernel = whole.config, whole.layers[0].attention.qkv_proj.kernel[...]
    width, num_turning = config.head_dim, config.num_q_heads + config.num_kv_heads
    q, k, v = np.split(kernel, (config.num_q_heads * width, num_turning * width), axis=-1)
    for number, state in enumerate(shares(Checkpoint(GOLDEN / "gqa"), 4)[1]):
        heads = (q, number), (k, number // 2), (v, number // 2)
        expected = [part[..., head * width : (head + 1) * width] for part, head in heads]
        found = flat(state)["layers", 0, "attention", "qkv_proj", "kernel"]
        np.testing.assert_array_equal(found, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize("case", ["mixtral", "llama4", "olmoe", "gpt_oss"])
def test_experts_may_be_shared_whole(case):
    """Of a tensor an expert, and of one tensor of all, its outputs alternating too."""
    whole = flat(nnx.state(load(case)))
    for number, state in enumerate(shares(Checkpoint(GOLDEN / case), 2, by_expert=True)[1]):
        kernels = {path: leaf for path, leaf in flat(state).items() if leaf.ndim == 4}
        assert kernels
        for path, kernel in kernels.items():
            np.testing.assert_array_equal(kernel, np.split(whole[path], 2, axis=1)[number])
