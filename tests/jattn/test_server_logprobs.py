"""Log-probabilities as the server words them, whatever the tokenizer."""

import pytest

from jattn.server.logprobs import for_chat
from jattn.serving.steps.logprobs import Logprob
from tests.jattn.test_text import byte_level, saved, unigram_byte_fallback


@pytest.mark.parametrize("make", [byte_level, unigram_byte_fallback])
def test_bytes_of_tokens_join_to_the_text(make, tmp_path):
    tokenizer = saved(make(), tmp_path)
    text = "a 😀 é"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    found = [{token: Logprob(-1.0, 1, tokenizer.decode([token], False))} for token in tokens]
    content = for_chat(tokens, found, 1, tokenizer)["content"]
    assert any(entry["token"] == "\N{REPLACEMENT CHARACTER}" for entry in content)
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [entry["bytes"] for entry in content]
