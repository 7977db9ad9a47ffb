"""What DeepSeek's configurations say, YaRN's frequencies, and the sentence for what is not built."""

import math

import numpy as np
import pytest

from jattn.model import model_class
from jattn.routing import Routing
from jattn_models.deepseek import DeepseekV2Config, DeepseekV3Config
from jattn_models.experts import Experts
from jattn_models.glm4_moe_lite import Glm4MoeLiteConfig
from jattn_models.qwen2 import Qwen2Config
from jattn_models.rope import Rope
from jattn_models.rope_scaling import YarnScaling
from tests.models.harness.smallest import SMALLEST

V2 = SMALLEST | {"num_experts_per_tok": 6}


def test_absent_fields_have_hugging_faces_defaults():
    lite, v3 = (config.from_dict(V2 | {"num_hidden_layers": 5}) for config in (DeepseekV2Config, DeepseekV3Config))
    for config, context in ((lite, 2048), (v3, 4096)):
        widths = (config.q_rank, config.kv_rank, config.nope_dim, config.rope_dim, config.value_dim)
        assert widths == (1536, 512, 128, 64, 128)
        assert (config.context_len, config.rms_norm_eps, config.rope, config.tied) == (
            context,
            1e-6,
            Rope(64, 1e4),
            False,
        )
    assert lite.experts == Experts(
        routing=Routing(num_experts=64, per_token=6), intermediate_size=1407, shared_size=2814
    )
    routing = Routing(
        num_experts=256,
        per_token=6,
        scoring="sigmoid",
        normalised=True,
        scaling_factor=2.5,
        num_groups=8,
        groups_per_token=4,
        group_score="two_best",
    )
    assert v3.experts == Experts(routing=routing, intermediate_size=2048, choice_biased=True, shared_size=2048)
    assert [[kind.sparse] * len(layers) for layers, kind in lite.stacks] == [[True] * 5]
    assert [[kind.sparse] * len(layers) for layers, kind in v3.stacks] == [[False] * 3, [True] * 2]


def test_queries_may_not_be_compressed():
    assert DeepseekV2Config.from_dict(V2 | {"q_lora_rank": None}).q_rank is None


def test_glm_lites_defaults():
    config = Glm4MoeLiteConfig.from_dict(SMALLEST)
    widths = (config.q_rank, config.kv_rank, config.nope_dim, config.rope_dim, config.value_dim)
    assert (*widths, config.context_len, config.rms_norm_eps) == (768, 512, 192, 64, 256, 202752, 1e-5)
    assert config.experts.routing == Routing(
        num_experts=64, per_token=4, scoring="sigmoid", normalised=True, scaling_factor=1.8, group_score="two_best"
    )
    assert [[kind.sparse] * len(layers) for layers, kind in config.stacks] == [[False], [True] * 3]


@pytest.mark.parametrize("types", [["sparse"] * 3, ["sparse", "moe", "dense", "dense"], "sparse"])
def test_glm_lites_layers_have_a_type_each(types):
    with pytest.raises(ValueError, match="`mlp_layer_types` must be a list of 4 times 'dense' or 'sparse'"):
        Glm4MoeLiteConfig.from_dict(SMALLEST | {"mlp_layer_types": types})


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (DeepseekV2Config, {"topk_method": "noaux_tc"}, "`topk_method` must be 'greedy'"),
        (DeepseekV2Config, {"norm_topk_prob": True}, "`norm_topk_prob` must be false"),
        (DeepseekV2Config, {"scoring_func": "sigmoid"}, "`scoring_func` must be 'softmax'"),
        (DeepseekV3Config, {"scoring_func": "softmax"}, "`scoring_func` must be 'sigmoid'"),
        (DeepseekV3Config, {"moe_layer_freq": 2}, "`moe_layer_freq` must be 1"),
        (DeepseekV3Config, {"rope_interleave": False}, "`rope_interleave` must be true"),
        (DeepseekV3Config, {"index_topk": 2048}, "`index_topk` must be null: sparse attention by an indexer"),
        (DeepseekV3Config, {"attention_bias": True}, "`attention_bias` must be false"),
        (DeepseekV3Config, {"quantization_config": {"quant_method": "awq"}}, "`quantization_config` must be absent"),
    ],
)
def test_what_is_not_built_is_named(config_class, fields, message):
    with pytest.raises(NotImplementedError, match=message):
        config_class.from_dict(V2 | fields)


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_models_that_choose_their_keys_by_an_indexer_are_refused_by_name(architecture):
    with pytest.raises(NotImplementedError, match=rf"without sparse attention by an indexer, .* Got '{architecture}'"):
        model_class(architecture)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 0}, "`kv_lora_rank` of the model's configuration must be an integer above 0"),
        ({"n_group": 7}, "`n_group` must divide `n_routed_experts`"),
        ({"first_k_dense_replace": -1}, "`first_k_dense_replace` of the model's configuration must be a whole number"),
    ],
)
def test_wrong_fields_get_a_sentence(fields, message):
    with pytest.raises(ValueError, match=message):
        DeepseekV3Config.from_dict(V2 | fields)


def yarn(**fields):
    return {"rope_type": "yarn", "original_max_position_embeddings": 32, **fields}


# transformers' `_compute_yarn_parameters`, of 8 dimensions, theta 10,000, and a context four times the original one.
@pytest.mark.parametrize(
    ("fields", "amplitude", "logit_factor"),
    [
        ({}, 0.1 * math.log(4) + 1, 1.0),
        ({"factor": 8.0}, 0.1 * math.log(8) + 1, 1.0),
        ({"factor": 0.5}, 1.0, 1.0),
        ({"attention_factor": 1.5}, 1.5, 1.0),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, (0.1 * math.log(4) + 1) ** 2),
        ({"mscale_all_dim": 0.5}, 0.1 * math.log(4) + 1, (0.05 * math.log(4) + 1) ** 2),
    ],
)
def test_yarn_amplitudes(fields, amplitude, logit_factor):
    config = Qwen2Config.from_dict(SMALLEST | {"max_position_embeddings": 128, "rope_scaling": yarn(**fields)})
    assert config.rope.amplitude == pytest.approx(amplitude)
    assert config.rope.logit_factor == pytest.approx(logit_factor)


@pytest.mark.parametrize(
    ("fields", "slowed"),
    [
        ({}, [0.0, 1.0, 1.0, 1.0]),  # of 4 frequencies numbers 0 and 1 turn 5 times and half a time
        ({"truncate": False}, [0.0, 1.0, 1.0, 1.0]),
        ({"beta_fast": 1.0, "beta_slow": 0.01, "truncate": False}, [0.0, 0.146, 0.646, 1.0]),
        ({"beta_fast": 1.0, "beta_slow": 0.01}, [0.0, 1 / 3, 2 / 3, 1.0]),
    ],
)
def test_yarn_slows_low_frequencies_down(fields, slowed):
    rope = Rope.from_config({"max_position_embeddings": 128, "rope_scaling": yarn(**fields)}, 8)
    plain, found = Rope(8, 1e4).frequencies(), rope.frequencies()
    np.testing.assert_allclose((plain - found) / plain * 4 / 3, slowed, atol=2e-3)


def test_yarn_without_a_field_for_the_original_context_goes_by_the_models():
    rope = Rope.from_config({"max_position_embeddings": 128, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 8)
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.original_context_len == 128
