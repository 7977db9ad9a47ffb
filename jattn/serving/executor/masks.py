"""Masks: the tokens that may come next in each row of a launch, as bits that are sent with the choice of tokens."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.serving.request import Request
from jattn.serving.steps.logit_rules import TokenMasks
from jattn.serving.structured.compiler import llguidance

_ALL = np.uint32(2**32 - 1)


def empty_masks(num_rows: int, vocab_size: int) -> TokenMasks:
    """Rows in which all tokens may come, for the host to fill."""
    bits: Any = np.zeros((num_rows, _words(vocab_size)), np.uint32)
    in_force: Any = np.zeros(num_rows, np.bool_)
    return TokenMasks(in_force=in_force, bits=bits)


def masks_of(requests: Sequence[Request | None], num_rows: int, vocab_size: int) -> TokenMasks:
    """The masks of a launch; a grammar that leaves its request no token is told that the text is whole.

    Args:
        requests: Of the first rows, in their order.
        num_rows: All of them, padding included.
    """
    masks = empty_masks(num_rows, vocab_size)
    rows = [(i, request) for i, request in enumerate(requests) if request and request.grammar and not request.finished]
    if not rows:
        return masks
    grammars = [request.grammar for _, request in rows if request.grammar]
    bits = np.zeros((len(rows), _words(grammars[0].num_tokens)), np.uint32)
    matchers = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]
    _executor().unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(rows))
    for of_row, grammar, (i, request) in zip(bits, grammars, rows, strict=True):
        masks.in_force[i] = True  # of one that has not begun too: it may in the midst of drafted tokens
        if not grammar.has_begun:
            masks.bits[i] = _ALL
            continue
        for token in grammar.end_ids - _ends(request):
            of_row[token // 32] &= ~np.uint32(1 << token % 32)
        if not of_row.any():
            grammar.end()
        masks.bits[i] = of_row[: masks.bits.shape[1]]
    return masks


def _ends(request: Request) -> frozenset[int]:
    """Tokens that may end the request now."""
    return request.stop_ids if len(request.generated) >= request.params.min_tokens else frozenset()


def _words(num_tokens: int) -> int:
    """Words of 32 bits that hold a bit for each token."""
    return -(-num_tokens // 32)


@functools.cache
def _executor() -> Any:
    """llguidance's threads."""
    return llguidance().LLExecutor()
