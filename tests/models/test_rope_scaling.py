"""Scalings of rotary embedding that are given beside a checkpoint, and how long the texts are that they are for."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn_models.gpt_oss import GptOssConfig
from jattn_models.llama_config import LlamaConfig
from jattn_models.mistral import MistralConfig
from jattn_models.olmo3 import Olmo3Config
from jattn_models.qwen2 import Qwen2Config
from jattn_models.qwen3 import Qwen3Config
from jattn_models.rope_scaling import DynamicScaling, YarnScaling
from tests.models.harness.golden_fields import DYNAMIC, YARN
from tests.models.harness.goldens import GOLDEN, assert_golden, dense_logits, golden
from tests.models.harness.smallest import SMALLEST

CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # as Qwen's cards have it


def loaded(checkpoint):
    return model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=jnp.float32)


def with_context(case, context_len):
    checkpoint = Checkpoint(GOLDEN / case)
    checkpoint.config |= {"max_position_embeddings": context_len}
    return checkpoint


def test_dynamic_scaling_goes_by_the_longest_text_that_is_served():
    """transformers' frequencies where a text of so many tokens comes at once."""
    tokens = golden("gqa", "tokens")[2]
    with np.load(GOLDEN / "gqa" / "golden.npz") as arrays:
        logits, frequencies = arrays["dynamic_logits"], arrays["dynamic_frequencies"]
    given = {name: value for name, value in DYNAMIC["rope_parameters"].items() if name != "rope_theta"}
    checkpoint = with_context("gqa", DYNAMIC["max_position_embeddings"]).with_rope_scaling(given)
    model = loaded(checkpoint.for_context(len(tokens)))
    np.testing.assert_allclose(model.config.rope.frequencies(), frequencies, rtol=1e-6)
    assert_golden(dense_logits(model, tokens), logits)
    assert model.context_len == 64
    longest = loaded(checkpoint).config.rope.frequencies()
    assert (longest[1:] < frequencies[1:]).all()
    unscaled = loaded(checkpoint.for_context(16)).config.rope.frequencies()
    np.testing.assert_allclose(unscaled, loaded(Checkpoint(GOLDEN / "gqa")).config.rope.frequencies(), rtol=1e-7)


def test_given_yarn_is_that_of_a_checkpoint_which_has_it():
    checkpoint = Checkpoint(GOLDEN / "yarn")
    checkpoint.config["rope_parameters"] = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}
    tokens, expected = golden("yarn", "tokens")[2], golden("yarn")[2]
    assert np.abs(dense_logits(loaded(checkpoint), tokens) - expected).max() > 1
    scaled = checkpoint.with_rope_scaling({name: value for name, value in YARN.items() if name != "rope_theta"})
    assert_golden(dense_logits(loaded(scaled), tokens), expected)
    assert "rope_scaling" not in checkpoint.config
    assert nnx.graphdef(loaded(scaled)) != nnx.graphdef(loaded(checkpoint))  # by which steps on disk are found
    assert checkpoint.with_rope_scaling(None) is checkpoint


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize(
    ("scaling", "kind", "context_len"),
    [
        (CARD, YarnScaling, 131072),
        ({"type": "yarn", "factor": 4.0}, YarnScaling, 163840),
        ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768}, YarnScaling, 40960),
        ({"type": "dynamic", "factor": 2.5}, DynamicScaling, 102400),
        ({"type": "linear", "factor": 2.0}, None, 40960),
    ],
)
def test_scaling_says_how_long_texts_may_be(config_class, scaling, kind, context_len):
    fields = SMALLEST | {"max_position_embeddings": 40960, "rope_scaling": scaling}
    config = config_class.from_dict(fields)
    assert config.context_len == context_len
    assert kind is None or isinstance(config.rope.scaling, kind)


def test_window_as_long_as_the_models_own_context_is_one_in_longer_texts():
    fields = SMALLEST | {"max_position_embeddings": 4096, "sliding_window": 4096}
    (segment,) = MistralConfig.from_dict(fields).segments
    assert [kind.window_left for kind in segment.period] == [None]
    (segment,) = MistralConfig.from_dict(fields | {"rope_scaling": {"type": "yarn", "factor": 2.0}}).segments
    assert [kind.window_left for kind in segment.period] == [4095]


def test_models_that_have_grown_are_made_for_what_they_say():
    assert GptOssConfig.from_dict(SMALLEST).context_len == 131072
    assert Olmo3Config.from_dict(SMALLEST | {"rope_scaling": CARD | {"factor": 2.0}}).context_len == 65536


def test_scaling_for_layers_with_embeddings_of_their_own_is_refused():
    with pytest.raises(ValueError, match="`rope_scaling` must be None for Gemma3ForCausalLM, whose types of layers"):
        Checkpoint(GOLDEN / "gemma3").with_rope_scaling(CARD)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"rope_type": "ntk"}, NotImplementedError, "`rope_type` must be one of default, linear, .* Got 'ntk'"),
        ({"rope_type": "dynamic"}, ValueError, "`factor` .* must be a finite number above 0. Got None"),
        ('{"rope_type": "dynamic", "factor": 2.0, "beta": 1}', NotImplementedError, "'dynamic' reads .* Got 'beta'"),
        ({"factor": 2.0}, ValueError, "`rope_scaling` must be None, or an object such as"),
    ],
)
def test_scaling_that_is_none_is_named(given, error, message):
    with pytest.raises(error, match=message):
        loaded(Checkpoint(GOLDEN / "gqa").with_rope_scaling(given))
