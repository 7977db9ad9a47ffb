"""What a trivial predictor gets on the same tokens, and what a compressor gets on the same text."""

import bz2
import lzma
import math
from collections.abc import Iterable

import numpy as np


def unigram_nats(train: np.ndarray, documents: Iterable[np.ndarray], vocab_size: int) -> float:
    """Mean nats per token under the training tokens' frequencies, one added to each count."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    log_probabilities = np.log(counts / counts.sum())
    return float(np.mean(np.concatenate([log_probabilities[document[1:]] for document in documents])) * -1)


class Bigram:
    """Counts of neighbouring tokens in the training stream, `k` added to each."""

    def __init__(self, train: np.ndarray, vocab_size: int, k: float):
        pairs = train[:-1].astype(np.int64) * vocab_size + train[1:]
        self.counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
        self.totals = self.counts.sum(axis=1)
        self.vocab_size = vocab_size
        self.k = k

    def nats(self, documents: Iterable[np.ndarray]) -> float:
        """Mean nats per token, the first token of a document not counted."""
        losses = [
            np.log(self.totals[document[:-1]] + self.k * self.vocab_size)
            - np.log(self.counts[document[:-1], document[1:]] + self.k)
            for document in documents
        ]
        return float(np.mean(np.concatenate(losses)))


def best_bigram(train: np.ndarray, validation: list[np.ndarray], vocab_size: int) -> Bigram:
    """The bigram whose `k` does best on the validation documents."""
    bigram = Bigram(train, vocab_size, k=1.0)

    def loss(k: float) -> float:
        bigram.k = k
        return bigram.nats(validation)

    bigram.k = min((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), key=loss)
    return bigram


def bits_per_byte(nats_per_token: float, documents: list[np.ndarray], num_bytes: int) -> float:
    """Mean nats per predicted token as bits per byte of the documents' text."""
    return nats_per_token * sum(len(document) - 1 for document in documents) / num_bytes / math.log(2)


def bz2_bits_per_byte(text: bytes) -> float:
    """Of the text alone."""
    return 8 * len(bz2.compress(text)) / len(text)


def lzma_bits_per_byte(train: bytes, text: bytes) -> float:
    """Of the text after the training text, which the compressor has seen in full."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 26}]
    sizes = [len(lzma.compress(data, filters=filters)) for data in (train, train + text)]
    return 8 * (sizes[1] - sizes[0]) / len(text)
