"""Fields that change the mathematics are read or refused, whatever the architecture."""

import re

import pytest

from jattn_models.gemma2 import Gemma2Config
from jattn_models.gemma3 import Gemma3Config
from jattn_models.glm4 import Glm4Config
from jattn_models.glm4_moe import Glm4MoeConfig
from jattn_models.gpt_oss import GptOssConfig
from jattn_models.granite import GraniteConfig
from jattn_models.llama4 import Llama4Config
from jattn_models.llama_config import LlamaConfig
from jattn_models.ministral import Ministral3Config, MinistralConfig
from jattn_models.mistral import MistralConfig
from jattn_models.mixtral import MixtralConfig
from jattn_models.olmo2 import Olmo2Config
from jattn_models.olmo3 import Olmo3Config
from jattn_models.olmoe import OlmoeConfig
from jattn_models.phi3 import Phi3Config
from jattn_models.qwen2 import Qwen2Config
from jattn_models.qwen2_moe import Qwen2MoeConfig
from jattn_models.qwen3 import Qwen3Config
from jattn_models.qwen3_moe import Qwen3MoeConfig
from jattn_models.smollm3 import SmolLM3Config
from jattn_models.starcoder2 import Starcoder2Config

SMALLEST = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 64,
}
# Each with a value that asks for something.
ACTIVE = {
    "attention_bias": True,
    "mlp_bias": True,
    "is_causal": False,
    "use_bidirectional_attention": True,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "dual_chunk_attention_config": {"chunk_size": 8, "local_size": 4},
    "layer_types": ["full_attention", "chunked_attention"] * 2,
    "no_rope_layers": [1, 1, 1, 0],
    "attn_temperature_tuning": True,
    "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1},
    "query_pre_attn_scalar": 64,
    "attention_multiplier": 1.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "scoring_func": "sigmoid",
    "clip_qkv": 8.0,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "partial_rotary_factor": 0.5,
}
# Each with values that ask for nothing.
NEUTRAL = {
    "attention_bias": [False],
    "mlp_bias": [False],
    "is_causal": [True],
    "use_bidirectional_attention": [False],
    "sliding_window": [64, 4096],
    "attention_chunk_size": [2**20],
    "no_rope_layers": [[], [1, 1, 1, 1]],
    "attn_temperature_tuning": [False],
    "embedding_multiplier": [1.0, 1],
    "residual_multiplier": [1.0],
    "logits_scaling": [1],
    "scoring_func": ["softmax"],
    "routed_scaling_factor": [1.0],
    "n_group": [1],
    "topk_group": [1],
    "partial_rotary_factor": [1.0],
}
# What each reads, or may have whatever its value.
READ = {
    Gemma2Config: {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "sliding_window",
    },
    Gemma3Config: {"attention_bias", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping"},
    Llama4Config: {
        "attention_bias",
        "attention_chunk_size",
        "layer_types",
        "no_rope_layers",
        "attn_temperature_tuning",
        "scoring_func",
    },
    Glm4Config: {"attention_bias", "partial_rotary_factor"},
    Glm4MoeConfig: {"partial_rotary_factor", "attention_bias", "routed_scaling_factor", "n_group", "topk_group"},
    GptOssConfig: {"attention_bias", "sliding_window"},
    GraniteConfig: {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "mlp_bias",
        "residual_multiplier",
    },
    LlamaConfig: {"attention_bias", "mlp_bias"},
    MinistralConfig: {"sliding_window"},
    Ministral3Config: {"sliding_window"},
    MistralConfig: {"sliding_window"},
    MixtralConfig: {"sliding_window"},
    Olmo2Config: {"attention_bias"},
    Olmo3Config: {"attention_bias", "sliding_window"},
    OlmoeConfig: {"attention_bias", "clip_qkv"},
    Phi3Config: {"sliding_window", "partial_rotary_factor"},
    Qwen2Config: {"sliding_window", "attention_bias"},
    Qwen2MoeConfig: {"sliding_window", "attention_bias"},
    Qwen3Config: {"attention_bias", "sliding_window"},
    Qwen3MoeConfig: {"attention_bias", "sliding_window"},
    Starcoder2Config: {"sliding_window"},
    SmolLM3Config: {"attention_bias", "mlp_bias", "no_rope_layers", "sliding_window"},
}
families = pytest.mark.parametrize("config_class", READ, ids=lambda config_class: config_class.__name__)


@families
@pytest.mark.parametrize("name", ACTIVE)
def test_field_that_changes_the_model_is_read_or_refused(config_class, name):
    fields = SMALLEST | {name: ACTIVE[name]}
    if name in READ[config_class]:
        config_class.from_dict(fields | ({"n_group": ACTIVE["n_group"]} if name == "topk_group" else {}))
    else:
        with pytest.raises(NotImplementedError, match=rf"`{name}` must be .*\. Got"):
            config_class.from_dict(fields)


@families
def test_field_that_changes_nothing_is_no_obstacle(config_class):
    plain = config_class.from_dict(SMALLEST)
    assert config_class.from_dict(SMALLEST | dict.fromkeys(ACTIVE.keys() - READ[config_class])) == plain
    for name in NEUTRAL.keys() - READ[config_class]:
        for value in NEUTRAL[name]:
            assert config_class.from_dict(SMALLEST | {name: value}) == plain, name


@pytest.mark.parametrize(
    "fields", [{"sliding_window": 8, "use_sliding_window": False}, {"layer_types": ["full_attention"] * 4}]
)
def test_layers_without_windows_may_say_so(fields):
    assert LlamaConfig.from_dict(SMALLEST | fields) == LlamaConfig.from_dict(SMALLEST)


@pytest.mark.parametrize(
    "config_class",
    [Gemma2Config, Gemma3Config, MinistralConfig, MistralConfig, MixtralConfig, Phi3Config, Starcoder2Config],
)
def test_window_that_is_said_not_to_be_used_is_refused(config_class):
    with pytest.raises(NotImplementedError, match=r"`use_sliding_window` must be true: .* Got false"):
        config_class.from_dict(SMALLEST | {"sliding_window": 8, "use_sliding_window": False})


def test_llama4_scores_are_sigmoids():
    assert Llama4Config.from_dict(SMALLEST | {"scoring_func": "sigmoid"}).experts.routing.scoring == "sigmoid"
    with pytest.raises(NotImplementedError, match=r"`scoring_func` must be 'sigmoid'. Got 'softmax'"):
        Llama4Config.from_dict(SMALLEST | {"scoring_func": "softmax"})


# Number and string would be true of themselves.
@pytest.mark.parametrize("value", ["false", "False", 0, 1, 0.0, []])
@pytest.mark.parametrize(
    ("config_class", "name"),
    [
        *((config_class, "tie_word_embeddings") for config_class in READ),
        (LlamaConfig, "attention_bias"),
        (LlamaConfig, "mlp_bias"),
        (LlamaConfig, "is_causal"),
        (Gemma3Config, "use_bidirectional_attention"),
        (Qwen2Config, "use_sliding_window"),
        (Qwen3Config, "use_sliding_window"),
        (Qwen3MoeConfig, "use_sliding_window"),
        (SmolLM3Config, "use_sliding_window"),
        (Qwen3MoeConfig, "norm_topk_prob"),
        (Qwen2MoeConfig, "use_sliding_window"),
        (Qwen2MoeConfig, "norm_topk_prob"),
        (Qwen2MoeConfig, "qkv_bias"),
        (OlmoeConfig, "norm_topk_prob"),
        (Glm4MoeConfig, "norm_topk_prob"),
        (Glm4MoeConfig, "attention_bias"),
        (Glm4MoeConfig, "use_qk_norm"),
        (Starcoder2Config, "use_bias"),
        (Llama4Config, "use_qk_norm"),
    ],
)
def test_boolean_is_true_or_false_and_nothing_else(config_class, name, value):
    with pytest.raises(
        (ValueError, NotImplementedError), match=rf"`{name}` .*must be .*(true|false).* Got {re.escape(repr(value))}"
    ):
        config_class.from_dict(SMALLEST | {name: value})


@pytest.mark.parametrize("value", ["false", 4.0, []])
def test_llama4_temperature_is_tuned_or_not(value):
    with pytest.raises(ValueError, match=r"`attn_temperature_tuning` .* must be true or false"):
        Llama4Config.from_dict(SMALLEST | {"attn_temperature_tuning": value})
    assert Llama4Config.from_dict(SMALLEST | {"attn_temperature_tuning": 0}).temperature is None


@families
@pytest.mark.parametrize(
    ("fields", "unread"),
    [
        ({"rope_scaling": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        ({"rope_scaling": {"factor": 8.0}}, "factor"),
        ({"rope_scaling": {"rope_type": None, "type": None, "factor": 8.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ],
)
def test_rope_parameters_that_are_not_read_are_refused(config_class, fields, unread):
    if config_class is Ministral3Config and unread == "llama_4_scaling_beta":
        with pytest.raises(ValueError, match=r"`original_max_position_embeddings` .* must be .* Got None"):
            config_class.from_dict(SMALLEST | fields)
        return
    with pytest.raises(NotImplementedError, match=rf"must be one object for all layers .* Got '{unread}"):
        config_class.from_dict(SMALLEST | fields)


@families
def test_rope_parameters_by_type_of_layer_are_for_two_families(config_class):
    both = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    if config_class in (Gemma3Config, Olmo3Config):
        config_class.from_dict(SMALLEST | {"rope_parameters": both})
        with pytest.raises(ValueError, match=r"`rope_parameters` must be .* for each type of layer. Got .*chunked"):
            config_class.from_dict(SMALLEST | {"rope_parameters": {"chunked_attention": {}}})
    else:
        with pytest.raises(NotImplementedError, match=r"must be one object for all layers .* Got 'full_attention'"):
            config_class.from_dict(SMALLEST | {"rope_parameters": both})
