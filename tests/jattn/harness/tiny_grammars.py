"""Grammars over the tiny model's vocabulary: an end token, each byte, pairs of digits and of letters."""

import functools
import itertools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jattn.serving.structured.compiler import GrammarCompiler
from jattn.serving.structured.params import StructuredOutputsParams
from tests.jattn.harness.tiny import VOCAB

END = 0


@functools.cache
def tokenizer():
    pairs = itertools.chain(itertools.product("0123456789", repeat=2), itertools.product("abcdefghijklm", repeat=2))
    spelled = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)][:VOCAB]
    made = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(spelled)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


@functools.cache
def compiler():
    return GrammarCompiler(lambda: (tokenizer().to_str(), VOCAB), (END,))


def grammar(**asked):
    """What structured outputs come to."""
    return compiler().compile(StructuredOutputsParams(**asked))


def text(tokens):
    return tokenizer().decode(tokens)
