"""The tokenizer: byte-level BPE that writes any UTF-8 text and begins every prompt as a document begins."""

from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCAB_SIZE = 2048


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of VOCAB_SIZE entries, the one special token and all 256 bytes included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
    )
    return tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids of one document between two end-of-text tokens, int32."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return np.array([END_OF_TEXT_ID, *ids, END_OF_TEXT_ID], np.int32)


def join_documents(documents: Iterable[np.ndarray]) -> np.ndarray:
    """One stream of tokens, a single end-of-text token between neighbours and at both ends."""
    return np.concatenate([*(document[:-1] for document in documents), [END_OF_TEXT_ID]]).astype(np.int32)
