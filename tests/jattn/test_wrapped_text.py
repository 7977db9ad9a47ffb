"""The text model inside a model that sees too, as a checkpoint shows it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jattn.checkpoint import Checkpoint

WRAPPER = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {"layers": 2}}
TEXT = {"model_type": "llama", "hidden_size": 3, "num_hidden_layers": 2}
OLD = ("language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.a", "multi_modal_projector.b")
NEW = ("model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.a", "model.multi_modal_projector.b")


def checkpoint(folder, names=OLD, text=None, **wrapper):
    config = WRAPPER | {"text_config": TEXT | (text or {})} | wrapper
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.full(3, number, np.float32) for number, name in enumerate(names)}
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder)


@pytest.mark.parametrize("names", [OLD, NEW])
def test_text_models_tensors_have_the_names_that_they_have_alone(tmp_path, names):
    text = checkpoint(tmp_path, names)
    assert set(text.tensor_names) == {"model.norm.weight", "lm_head.weight"}
    np.testing.assert_array_equal(text.read("lm_head.weight", (3,)), [1, 1, 1])


def test_sentences_name_tensors_as_they_are_stored(tmp_path):
    with pytest.raises(ValueError, match=r"'language_model\.lm_head\.weight' .* must have shape \[4\]"):
        checkpoint(tmp_path).read("lm_head.weight", (4,))


def test_tensor_of_no_known_part_is_left_for_the_model_to_refuse(tmp_path):
    assert "audio_tower.a" in checkpoint(tmp_path, (*OLD, "audio_tower.a")).tensor_names


def test_configuration_is_the_text_models(tmp_path):
    text = checkpoint(tmp_path, text={"eos_token_id": 1}, eos_token_id=[1, 106], quantization_config=None)
    assert text.architecture == "LlavaForConditionalGeneration"
    assert text.config == TEXT | {
        "architectures": ["LlavaForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "tie_word_embeddings": False,
    }
    assert text.cut_down(1).config["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("text", "wrapper", "names", "tied"),
    [
        ({}, {}, OLD, False),
        ({}, {}, OLD[:1], True),
        ({"tie_word_embeddings": True}, {}, OLD, True),
        ({"tie_word_embeddings": False}, {}, OLD[:1], False),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, OLD, True),
    ],
)
def test_embedding_is_tied_as_the_wrapper_says_or_the_text_model_or_the_tensors(tmp_path, text, wrapper, names, tied):
    assert checkpoint(tmp_path, names, text, **wrapper).config["tie_word_embeddings"] is tied
