"""Text of byte-level tokens in a stream: the tokenizer's own, from any split of the tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.serving.frontend.byte_text import ByteTextDecoder, stream_decoder
from jattn.serving.frontend.text import StreamDecoder, Tokenizer
from tests.jattn.test_text import byte_fallback, byte_level, byte_level_with_prefix_space, saved, split, word_piece


@pytest.fixture(scope="module", params=[byte_level, byte_level_with_prefix_space], ids=lambda make: make.__name__)
def tokenizer(request, tmp_path_factory):
    return saved(request.param(), tmp_path_factory.mktemp("checkpoint"))


@given(data=st.data(), skip_special_tokens=st.booleans())
def test_any_tokens_give_their_text(tokenizer, data, skip_special_tokens):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    stream = ByteTextDecoder(tokenizer, skip_special_tokens)
    pieces = [stream.push(piece) for piece in split(data, ids)] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens)
    assert stream.push(ids) + stream.finish() == tokenizer.decode(ids, skip_special_tokens)  # it is as new


@given(text=st.text(max_size=60), data=st.data())
def test_each_piece_is_what_the_other_decoder_gives(tokenizer, text, data):
    pieces = split(data, tokenizer.encode(text))
    ours, others = ByteTextDecoder(tokenizer), StreamDecoder(tokenizer)
    if "\ufffd" not in text:  # which the other one takes for half of a character
        assert [ours.push(piece) for piece in pieces] == [others.push(piece) for piece in pieces]
        assert ours.finish() == others.finish() == ""


def test_nothing_is_decoded_again(tokenizer, monkeypatch):
    ids = tokenizer.encode("naïve 🙂")
    text = tokenizer.decode(ids)
    monkeypatch.setattr(Tokenizer, "decode", None)
    stream = stream_decoder(tokenizer)
    assert "".join(stream.push([i]) for i in ids) == text


@pytest.mark.parametrize("make", [byte_fallback, word_piece], ids=lambda make: make.__name__)
def test_tokens_that_are_no_bytes_are_left_to_the_other_decoder(make, tmp_path):
    assert isinstance(stream_decoder(saved(make(), tmp_path)), StreamDecoder)
