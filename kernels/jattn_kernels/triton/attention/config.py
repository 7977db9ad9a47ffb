"""What the attention kernel is compiled for: one value, hashable, that the kernel reads as constants."""

import dataclasses
import math

import triton
import triton.language as tl

from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton.fp8 import NAMES

LEAST_BLOCK = 16  # rows and columns that a product of Triton has

_DTYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


@dataclasses.dataclass(frozen=True)
class Strides:
    """Where a row of keys or values lies, in numbers: first + layer * .layer + page * .page + token * .token + ...

    Attributes:
        page: 0 of ragged keys.
    """

    first: int
    layer: int
    page: int
    token: int
    head: int


def page_strides(shape: tuple[int, ...], spec: AttentionSpec, *, stacked: bool, kv_index: int) -> Strides:
    """Those of pages.

    Args:
        stacked: Whether the first axis is of layers.
        kv_index: In a combined pool, 0 of keys and 1 of values.
    """
    pool = {None: "p", "pages_first": "pc", "kv_first": "cp"}[spec.combined_pool]
    by_axis = _by_axis("l" * stacked + pool + ("thw" if spec.page_layout == "NHD" else "htw"), shape)
    return Strides(kv_index * by_axis.get("c", 0), by_axis.get("l", 0), by_axis["p"], by_axis["t"], by_axis["h"])


def latent_strides(shape: tuple[int, ...], *, stacked: bool) -> Strides:
    """Those of latent pages, which have one head."""
    by_axis = _by_axis("l" * stacked + "ptw", shape)
    return Strides(0, by_axis.get("l", 0), by_axis["p"], by_axis["t"], 0)


def ragged_strides(shape: tuple[int, ...], *, stacked: bool) -> Strides:
    """Those of keys that are not paged."""
    by_axis = _by_axis("l" * stacked + "thw", shape)
    return Strides(0, by_axis.get("l", 0), 0, by_axis["t"], by_axis["h"])


def _by_axis(axes: str, shape: tuple[int, ...]) -> dict[str, int]:
    return {axis: math.prod(shape[i + 1 :]) for i, axis in enumerate(axes)}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The two parts in which rows are read, and the blocks that hold them; the second has 0 columns where one does."""

    first: int
    second: int

    @property
    def blocks(self) -> tuple[int, int]:
        """Columns of registers, powers of two."""
        first, second = (max(triton.next_power_of_2(max(width, 1)), LEAST_BLOCK) for width in (self.first, self.second))
        return first, second


def parts_of(width: int) -> Parts:
    """A power of two and the rest, where that takes fewer registers than one block."""
    whole = 1 << (width.bit_length() - 1)
    parts = Parts(whole, width - whole)
    one = Parts(width, 0)
    return parts if width > LEAST_BLOCK and sum(parts.blocks) < one.blocks[0] else one


def key_parts(spec: AttentionSpec, *, latent: bool) -> Parts:
    """Of keys: a latent and its rotated rest, the halves of a rotary embedding, or as `parts_of` has them."""
    if latent:
        return Parts(spec.value_dim, spec.head_dim - spec.value_dim)
    if spec.rope_theta is not None:
        return Parts(spec.head_dim // 2, spec.head_dim // 2)
    return parts_of(spec.head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendConfig:
    """Constants of the attention kernel.

    Attributes:
        num_q_heads, num_kv_heads: Heads.
        row_blocks: Blocks of rows that a work tile has at most.
        q0_row, q1_row, q1_first: Numbers of a query's row in both arrays of queries, and where the second part begins.
        k, v: Where their rows lie.
        page_size: 0 of ragged keys.
        table_columns: Numbers of the page table's row.
        keys, values: Their parts.
        block_m, block_n, stages: Rows, keys a tile, and tiles that are loaded ahead.
        v_pairs: Whether values are 8-bit numbers that are read two by two, their parts the even and the odd columns.
        v_is_k: Whether values are the first part of the keys.
        compute_dtype, kv_dtype: Names of the products' dtype and of that of stored keys.
        scale, soft_cap: Of logits; a cap of 0 is off.
        has_first, ...: Whether the argument is given.
        factor_row: Numbers of a sequence's row of factors; 0 where all have one.
        causal: Whether slopes count the keys after a query as negative.
        native_fp8: Whether the GPU converts e4m3 by an instruction.
        rotates, shrink: Whether keys are rotated, and what they are divided by then.
        whole_tiles: Whether tiles that all rows see have a loop of their own.
        split_rows: Rows of a KV head in a split's partial result.
        shares_keys: Whether the keys of a tile are shared out among warpgroups, which have its rows all.
        asks_early: Whether the next tile is asked for before this one's values are multiplied.
    """

    num_q_heads: int
    num_kv_heads: int
    row_blocks: int
    q0_row: int
    q1_row: int
    q1_first: int
    k: Strides
    v: Strides
    page_size: int
    table_columns: int
    keys: Parts
    values: Parts
    block_m: int
    block_n: int
    stages: int
    v_pairs: bool
    v_is_k: bool
    compute_dtype: str
    kv_dtype: str
    scale: float
    soft_cap: float
    has_first: bool
    has_mask: bool
    has_factor: bool
    factor_row: int
    has_v_factor: bool
    has_slopes: bool
    causal: bool
    has_sinks: bool
    native_fp8: bool
    rotates: bool
    shrink: float
    whole_tiles: bool
    split_rows: int
    shares_keys: bool
    asks_early: bool

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Width of a value."""
        return self.values.first + self.values.second

    @property
    def dtype(self) -> tl.dtype:
        """Of products."""
        return _DTYPES[self.compute_dtype]

    @property
    def fp8(self) -> str:
        """How stored bytes become numbers; "" if they are numbers."""
        return NAMES.get(self.kv_dtype, "")

    @property
    def columns(self) -> tuple[tuple[int, int, int], ...]:
        """First column, columns, and columns in registers, of both parts of keys and of both of values."""
        return tuple(
            part
            for parts in (self.keys, self.values)
            for part in ((0, parts.first, parts.blocks[0]), (parts.first, parts.second, parts.blocks[1]))
        )

    @property
    def v_rows_apart(self) -> bool:
        """Whether a value's row lies elsewhere in its array than its key's does."""
        return (self.k.page, self.k.token) != (self.v.page, self.v.token)

    @property
    def has_whole_pages(self) -> bool:
        """Whether a tile's keys are those of whole pages, whose rows follow one another as their numbers do.

        Not of 8-bit keys with values of their own: 64 sequences of 8,192 took an H200 336 us in place of 292.
        """
        are_in_row = all(x.page == self.page_size * x.token for x in (self.k, self.v))
        gains = self.v_is_k or not self.fp8
        return self.page_size > 1 and self.block_n % self.page_size == 0 and are_in_row and gains

    @property
    def late_scale(self) -> float:
        """By what logits are multiplied only when their maximum is known; 1 where they are whole before."""
        is_plain = not (self.has_factor or self.has_slopes or self.soft_cap > 0)
        return self.scale * math.log2(math.e) if is_plain and self.scale > 0 else 1.0

    @property
    def edge_stages(self) -> int:
        """Of the loop over tiles that some row does not see, too few beside whole ones for a deep pipeline."""
        return min(2, self.stages) if self.whole_tiles else self.stages

    @property
    def precision(self) -> str:
        """Of products: float32 is not rounded to 19 bits."""
        return "ieee" if self.compute_dtype == "float32" else "tf32"
