"""The two forms of attention over latent rows, and from how many new tokens on which of them costs less."""

import dataclasses
import math
from typing import NamedTuple

from jattn_kernels.spec import AttentionSpec

# What an H200 takes for an operation of each kind, in those of a large product (740 TFLOP/s), and for a byte: both
# kinds of attention as 512 new tokens of 16 heads behind 8,192 have it.
_EXPANDED, _ABSORBED, _BYTE = 740 / 295, 740 / 496, 740 / 4.386
_ITEMSIZE = 2  # of bfloat16


class HeadWidths(NamedTuple):
    """Of the heads that latent rows can be made into.

    Attributes:
        nope: Numbers of a key that do not turn; those that do are the row's, and all heads share them.
        value: Numbers of a value.
    """

    nope: int
    value: int


def expanded_spec(spec: AttentionSpec, heads: HeadWidths) -> AttentionSpec:
    """The rules of absorbed attention, over keys and values of heads."""
    rope = spec.head_dim - spec.value_dim
    widths = {"head_dim": heads.nope + rope, "v_head_dim": heads.value}
    return dataclasses.replace(spec, num_kv_heads=spec.num_q_heads, page_layout="NHD", **widths)


def choose_fewest_expanded(spec: AttentionSpec, heads: HeadWidths) -> int | None:
    """From how many new tokens of a sequence on its prefix's rows are made keys and values; None if never.

    Of each row of the prefix, N heads, a compressed row of C numbers with R that turn, and heads of D + R and V:

        expanded: 2 N C (D + V) operations make keys and values, and 2 N (D + R + V) are each new token's attention;
            rows are read, gathered and read again, keys and values written and read: 2 (C + R) + 2 N (D + R + V)
            numbers more than the one reading of rows that both forms do
        absorbed: 2 N (2 C + R) operations for each new token

    What a new token's own queries, or own keys and values, take beside that is N C (D + V) products in either form. So
    the prefix's length is of no account, nor is, nearly, the number of heads.

    Args:
        spec: Of absorbed attention.
    """
    num_heads, latent, rope = spec.num_q_heads, spec.value_dim, spec.head_dim - spec.value_dim
    of_head = heads.nope + rope + heads.value
    made = 2 * num_heads * latent * (heads.nope + heads.value)
    moved = _ITEMSIZE * (2 * (latent + rope) + 2 * num_heads * of_head)
    saved = 2 * num_heads * (_ABSORBED * (2 * latent + rope) - _EXPANDED * of_head)
    return math.ceil((made + _BYTE * moved) / saved) if saved > 0 else None
