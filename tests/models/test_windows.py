"""Sliding windows as each architecture's configuration states them."""

import pytest

from jattn_models.gemma3 import Gemma3Config
from jattn_models.layer_pattern import LayerKind, Segment
from jattn_models.mistral import MistralConfig
from jattn_models.mixtral import MixtralConfig
from jattn_models.phi3 import Phi3Config
from jattn_models.qwen2 import Qwen2Config
from jattn_models.qwen3 import Qwen3Config
from jattn_models.qwen3_moe import Qwen3MoeConfig

SMALLEST = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 64,
}
FULL, SLIDING = "full_attention", "sliding_attention"
USED = {"use_sliding_window": True, "sliding_window": 8}


def windows(config):
    """Each layer's window_left."""
    by_layer = {layer: kind.window_left for layers, kind in config.stacks for layer in layers}
    return [by_layer[layer] for layer in range(config.num_layers)]


@pytest.mark.parametrize(
    ("config_class", "fields", "expected"),
    [
        (Gemma3Config, {"sliding_window": 8, "num_hidden_layers": 8}, [7] * 5 + [None] + [7] * 2),
        (Gemma3Config, {"sliding_window": 8, "sliding_window_pattern": 2}, [7, None] * 2),
        (Gemma3Config, {"sliding_window": 8, "layer_types": [FULL, SLIDING] * 2}, [None, 7] * 2),
        (Gemma3Config, {"sliding_window": 64}, [None] * 4),
        (MistralConfig, {"sliding_window": 8}, [7] * 4),
        (MistralConfig, {"sliding_window": 1}, [0] * 4),
        (MistralConfig, {"sliding_window": None}, [None] * 4),
        (MistralConfig, {"max_position_embeddings": 8192}, [4095] * 4),
        (MistralConfig, {"sliding_window": 64}, [None] * 4),
        (MistralConfig, {"sliding_window": 8, "layer_types": [SLIDING] * 4}, [7] * 4),
        (MixtralConfig, {}, [None] * 4),
        (MixtralConfig, {"sliding_window": 8}, [7] * 4),
        (Phi3Config, {}, [None] * 4),
        (Phi3Config, {"sliding_window": 8}, [7] * 4),
        (Qwen2Config, {"sliding_window": 8, "max_window_layers": 0}, [None] * 4),
        (Qwen2Config, {**USED, "max_window_layers": 1}, [None, 7, 7, 7]),
        (Qwen2Config, {**USED, "max_window_layers": 0}, [7] * 4),
        (Qwen2Config, USED, [None] * 4),
        (Qwen2Config, {**USED, "sliding_window": None, "max_window_layers": 0}, [None] * 4),
        (Qwen3Config, {**USED, "layer_types": [FULL, SLIDING] * 2}, [None, 7] * 2),
        (Qwen3Config, {"layer_types": [FULL] * 4}, [None] * 4),
        (Qwen3MoeConfig, {"sliding_window": 8}, [None] * 4),
        (Qwen3MoeConfig, USED, [7] * 4),
        (Qwen3MoeConfig, {**USED, "decoder_sparse_step": 2}, [7] * 4),
    ],
)
def test_window_of_each_layer(config_class, fields, expected):
    assert windows(config_class.from_dict(SMALLEST | fields)) == expected


def test_layers_without_windows_are_one_segment_however_many():
    config = Qwen2Config.from_dict(SMALLEST | {"num_hidden_layers": 10**11})
    assert config.segments == (Segment(range(10**11), (LayerKind(),)),)


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (MistralConfig, {"sliding_window": 0}, "`sliding_window` .* must be an integer above 0. Got 0"),
        (Qwen2Config, {**USED, "sliding_window": -1}, "`sliding_window` .* must be an integer above 0. Got -1"),
        (Qwen2Config, {**USED, "max_window_layers": -1}, "`max_window_layers` .* must be a whole number .* Got -1"),
        (Qwen2Config, {**USED, "layer_types": [SLIDING]}, "`layer_types` must be a list of 4 types"),
        (Gemma3Config, {"sliding_window_pattern": 0}, "`sliding_window_pattern` .* must be an integer above 0. Got 0"),
        (Gemma3Config, {"num_hidden_layers": 10**11}, "`num_hidden_layers` must be at most 10000"),
        (Qwen3Config, {"layer_types": [SLIDING] * 4}, "only with `sliding_window` in use"),
        (Qwen2Config, {**USED, "num_hidden_layers": 10**11}, "`num_hidden_layers` must be at most 10000"),
    ],
)
def test_wrong_field_is_named(config_class, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class.from_dict(SMALLEST | fields)


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (Qwen2Config, {**USED, "layer_types": ["linear_attention"] * 4}, "Got 'linear_attention'"),
        (MistralConfig, {"sliding_window": 8, "layer_types": [SLIDING, FULL] * 2}, "layers are alike. Got 'full_"),
        (Phi3Config, {"layer_types": [SLIDING] * 4}, "layers are alike. Got 'sliding_attention'"),
    ],
)
def test_unsupported_field_is_named(config_class, fields, message):
    with pytest.raises(NotImplementedError, match=message):
        config_class.from_dict(SMALLEST | fields)
