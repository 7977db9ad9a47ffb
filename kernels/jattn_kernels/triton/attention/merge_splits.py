"""The merge of split sequences' results in Triton, in the order of the keys (Flash-Decoding).

program (split sequence, KV head, row, block of columns)      takes in some splits at a time
"""

import dataclasses
from typing import no_type_check

import triton
import triton.language as tl

from jattn_kernels.triton.attention.config import AttendConfig
from jattn_kernels.triton.attention.logits import LN_2, LOG2_E

_AT_A_TIME = (4, 128)  # splits: at least and at most
_BLOCK = 4096  # numbers that a program has in registers
_ONE_WARP = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Constants of the merge.

    Attributes:
        num_q_heads, num_kv_heads, value_dim: Sizes.
        rows: Of a KV head: a sequence's tokens times the query heads of a group.
        block: Columns of a program.
        has_sinks: Whether they are given.
        at_a_time: Splits that are loaded together.
    """

    num_q_heads: int
    num_kv_heads: int
    value_dim: int
    rows: int
    block: int
    has_sinks: bool
    at_a_time: int

    @property
    def column_blocks(self) -> int:
        """Programs that share a row."""
        return -(-self.value_dim // self.block)

    @property
    def warps(self) -> int:
        """Of a program."""
        return 1 if self.at_a_time * self.block <= _ONE_WARP else 4

    def grid(self, most_split: int) -> int:
        """Programs for so many sequences that may be split."""
        return most_split * self.num_kv_heads * self.rows * self.column_blocks

    @classmethod
    def of(cls, config: AttendConfig, *, splits: int) -> "MergeConfig":
        """That of what a call of the attention kernel has split.

        Args:
            splits: Of a sequence among others like it.
        """
        least, most = _AT_A_TIME
        at_a_time = min(max(triton.next_power_of_2(splits), least), most)
        return cls(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            value_dim=config.value_dim,
            rows=config.split_rows,
            block=min(triton.next_power_of_2(config.value_dim), _BLOCK // at_a_time),
            has_sinks=config.has_sinks,
            at_a_time=at_a_time,
        )


@triton.jit
@no_type_check
def merge_splits(
    outs_ptr,  # float32 [S, K, rows, V]: partial results
    lses_ptr,  # float32 [S, K, rows]
    merge_ptr,  # int32 [most_split, 3]: sequence, first partial result, end
    sink_ptr,  # float32 [N]
    out_ptr,  # [B, tokens, N, V]: to be written where a sequence is split
    lse_ptr,  # float32 [B, tokens, N]
    C: tl.constexpr,  # MergeConfig
):
    COLUMNS: tl.constexpr = C.block
    program = tl.program_id(0)
    column = program % C.column_blocks * COLUMNS + tl.arange(0, C.block)
    program = program // C.column_blocks
    row = program % C.rows
    kv_head = program // C.rows % C.num_kv_heads
    merge = merge_ptr + program // (C.rows * C.num_kv_heads) * 3
    sequence = tl.load(merge)
    if sequence < 0:
        return
    end = tl.load(merge + 2)
    inner = column < C.value_dim
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(tl.load(merge + 1), end, C.at_a_time):
        split = first + tl.arange(0, C.at_a_time)
        at = (split * C.num_kv_heads + kv_head).to(tl.int64) * C.rows + row
        lse = tl.load(lses_ptr + at, mask=split < end, other=float("-inf"))
        loaded = (split < end)[:, None] & inner[None]
        out = tl.load(outs_ptr + at[:, None] * C.value_dim + column[None], mask=loaded, other=0.0)
        new_m = tl.maximum(m_i, tl.max(lse, axis=0))
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp2((lse - shift) * LOG2_E)
        alpha = tl.exp2((m_i - shift) * LOG2_E)
        l_i = l_i * alpha + tl.sum(weight, axis=0)
        acc = acc * alpha + tl.sum(out * weight[:, None], axis=0)
        m_i = new_m
    is_empty = m_i == float("-inf")
    safe_l = tl.where(is_empty, 1.0, l_i)
    lse = tl.where(is_empty, float("-inf"), m_i + tl.log2(safe_l) * LN_2)
    share = tl.where(is_empty, 0.0, 1.0 / safe_l)
    group = C.num_q_heads // C.num_kv_heads
    q_head = kv_head * group + row % group
    if C.has_sinks:
        sink = tl.load(sink_ptr + q_head)
        share *= tl.where(is_empty, 0.0, 1.0 / (1.0 + tl.exp2((sink - lse) * LOG2_E)))
    at = sequence.to(tl.int64) * (C.rows // group) + row // group
    at = at * C.num_q_heads + q_head
    tl.store(lse_ptr + at, lse)  # the same by each block of columns
    tl.store(out_ptr + at * C.value_dim + column, (acc * share).to(out_ptr.dtype.element_ty), mask=inner)
