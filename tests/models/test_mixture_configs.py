"""What each architecture's config.json says of its mixture, and the sentence for what does not fit."""

import pytest

from jattn.routing import Routing
from jattn_models.experts import Experts
from jattn_models.glm4_moe import Glm4MoeConfig
from jattn_models.llama4 import Llama4Config
from jattn_models.mixtral import MixtralConfig
from jattn_models.olmoe import OlmoeConfig
from jattn_models.qwen2_moe import Qwen2MoeConfig
from jattn_models.qwen3_moe import Qwen3MoeConfig
from jattn_models.rope import Rope
from tests.models.harness.smallest import SMALLEST


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_qwen3_moe_experts_go_by_both_names(name):
    fields = {name: 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
    experts = Qwen3MoeConfig.from_dict(SMALLEST | fields).experts
    assert experts == Experts(routing=Routing(num_experts=6, per_token=3, normalised=True), intermediate_size=16)


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 3}, [2]),
        ({"mlp_only_layers": [0, 3]}, [1, 2]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ({"mlp_only_layers": None}, [0, 1, 2, 3]),
    ],
)
def test_qwen_moe_sparse_layers(fields, sparse):
    for config_class in (Qwen2MoeConfig, Qwen3MoeConfig):
        assert sparse_layers(config_class.from_dict(SMALLEST | fields)) == sparse


def test_sparse_layers_keep_their_windows():
    types = ["sliding_attention", "full_attention"] * 2
    fields = {"use_sliding_window": True, "sliding_window": 8, "layer_types": types, "mlp_only_layers": [0]}
    config = Qwen2MoeConfig.from_dict(SMALLEST | fields)
    kinds = {layer: (kind.sparse, kind.window_left) for layers, kind in config.stacks for layer in layers}
    assert kinds == {0: (False, 7), 1: (True, None), 2: (True, 7), 3: (True, None)}


def test_qwen2_moe_mixture_has_a_gated_shared_expert():
    config = Qwen2MoeConfig.from_dict(SMALLEST | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True})
    routing = Routing(num_experts=8, per_token=3, normalised=True)
    assert config.experts == Experts(routing=routing, intermediate_size=1408, shared_size=5632, shared_gated=True)
    assert config.qkv_bias
    assert not Qwen2MoeConfig.from_dict(SMALLEST | {"qkv_bias": False, "attention_bias": True}).qkv_bias


def test_olmoe_norms_whole_projections_and_may_clip_them():
    config = OlmoeConfig.from_dict(SMALLEST | {"clip_qkv": 8})
    assert config.experts == Experts(routing=Routing(num_experts=64, per_token=8), intermediate_size=48)
    assert (config.qk_norm, config.qkv_clip) == ("projection", 8.0)
    assert sparse_layers(config) == [0, 1, 2, 3]
    assert OlmoeConfig.from_dict(SMALLEST | {"clip_qkv": None}).qkv_clip is None


def test_glm4_moe_chooses_by_biased_sigmoids_within_groups():
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
    routing = Routing(
        num_experts=128,
        per_token=8,
        scoring="sigmoid",
        normalised=True,
        scaling_factor=2.5,
        num_groups=4,
        groups_per_token=2,
        group_score="two_best",
    )
    config = Glm4MoeConfig.from_dict(SMALLEST | groups)
    assert config.experts == Experts(routing=routing, intermediate_size=1408, choice_biased=True, shared_size=2816)
    assert (config.qkv_bias, config.qk_norm, config.rope) == (False, None, Rope(4, 1e4))
    config = Glm4MoeConfig.from_dict(SMALLEST | {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False})
    assert (config.qkv_bias, config.qk_norm, config.experts.routing.normalised) == (True, "head", False)


@pytest.mark.parametrize(("first", "sparse"), [(0, [0, 1, 2, 3]), (1, [1, 2, 3]), (3, [3]), (4, [])])
def test_glm4_moe_is_dense_at_first(first, sparse):
    assert sparse_layers(Glm4MoeConfig.from_dict(SMALLEST | {"first_k_dense_replace": first})) == sparse


def test_glm4_moe_is_dense_in_one_layer_if_nothing_is_said():
    assert sparse_layers(Glm4MoeConfig.from_dict(SMALLEST)) == [1, 2, 3]


def sparse_layers(config):
    return sorted(layer for layers, kind in config.stacks if kind.sparse for layer in layers)


def test_llama4_mixture_has_a_shared_expert():
    config = Llama4Config.from_dict(SMALLEST | {"intermediate_size_mlp": 96})
    experts = config.experts
    routing = Routing(num_experts=16, per_token=1, scoring="sigmoid")
    assert experts == Experts(routing=routing, intermediate_size=48, weighs_inputs=True, shared_size=48)
    assert config.intermediate_size == 96


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (MixtralConfig, {"num_local_experts": 0}, "`num_local_experts` .* must be an integer above 0. Got 0"),
        (MixtralConfig, {"num_experts_per_tok": 9}, "`num_experts_per_tok` must be at most .* Got 9 of 8"),
        (Glm4MoeConfig, {"n_group": 3}, "`n_group` must divide `n_routed_experts`. Got 3 groups of 128 experts"),
        (Glm4MoeConfig, {"topk_group": 2}, "`topk_group` must be at most `n_group`. Got 2 of 1"),
        (Glm4MoeConfig, {"n_group": 32}, "`num_experts_per_tok` must be at most the experts in `topk_group` groups"),
        (Glm4MoeConfig, {"n_shared_experts": 0}, "`n_shared_experts` .* must be an integer above 0. Got 0"),
        (Glm4MoeConfig, {"routed_scaling_factor": 0}, "`routed_scaling_factor` .* above 0. Got 0"),
        (Glm4MoeConfig, {"first_k_dense_replace": -1}, "`first_k_dense_replace` .* whole number of at least 0. Got -1"),
        (OlmoeConfig, {"clip_qkv": 0}, "`clip_qkv` .* must be a finite number above 0. Got 0"),
        (OlmoeConfig, {"num_experts_per_tok": 65}, "`num_experts_per_tok` must be at most `num_experts`. Got 65 of 64"),
        (Qwen2MoeConfig, {"shared_expert_intermediate_size": 0}, "`shared_expert_intermediate_size` .* above 0. Got 0"),
        (Qwen3MoeConfig, {"decoder_sparse_step": 0}, "`decoder_sparse_step` .* must be an integer above 0. Got 0"),
        (Qwen3MoeConfig, {"mlp_only_layers": 3}, "`mlp_only_layers` must be a list of layers' numbers. Got 3"),
    ],
)
def test_wrong_field_is_named(config_class, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class.from_dict(SMALLEST | fields)
