"""A checkpoint's generation_config.json says how to sample where the caller does not."""

from pathlib import Path

import pytest

from jattn.serving.frontend.default_sampling import default_sampling


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 3}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20, "min_p": None}, {"top_k": 20}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"repetition_penalty": 1.1, "min_p": 0.05}, {"repetition_penalty": 1.1, "min_p": 0.05}),
    ],
)
def test_sampling_is_what_the_file_says(config, expected):
    assert default_sampling(config, Path("folder")) == expected


@pytest.mark.parametrize("value", ["hot", True, [1]])
def test_value_that_is_no_number_is_named(value):
    with pytest.raises(ValueError, match=r"folder/generation_config.json must give a number as `top_p`\. Got "):
        default_sampling({"top_p": value}, Path("folder"))
