"""ForwardBatch: the device side of one forward pass, whatever its phase."""

import dataclasses
import enum
import functools
import typing

import jax
from jaxtyping import Array, Int


class ForwardMode(enum.Enum):
    """What a forward pass does. SGLang's names."""

    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    IDLE = enum.auto()
    TARGET_VERIFY = enum.auto()
    DRAFT_EXTEND = enum.auto()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND

    def is_extend(self) -> bool:
        """Many tokens a sequence: extend, mixed, draft extend and target verify, as in SGLang."""
        return not self.is_decode_or_idle()

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND, ForwardMode.MIXED)


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Tokens of one forward pass, and where their sequences live in the pool.

    T tokens of B sequences, sequence by sequence; both are a bucket's sizes, so rows and tokens may be padding. A
    padded sequence has length 0 and no tokens; a padded token has a slot out of range. In decode, token i belongs to
    sequence i, padded or not.

    Attributes:
        forward_mode: Static.
        input_ids: Token ids; 0 where padded.
        positions: Absolute positions; 0 where padded.
        seq_lens: Keys of each sequence, this pass's tokens included.
        cu_q_lens: Where each sequence's tokens begin; the last entry counts the real tokens in extend.
        out_cache_loc: For each group of the pool, the slot that each token's key and value are written to.
        page_tables: For each group of the pool, the pages of each sequence; 0 past its last page.
    """

    forward_mode: ForwardMode = dataclasses.field(metadata={"static": True})
    input_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    seq_lens: Int[Array, " B"]
    cu_q_lens: Int[Array, " B+1"]
    out_cache_loc: tuple[Int[Array, " T"], ...]
    page_tables: tuple[Int[Array, "B max_pages"], ...]

    @property
    def batch_size(self) -> int:
        """Sequences, padded ones included."""
        return self.seq_lens.shape[0]
