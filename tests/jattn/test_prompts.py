"""Prompts come in the forms that vLLM's users give them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.frontend.prompts import listed


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ({"prompt": "text"}, ["text"]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ({"prompt": "text", "prompt_token_ids": [5, 6]}, [[5, 6]]),
        ({"prompt": "text", "prompt_token_ids": None, "cache_salt": "x"}, ["text"]),
        ([{"prompt": "a"}, {"prompt_token_ids": [5]}, "b", [6]], ["a", [5], "b", [6]]),
        (jnp.array([5, 6]), [[5, 6]]),
        ([jnp.array(5), jnp.array(6)], [[5, 6]]),
        (jnp.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (np.array([[5, 6]]), [[5, 6]]),
        ({"prompt_token_ids": jnp.array([5, 6])}, [[5, 6]]),
        ([], []),
    ],
)
def test_prompts_of_every_form_are_listed(prompts, expected):
    found = [prompt for prompt, _ in listed(prompts)]
    assert [prompt if isinstance(prompt, str) else list(map(int, prompt)) for prompt in found] == expected


def test_salt_of_a_mapping_comes_with_its_prompt():
    prompts = ["a", {"prompt": "b", "cache_salt": "x"}, {"prompt_token_ids": [5], "cache_salt": "y"}, {"prompt": "c"}]
    assert [salt for _, salt in listed(prompts)] == [None, "x", "y", None]


@pytest.mark.parametrize("prompts", [5, None, np.array(5), jnp.array(5)])
def test_what_is_no_prompt_is_refused(prompts):
    with pytest.raises(ValueError, match=r"^`prompts` must be texts or token ids, one or several\. Got "):
        listed(prompts)


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": 5}])
def test_mapping_without_a_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match=r"must have a text as `prompt`, or token ids as `prompt_token_ids`\. Got "):
        listed([prompt])


@pytest.mark.parametrize("key", ["multi_modal_data", "prompt_embeds"])
def test_mapping_of_more_than_text_is_refused(key):
    with pytest.raises(ValueError, match=f"may have the keys prompt, .* Got '{key}'"):
        listed({"prompt": "text", key: {"image": 1}})
