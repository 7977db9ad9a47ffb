"""Text survives the tokenizer, and a stream of tokens gives exactly the text of the whole."""

import functools
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from jattn.serving.frontend.text import StreamDecoder, Tokenizer

CORPUS = ["def main(argv):\n    return 0\n", "class Café:\n    '''naïve'''\n", "日本語 日本語 日本", "price: 5 €\n"] * 4


def byte_level():
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", library.token_to_id("<|begin|>"))]
    )
    library.add_tokens([AddedToken("<tool>", special=False)])
    return library


def byte_fallback():
    """As SentencePiece checkpoints have it: words with a leading mark, all else in byte tokens."""
    words = ["<unk>", "▁", "▁de", "f", "d", "e", "a", "▁a", "b", "日", "\ufffd"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    library = LibraryTokenizer(models.BPE(vocabulary, [("d", "e"), ("▁", "de"), ("▁", "a")][2:], byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def trained(model, trainer, pre_tokenizer, decoder):
    library = LibraryTokenizer(model)
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoder
    library.train_from_iterator(CORPUS, trainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False))
    library.add_special_tokens(["<|end|>"])
    return library


def byte_level_with_prefix_space():
    """As Llama 3 and its relatives have it: a pattern splits first."""
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    return library


def bpe_with_suffix():
    """As the first BPE models have it: the end of a word is part of its last token."""
    trainer = functools.partial(trainers.BpeTrainer, end_of_word_suffix="</w>")
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    return trained(model, trainer, pre_tokenizers.Whitespace(), decoders.BPEDecoder())


def unigram():
    """As T5 and its relatives have it."""
    trainer = functools.partial(trainers.UnigramTrainer, unk_token="<unk>")
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def unigram_byte_fallback():
    """As Gemma's relatives have it: a mark for each space, and none is stripped."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [(piece, -float(rank)) for rank, piece in enumerate("▁abdeé\ufffd", 1)]
    library = LibraryTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def word_piece():
    return trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer,
        pre_tokenizers.Whitespace(),
        decoders.WordPiece(),
    )


KINDS = [
    byte_level,
    byte_level_with_prefix_space,
    byte_fallback,
    bpe_with_suffix,
    unigram,
    unigram_byte_fallback,
    word_piece,
]
BYTE_FALLBACK = [byte_fallback, unigram_byte_fallback]


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def any_tokenizer(request, tmp_path_factory):
    return saved(request.param(), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return saved(byte_level(), tmp_path_factory.mktemp("checkpoint"))


def saved(library, folder):
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def split(data, ids):
    """`ids` cut into the pieces of a stream."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@given(text=st.text(max_size=60))
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.token(ids[0]) == "<|begin|>"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|>" + text
    assert max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize("text", ["x", "x y z " * 10])
def test_tokenizer_ignores_the_files_truncation_and_padding(tokenizer, tmp_path, text):
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=9)
    assert saved(library, tmp_path).encode(text) == tokenizer.encode(text)


def test_tokenizer_knows_special_tokens(tokenizer):
    end, tool = tokenizer.vocab_size, tokenizer.vocab_size - 1
    assert tokenizer.token(end) is None
    assert tokenizer.token(tool) == "<tool>"
    assert [tokenizer.is_special(i) for i in (0, 1, 2, tool, end)] == [True, True, False, False, False]


def test_tokenizer_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no `tokenizer\.json`.*" + tmp_path.name):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"version": "1.0"}), "\0\0"])
def test_tokenizer_broken_file_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"`tokenizer\.json` must be .*" + tmp_path.name):
        Tokenizer(tmp_path)


def test_tokenizer_half_of_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(ValueError, match="must be valid Unicode"):
        tokenizer.encode("a\ud83d")


@given(text=st.text(max_size=60), data=st.data())
def test_stream_of_text_gives_the_text(any_tokenizer, text, data):
    ids = any_tokenizer.encode(text)
    stream = StreamDecoder(any_tokenizer)
    pieces = [stream.push(piece) for piece in split(data, ids)] + [stream.finish()]
    assert "".join(pieces) == any_tokenizer.decode(ids)
    if "\ufffd" not in text and "<0x" not in text:  # a byte's token may be spelt out, and be no character alone
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data(), skip_special_tokens=st.booleans())
def test_stream_of_any_tokens_gives_their_text(any_tokenizer, data, skip_special_tokens):
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 3), max_size=60))
    stream = StreamDecoder(any_tokenizer, skip_special_tokens)
    pieces = [stream.push(piece) for piece in split(data, ids)] + [stream.finish()]
    expected = without_wrong_bytes(any_tokenizer, ids, skip_special_tokens)
    assert "".join(pieces) == any_tokenizer.decode(expected, skip_special_tokens)


def without_wrong_bytes(tokenizer, ids, skip_special_tokens):
    """`ids` with U+FFFD in the place of each byte token that stands after the last whole character of its run."""
    replacement = tokenizer.encode("\ufffd", add_special_tokens=False)[-1:]
    ids = [i for i in ids if tokenizer.token(i) and not (skip_special_tokens and tokenizer.is_special(i))]
    result = []
    for are_bytes, run in itertools.groupby(ids, lambda i: tokenizer.byte(i) is not None):
        run = list(run)
        whole = whole_characters(tokenizer, run) if are_bytes else len(run)
        result += run[:whole] + replacement * (len(run) - whole)
    return result


def whole_characters(tokenizer, ids):
    """How many of the first tokens end with a whole character."""
    return next(end for end in range(len(ids), -1, -1) if ends_whole(tokenizer, ids[:end]))


def ends_whole(tokenizer, ids):
    run = list(itertools.takewhile(lambda byte: byte is not None, map(tokenizer.byte, reversed(ids))))
    try:
        bytes(reversed(run)).decode()
    except UnicodeDecodeError:
        return False
    return True


def test_stream_gives_each_character_with_its_last_token(tokenizer):
    text = "a🙂b€"
    ids = tokenizer.encode(text)[1:]
    assert len(ids) > len(text)
    stream = StreamDecoder(tokenizer)
    for end, token_id in enumerate(ids, 1):
        given_before = tokenizer.decode(ids[: end - 1]).rstrip("\ufffd")
        assert given_before + stream.push([token_id]) == tokenizer.decode(ids[:end]).rstrip("\ufffd")
    assert stream.finish() == ""


@pytest.mark.parametrize("any_tokenizer", BYTE_FALLBACK, indirect=True, ids=lambda make: make.__name__)
@given(text=st.text("ab \n\0é日🙂", max_size=40))
def test_stream_gives_each_character_with_its_last_byte_token(any_tokenizer, text):
    stream, given_out, ids = StreamDecoder(any_tokenizer), "", any_tokenizer.encode(text)
    for end, token_id in enumerate(ids, 1):
        given_out += stream.push([token_id])
        assert given_out == any_tokenizer.decode(ids[: whole_characters(any_tokenizer, ids[:end])])
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("run", "pieces", "rest"),
    [
        ([0x0A, 0x0A], ["\n", "\n"], ""),
        ([0xC3, 0xA9, 0x0A], ["", "é", "\n"], ""),
        ([0x0A, 0xE6, 0x97], ["\n", "", ""], "\ufffd\ufffd"),
        ([0x0A, 0xE6, 0x97, 0x41, 0x42], ["\n", "", "", "\ufffd\ufffd\ufffd", "\ufffd"], ""),
        ([0xFF, 0x0A], ["\ufffd", "\ufffd"], ""),
        ([0xED, 0xA0, 0x80], ["", "", "\ufffd\ufffd\ufffd"], ""),  # half of a surrogate pair
        ([0xC0, 0x8A], ["\ufffd", "\ufffd"], ""),  # a newline in more bytes than it needs
    ],
)
def test_stream_of_byte_tokens(tmp_path, run, pieces, rest):
    tokenizer = saved(unigram_byte_fallback(), tmp_path)
    ids = {tokenizer.byte(i): i for i in range(tokenizer.vocab_size)}
    (a,) = tokenizer.encode("a")
    stream = StreamDecoder(tokenizer)
    assert [stream.push([a]), *(stream.push([ids[byte]]) for byte in run)] == ["a", *pieces]
    assert stream.push([a]) == rest + "a"
    assert [stream.push([ids[byte]]) for byte in run] == pieces  # the end of a wrong run is the end of what is wrong
    assert stream.finish() == rest


def test_space_after_a_wrong_byte_is_not_the_first(tmp_path):
    tokenizer = saved(byte_fallback(), tmp_path)
    ids = [next(i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == token) for token in ("<0xFF>", "▁de")]
    stream = StreamDecoder(tokenizer)
    assert [stream.push([i]) for i in ids] == ["\ufffd", " de"]
    assert tokenizer.decode(ids) == "\ufffd de"


def test_tokens_that_only_look_like_bytes_are_text(tmp_path):
    library = byte_fallback()
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer = saved(library, tmp_path)
    ids = tokenizer.encode("\n日", add_special_tokens=False)
    assert "<0x0A>" in [tokenizer.token(i) for i in ids]
    assert {tokenizer.byte(i) for i in ids} == {None}
    stream = StreamDecoder(tokenizer)
    assert "".join(stream.push([i]) for i in ids) == tokenizer.decode(ids)


def test_stream_holds_half_of_a_character_over_special_tokens(tokenizer):
    first, *rest = tokenizer.encode("🙂")[1:]
    special = [0, 1, tokenizer.vocab_size] * 40
    stream = StreamDecoder(tokenizer)
    assert stream.push([first, *special]) == ""
    assert [stream.push([i, *special]) for i in rest] == ["", "", "🙂"]


def test_stream_finish_gives_half_of_a_character_and_starts_anew(tokenizer):
    ids = tokenizer.encode("🙂")[1:]
    stream = StreamDecoder(tokenizer)
    assert stream.push(ids[:2]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(ids) == "🙂"


@pytest.mark.parametrize("any_tokenizer", [byte_level, byte_fallback], indirect=True, ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", ["a b", "a🙂", "日本語", "a\n"])
def test_stream_cost_does_not_grow(any_tokenizer, monkeypatch, text):
    ids = any_tokenizer.encode(text * 300)
    decode, lengths = Tokenizer.decode, []
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, skip: lengths.append(len(ids)) or decode(self, ids, skip)
    )
    stream = StreamDecoder(any_tokenizer)
    for token_id in ids:
        stream.push([token_id])
    assert 8 < max(lengths) < 32


def test_stream_of_invalid_bytes_flows(tokenizer):
    (byte,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == "ÿ"]
    stream = StreamDecoder(tokenizer)
    assert [stream.push([byte]) for _ in range(100)] == ["", *["\ufffd"] * 99]
    assert stream.finish() == "\ufffd"
