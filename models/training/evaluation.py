"""Held-out loss of a model, file by file, and the figures that go beside it."""

from collections.abc import Callable

import numpy as np

from . import baselines
from .windows import cut_windows, pad_rows

Documents = dict[str, np.ndarray]
RowLosses = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def nats_by_file(row_losses: RowLosses, documents: Documents, window: int, rows: int) -> dict[str, float]:
    """Mean nats per token of each document, in windows that do not see one another.

    Args:
        row_losses: The summed loss of each row of (inputs, targets, weights).
        documents: Tokens by file name.
        window: Tokens a window.
        rows: Windows a call of `row_losses`.
    """
    windows = cut_windows(documents, window)
    padded = pad_rows(windows, rows)
    sums = np.concatenate(
        [
            row_losses(padded.inputs[i : i + rows], padded.targets[i : i + rows], padded.weights[i : i + rows])
            for i in range(0, len(padded.inputs), rows)
        ]
    )
    totals = dict.fromkeys(documents, 0.0)
    for name, total in zip(windows.names, sums, strict=False):
        totals[name] += float(total)
    return {name: total / (len(documents[name]) - 1) for name, total in totals.items()}


def mean_nats(by_file: dict[str, float], documents: Documents) -> float:
    """Mean over tokens of per-file means."""
    counts = [len(documents[name]) - 1 for name in by_file]
    return float(np.average(list(by_file.values()), weights=counts))


def figures(
    held_out_nats: dict[str, float],
    documents: dict[str, Documents],
    texts: dict[str, dict[str, str]],
    vocab_size: int,
) -> dict:
    """The model's held-out loss beside the trivial baselines', and the small files' one by one."""
    train = np.concatenate([tokens[:-1] for tokens in documents["train"].values()])
    held_out = documents["held_out"]
    tokens = list(held_out.values())
    num_bytes = sum(len(text.encode()) for text in texts["held_out"].values())
    bigram = baselines.best_bigram(train, list(documents["validation"].values()), vocab_size)

    def both(nats: float) -> dict[str, float]:
        return {
            "nats_per_token": round(nats, 4),
            "bits_per_byte": round(baselines.bits_per_byte(nats, tokens, num_bytes), 4),
        }

    train_text, text = ("".join(texts[split].values()).encode() for split in ("train", "held_out"))
    return {
        "held_out": both(mean_nats(held_out_nats, held_out)),
        "baselines": {
            "bigram": both(bigram.nats(tokens)) | {"k": bigram.k},
            "unigram": both(baselines.unigram_nats(train, tokens, vocab_size)),
            "lzma_after_training_text": {"bits_per_byte": round(baselines.lzma_bits_per_byte(train_text, text), 4)},
            "bz2": {"bits_per_byte": round(baselines.bz2_bits_per_byte(text), 4)},
        },
        "sizes": {
            split: {
                "files": len(documents[split]),
                "bytes": sum(len(text.encode()) for text in texts[split].values()),
                "tokens": sum(len(tokens) - 1 for tokens in documents[split].values()),
            }
            for split in documents
        },
        "held_out_files": {
            name: {
                "tokens": len(held_out[name]) - 1,
                "nats_per_token": round(nats, 4),
                "bigram_nats_per_token": round(bigram.nats([held_out[name]]), 4),
            }
            for name, nats in held_out_nats.items()
        },
    }
