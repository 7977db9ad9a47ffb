"""What each architecture reads from config.json beside windows."""

import math

import jax.numpy as jnp
import numpy as np
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
from jattn_models.rope import Rope
from jattn_models.rope_scaling import LinearScaling, Llama3Scaling
from jattn_models.smollm3 import SmolLM3Config
from jattn_models.starcoder2 import Starcoder2Config
from jattn_models.temperature import Temperature
from tests.models.harness.smallest import SMALLEST

LONGROPE = {"type": "su", "short_factor": [1.0, 1.0, 1.0, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LONG = {"max_position_embeddings": 8192, "original_max_position_embeddings": 1024, "rope_scaling": LONGROPE}

WINDOW_FIRST = ["sliding_attention", "full_attention", "full_attention", "full_attention"]


# As transformers' configuration classes give them: kv heads, head_dim, context, eps, theta, tied.
@pytest.mark.parametrize(
    ("config_class", "expected"),
    [
        (Gemma2Config, (4, 256, 8192, 1e-6, 1e4, True)),
        (Gemma3Config, (4, 256, 131072, 1e-6, 1e6, True)),
        (Glm4Config, (2, 128, 131072, 1.5625e-7, 1e4, False)),
        (Glm4MoeConfig, (8, 8, 131072, 1e-5, 1e4, False)),
        (GptOssConfig, (8, 64, 131072, 1e-5, 1.5e5, False)),
        (GraniteConfig, (32, 8, 2048, 1e-6, 1e4, False)),
        (Llama4Config, (8, 128, 131072, 1e-5, 5e5, False)),
        (LlamaConfig, (32, 8, 2048, 1e-6, 1e4, False)),
        (MinistralConfig, (8, 8, 131072, 1e-6, 1e4, False)),
        (Ministral3Config, (8, 128, 262144, 1e-5, 1e6, False)),
        (MistralConfig, (8, 8, 131072, 1e-6, 1e4, False)),
        (MixtralConfig, (8, 8, 131072, 1e-5, 1e6, False)),
        (Olmo2Config, (32, 8, 2048, 1e-5, 1e4, False)),
        (Olmo3Config, (32, 8, 2048, 1e-5, 5e5, False)),
        (OlmoeConfig, (32, 8, 4096, 1e-5, 1e4, False)),
        (Phi3Config, (32, 8, 4096, 1e-5, 1e4, False)),
        (Qwen2Config, (32, 8, 32768, 1e-6, 1e4, False)),
        (Qwen2MoeConfig, (16, 8, 32768, 1e-6, 1e4, False)),
        (Qwen3Config, (32, 128, 32768, 1e-6, 1e4, False)),
        (Qwen3MoeConfig, (4, 8, 32768, 1e-6, 1e4, False)),
        (SmolLM3Config, (4, 8, 32768, 1e-6, 2e6, True)),
        (Starcoder2Config, (2, 8, 4096, 1e-5, 1e4, True)),
    ],
)
def test_absent_fields_have_hugging_faces_defaults(config_class, expected):
    config = config_class.from_dict(SMALLEST)
    found = (config.num_kv_heads, config.head_dim, config.context_len, config.rms_norm_eps, config.rope.theta)
    assert (*found, config.tied) == expected


def test_null_kv_heads_are_the_query_heads():
    assert MistralConfig.from_dict(SMALLEST | {"num_key_value_heads": None}).num_kv_heads == 32


def test_qwen2_has_biases_whatever_attention_bias_says():
    assert Qwen2Config.from_dict(SMALLEST | {"attention_bias": True}).qkv_bias


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"partial_rotary_factor": 0.75}, Rope(6, 1e4)),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, Rope(4, 5e5)),
    ],
)
def test_phi3_may_turn_a_part_of_each_head(fields, rope):
    assert Phi3Config.from_dict(SMALLEST | fields).rope == rope


@pytest.mark.parametrize(
    ("fields", "full", "local"),
    [
        ({}, Rope(256, 1e6), Rope(256, 1e4)),
        ({"rope_theta": 5e5, "rope_local_base_freq": 100}, Rope(256, 5e5), Rope(256, 1e2)),
        ({"rope_scaling": {"type": "linear", "factor": 8}}, Rope(256, 1e6, LinearScaling(8.0)), Rope(256, 1e4)),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": None}},
            Rope(256, 5e5),
            Rope(256, 1e4),
        ),
    ],
)
def test_gemma3_has_a_rope_for_each_type_of_layer(fields, full, local):
    config = Gemma3Config.from_dict(SMALLEST | fields)
    assert (config.rope, config.local_rope) == (full, local)
    assert {kind.rope for _, kind in config.stacks if kind.window_left is not None} == {"local"}


def test_biases_of_glm4_and_starcoder2_are_there_unless_they_say_otherwise():
    def biases(config):
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases(Glm4Config.from_dict(SMALLEST)) == (True, False, False)
    assert biases(Glm4Config.from_dict(SMALLEST | {"attention_bias": False})) == (False, False, False)
    assert biases(Starcoder2Config.from_dict(SMALLEST)) == (True, True, True)
    assert biases(Starcoder2Config.from_dict(SMALLEST | {"use_bias": False})) == (False, False, False)


def test_granites_absent_factors_are_one():
    config = GraniteConfig.from_dict(SMALLEST)
    assert (config.attention_scale, config.embedding_scale, config.residual_scale, config.logit_scale) == (1, 1, 1, 1)


def test_ministral3_has_yarn_and_grows_unless_it_says_otherwise():
    grows = Ministral3Config.from_dict(SMALLEST)
    assert grows.temperature == Temperature(0.1, 16384.0, first=0.0, of_turning=True)
    assert grows.rope.amplitude == 1.0
    plain = Ministral3Config.from_dict(SMALLEST | {"rope_parameters": {"rope_theta": 5e5}})
    assert (plain.temperature, plain.rope) == (None, Rope(128, 5e5))


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, [(None, "global")] * 3 + [(None, None)]),
        ({"no_rope_layers": [0, 1, 1, 1]}, [(None, None)] + [(None, "global")] * 3),
        ({"sliding_window": 8}, [(None, "global")] * 3 + [(None, None)]),
        ({"sliding_window": 8, "use_sliding_window": True}, [(None, "global")] * 3 + [(7, None)]),
        (
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": WINDOW_FIRST},
            [(7, "global")] + [(None, "global")] * 2 + [(None, None)],
        ),
    ],
)
def test_smollm3_layers_turn_and_see_as_configured(fields, kinds):
    config = SmolLM3Config.from_dict(SMALLEST | fields)
    by_layer = {layer: kind for layers, kind in config.stacks for layer in layers}
    assert [(by_layer[layer].window_left, by_layer[layer].rope) for layer in range(4)] == kinds


def test_gemma2_caps_may_be_off():
    config = Gemma2Config.from_dict(SMALLEST)
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    config = Gemma2Config.from_dict(SMALLEST | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (config.attention_cap, config.logit_cap) == (None, None)


def test_olmo3_scaling_is_of_layers_without_window():
    config = Olmo3Config.from_dict(SMALLEST | {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8}})
    assert (config.rope, config.local_rope) == (Rope(8, 1e4, LinearScaling(8.0)), Rope(8, 1e4))


@pytest.mark.parametrize(
    ("fields", "norm", "temperature"),
    [
        ({}, "unit", Temperature(0.1, 8192.0)),
        ({"use_qk_norm": False, "attn_temperature_tuning": False}, None, None),
        ({"attn_temperature_tuning": 4, "floor_scale": 16, "attn_scale": 0.5}, "unit", Temperature(0.5, 16.0)),
    ],
)
def test_llama4_queries_are_normed_and_tuned_as_configured(fields, norm, temperature):
    config = Llama4Config.from_dict(SMALLEST | fields)
    assert (config.qk_norm, config.temperature) == (norm, temperature)


def test_temperature_rises_at_each_floor():
    positions = jnp.array([0, 6, 7, 14, 15, 23], jnp.int32)
    factors = Temperature(0.5, 8.0)(positions)
    expected = 1 + 0.5 * np.log([1, 1, 2, 2, 3, 4])
    np.testing.assert_allclose(factors, expected, rtol=4 * np.finfo(np.float32).eps)


# Of each layer the chunk, or F if it sees all keys; whether it turns; whether it is sparse.
@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, "8ts 8ts 8ts F-s"),
        ({"interleave_moe_layer_step": 2}, "8t- 8ts 8t- F-s"),
        ({"moe_layers": [0], "interleave_moe_layer_step": 2}, "8ts 8t- 8t- F--"),
        ({"moe_layers": []}, "8t- 8t- 8t- F--"),
        ({"no_rope_layer_interval": 2}, "8ts F-s 8ts F-s"),
        ({"no_rope_layers": [0, 1, 1, 0]}, "F-s 8ts 8ts F-s"),
        ({"no_rope_layers": []}, "8ts 8ts 8ts F-s"),
        ({"layer_types": ["chunked_attention", "full_attention"] * 2}, "8ts Fts 8ts F-s"),
        ({"attention_chunk_size": None}, "Fts Fts Fts F-s"),
        ({"attention_chunk_size": 64, "max_position_embeddings": 64}, "Fts Fts Fts F-s"),
    ],
)
def test_llama4_layers(fields, kinds):
    config = Llama4Config.from_dict(SMALLEST | {"attention_chunk_size": 8} | fields)
    by_layer = {layer: kind for layers, kind in config.stacks for layer in layers}
    found = [by_layer[layer] for layer in range(4)]
    assert " ".join(f"{k.chunk_size or 'F'}{'t' if k.rope else '-'}{'s' if k.sparse else '-'}" for k in found) == kinds


def test_equal_frequency_factors_leave_nothing_between():
    scaling = Llama3Scaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_context_len=64)
    frequencies = 2 * np.pi / 64 * np.array([4.0, 1.5, 0.5])
    np.testing.assert_array_equal(scaling(frequencies), frequencies / np.array([1.0, 1.0, 16.0]))


def test_gemma3_scales_as_its_configuration_says():
    fields = {"query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0, "hidden_act": "silu"}
    config = Gemma3Config.from_dict(SMALLEST | fields)
    assert (config.attention_scale, config.logit_cap, config.embedding_scale) == (1 / 8, 30.0, 16.0)
    assert Gemma3Config.from_dict(SMALLEST).logit_cap is None


@pytest.mark.parametrize(
    ("fields", "factors", "amplitude"),
    [
        ({}, LONGROPE["long_factor"], math.sqrt(1 + math.log(8) / math.log(1024))),
        ({"max_position_embeddings": 1024}, LONGROPE["short_factor"], 1.0),
        ({"rope_scaling": LONGROPE | {"attention_factor": 1.5}}, LONGROPE["long_factor"], 1.5),
        ({"rope_scaling": LONGROPE | {"factor": 2.0}}, LONGROPE["long_factor"], math.sqrt(1.1)),
        # transformers prefers the field of the configuration, here its default of 4096
        (
            {
                "original_max_position_embeddings": None,
                "max_position_embeddings": 4096,
                "rope_scaling": LONGROPE | {"original_max_position_embeddings": 1024},
            },
            LONGROPE["short_factor"],
            1.0,
        ),
    ],
)
def test_longrope_goes_by_the_models_context(fields, factors, amplitude):
    fields = {name: value for name, value in (LONG | fields).items() if value is not None}
    rope = Phi3Config.from_dict(SMALLEST | fields).rope
    assert rope.scaling.factors == tuple(factors)
    assert rope.scaling.amplitude == pytest.approx(amplitude, rel=1e-12)
    plain = Rope(8, 1e4).frequencies()
    np.testing.assert_allclose(rope.frequencies(), plain / np.float32(factors), rtol=1e-6)


@pytest.mark.parametrize(("max_context_len", "name"), [(1024, "short_factor"), (1025, "long_factor")])
def test_longrope_of_a_shorter_served_context_keeps_the_models_amplitude(max_context_len, name):
    whole = Phi3Config.from_dict(SMALLEST | LONG)
    served = whole.for_context(max_context_len)
    assert served.rope.scaling.factors == tuple(LONGROPE[name])
    assert served.rope.amplitude == whole.rope.amplitude != 1.0
    assert served.context_len == whole.context_len == 8192
