"""What an architecture cannot serve of config.json is named in a sentence."""

import pytest

from jattn_models.gemma2 import Gemma2Config
from jattn_models.gemma3 import Gemma3Config
from jattn_models.glm4 import Glm4Config
from jattn_models.granite import GraniteConfig
from jattn_models.llama4 import Llama4Config
from jattn_models.llama_config import LlamaConfig
from jattn_models.ministral import Ministral3Config, MinistralConfig
from jattn_models.mistral import MistralConfig
from jattn_models.mixtral import MixtralConfig
from jattn_models.olmo2 import Olmo2Config
from jattn_models.olmo3 import Olmo3Config
from jattn_models.phi3 import Phi3Config
from jattn_models.qwen2 import Qwen2Config
from jattn_models.qwen2_moe import Qwen2MoeConfig
from jattn_models.smollm3 import SmolLM3Config
from jattn_models.starcoder2 import Starcoder2Config
from tests.models.harness.smallest import SMALLEST

LONGROPE = {"type": "su", "short_factor": [1.0, 1.0, 1.0, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LONG = {"max_position_embeddings": 8192, "original_max_position_embeddings": 1024, "rope_scaling": LONGROPE}
WINDOW_FIRST = ["sliding_attention", "full_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (
            Gemma3Config,
            {"query_pre_attn_scalar": 0},
            "`query_pre_attn_scalar` .* must be a finite number above 0. Got 0",
        ),
        (Gemma3Config, {"final_logit_softcapping": -1.0}, "`final_logit_softcapping` .* above 0. Got -1.0"),
        (Gemma3Config, {"rope_parameters": {"rope_theta": 1e4}}, "`rope_parameters` must be an object with one for"),
        (Llama4Config, {"no_rope_layers": [1, 1]}, r"`no_rope_layers` must be a list of 4 times 0 or 1. Got \[1, 1\]"),
        (Llama4Config, {"no_rope_layers": [1, 2, 3, 4]}, "`no_rope_layers` must be a list of 4 times 0 or 1"),
        (Llama4Config, {"moe_layers": 1}, "`moe_layers` must be a list of layers' numbers. Got 1"),
        (Llama4Config, {"layer_types": ["full_attention"]}, "`layer_types` must be a list of 4 types"),
        (Llama4Config, {"attention_chunk_size": 0}, "`attention_chunk_size` .* must be an integer above 0. Got 0"),
        (Llama4Config, {"interleave_moe_layer_step": 0}, "`interleave_moe_layer_step` .* above 0. Got 0"),
        (Llama4Config, {"floor_scale": 0}, "`floor_scale` .* must be a finite number above 0. Got 0"),
        (Llama4Config, {"num_hidden_layers": 10**11}, "`num_hidden_layers` must be at most 10000"),
        (Gemma3Config, {"rope_scaling": "linear"}, "`rope_scaling` must be an object. Got 'linear'"),
        (Phi3Config, {"partial_rotary_factor": 0.4}, "must be at most 1 and leave an even number .* Got 0.4 of 8"),
        (Phi3Config, {"partial_rotary_factor": 1.25}, "must be at most 1 and leave an even number .* Got 1.25 of 8"),
        (
            Phi3Config,
            LONG | {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            r"`long_factor` .* must be a list of 4 finite numbers above 0. Got \[1.0\]",
        ),
        (
            Phi3Config,
            LONG | {"rope_scaling": LONGROPE | {"short_factor": [1.0, 0.0, 1.0, 1.0]}},
            "`short_factor` .* must be a list of 4 finite numbers above 0",
        ),
        (
            LlamaConfig,
            {"rope_scaling": LONGROPE},
            "`original_max_position_embeddings` .* must be an integer above 0. Got None",
        ),
    ],
)
def test_wrong_field_is_named(config_class, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class.from_dict(SMALLEST | fields)


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (MistralConfig, {"attention_bias": True}, "`attention_bias` must be false: .* Got true"),
        (
            Qwen2MoeConfig,
            {"use_sliding_window": True},
            "`use_sliding_window` must be false where there are no `layer_types`. Got true",
        ),
        (
            Llama4Config,
            {"layer_types": ["sliding_attention"] * 4},
            "`layer_types` must be of .* Got 'sliding_attention'",
        ),
        (
            Llama4Config,
            {**LONG, "head_dim": 8, "max_position_embeddings": 2048},
            "`rope_type` must leave amplitudes alone in this architecture. Got an amplitude of 1.04",
        ),
        (Gemma2Config, {"hidden_activation": "gelu"}, "`hidden_activation` must be 'gelu_pytorch_tanh'. Got 'gelu'"),
        (Glm4Config, {"mlp_bias": True}, "`mlp_bias` must be false: .* Got true"),
        (Starcoder2Config, {"hidden_act": "gelu"}, "`hidden_act` must be 'gelu_pytorch_tanh'. Got 'gelu'"),
        (GraniteConfig, {"sliding_window": 8}, "`sliding_window` must be null: .* Got 8"),
        (MinistralConfig, {"attention_bias": True}, "`attention_bias` must be false: .* Got true"),
        (MinistralConfig, {"layer_types": ["chunked_attention"] * 4}, "`layer_types` must be of .* Got 'chunked"),
        (Ministral3Config, {"layer_types": WINDOW_FIRST}, "`layer_types` must be 'full_attention' throughout"),
        (SmolLM3Config, {"hidden_act": "gelu"}, "`hidden_act` must be 'silu'. Got 'gelu'"),
        (Olmo2Config, {"clip_qkv": 8.0}, "`clip_qkv` must be null: .* Got 8.0"),
        (Olmo3Config, {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be 1.0: .* Got 0.5"),
        (Gemma3Config, {"hidden_activation": "gelu"}, "`hidden_activation` must be 'gelu_pytorch_tanh'. Got 'gelu'"),
        (
            Gemma3Config,
            {"use_bidirectional_attention": True},
            "`use_bidirectional_attention` must be false: .* Got true",
        ),
        (Gemma3Config, {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` must be null: .* Got 50.0"),
        (MistralConfig, {"hidden_act": "gelu"}, "`hidden_act` must be 'silu'. Got 'gelu'"),
        (MistralConfig, {"is_causal": False}, "`is_causal` must be true: .* Got false"),
        (
            Qwen2Config,
            {"rope_scaling": {"type": "ntk", "factor": 4.0}},
            "`rope_type` must be one of .* Got 'ntk'",
        ),
        (Qwen2Config, {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be 1.0: .* Got 0.5"),
        (MixtralConfig, {"quantization_config": {"bits": 4}}, "`quantization_config` must be absent"),
    ],
)
def test_unsupported_field_is_named(config_class, fields, message):
    with pytest.raises(NotImplementedError, match=message):
        config_class.from_dict(SMALLEST | fields)
