"""What is read from config.json, and the sentence for what cannot be."""

import pytest

from jattn_models.llama_config import LlamaConfig
from jattn_models.rope import Rope
from jattn_models.rope_scaling import Llama3Scaling

SMALLEST = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = Rope(8, 5e5, Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=32))


def test_absent_fields_have_hugging_faces_defaults():
    config = LlamaConfig.from_dict(SMALLEST)
    assert (config.num_kv_heads, config.head_dim, config.context_len) == (4, 8, 2048)
    assert (config.rms_norm_eps, config.tied, config.rope) == (1e-6, False, Rope(8, 1e4))
    nothing = dict.fromkeys(["head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "tie_word_embeddings"])
    assert LlamaConfig.from_dict(SMALLEST | nothing) == config


def test_biases_are_those_that_are_asked_for():
    for fields, expected in (
        ({}, (False, False, False)),
        ({"attention_bias": True}, (True, True, False)),
        ({"mlp_bias": True}, (False, False, True)),
    ):
        config = LlamaConfig.from_dict(SMALLEST | fields)
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, Rope(8, 5e5)),
        ({"rope_theta": 500000}, Rope(8, 5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(8, 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": SCALING}, LLAMA3),
        ({"rope_theta": 5e5, "rope_scaling": {**SCALING, "rope_type": None, "type": "llama3"}}, LLAMA3),
        ({"rope_parameters": {**SCALING, "rope_theta": 5e5}}, LLAMA3),
        ({"rope_theta": 5e5, "rope_parameters": SCALING, "rope_scaling": SCALING}, LLAMA3),
        ({"rope_theta": 5e5, "rope_parameters": {}, "rope_scaling": SCALING}, LLAMA3),
    ],
)
def test_rope_is_read_as_old_and_new_transformers_write_it(fields, rope):
    assert LlamaConfig.from_dict(SMALLEST | fields).rope == rope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "`vocab_size` .* must be an integer above 0. Got None"),
        ({"hidden_size": "32"}, "`hidden_size` .* must be an integer above 0. Got '32'"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` .* must be an integer above 0. Got 0"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` .* must be an integer above 0. Got True"),
        ({"intermediate_size": 4.5}, "`intermediate_size` .* must be an integer above 0. Got 4.5"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` .* must be a finite number above 0. Got nan"),
        ({"rope_theta": -1.0}, "`rope_theta` .* must be a finite number above 0. Got -1.0"),
        ({"num_key_value_heads": 3}, "`num_attention_heads` must be a multiple of `num_key_value_heads`. Got 4 and 3"),
        ({"hidden_size": 34}, "`hidden_size` must be a multiple of `num_attention_heads` .* Got 34 and 4"),
        ({"head_dim": 7}, "`head_dim` must be even .* Got 7"),
        ({"rope_scaling": 2.0}, "must be an object. Got 2.0"),
        ({"rope_scaling": False}, "must be an object. Got False"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": SCALING}, "`rope_parameters` and .* must not differ"),
        ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` .* must be true or false. Got 'false'"),
        ({"rope_scaling": {**SCALING, "factor": None}}, "`factor` .* must be a finite number above 0. Got None"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": 4.5}}, "`low_freq_factor` must be at most"),
    ],
)
def test_wrong_field_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict(SMALLEST | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be 1.0"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu'. Got 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "`quantization_config` must be absent"),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            r"`rope_type` must be one of .*llama3.*\. Got 'proportional'",
        ),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, r"`rope_type` must be .* Got \['linear'\]"),
        ({"rope_parameters": {"type": "ntk"}}, r"`rope_type` must be one of .*llama3.*\. Got 'ntk'"),
    ],
)
def test_unsupported_field_is_named(fields, message):
    with pytest.raises(NotImplementedError, match=message):
        LlamaConfig.from_dict(SMALLEST | fields)
