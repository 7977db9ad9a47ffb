"""ForwardBatch: the device side of one forward pass, whatever its phase."""

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.arguments import instance, integers, shown
from jattn.pytree import pytree, static
from jattn.spec_info import EagleDraftInput, EagleVerifyInput, SpecInput


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


@pytree()
class ReqToTokenPool:
    """The token slots of every request that an engine serves; SGLang's pool.

    Attributes:
        req_to_token: Slots by request and position. Where there is an encoder, its tokens' come first, and the
            decoder's begin on a new page.
    """

    req_to_token: Int[Array, "R max_context_len"]


@pytree(kw_only=True)
class ForwardBatch:
    """Tokens of one forward pass, and where their sequences live in the pool.

    T tokens of B sequences, sequence by sequence; both are a bucket's sizes, so rows and tokens may be padding. A
    padded sequence has length 0 and no tokens; a padded token has a slot out of range. In decode, token i belongs to
    sequence i, padded or not; so do the topk tokens of a sequence in drafting, and its drafted ones in target verify.

    Attributes:
        forward_mode: Static.
        input_ids: Token ids; 0 where padded.
        positions: Absolute positions; 0 where padded.
        seq_lens: Keys of each sequence, this pass's tokens included but for those that are drafted or verified.
        cu_q_lens: Where each sequence's tokens begin; the last entry counts the real tokens in extend.
        out_cache_loc: For each group of the pool, the slot that each token's key and value are written to; an array
            alone is that of one group.
        page_tables: For each group of the pool, the pages of each sequence; 0 past its last page. Empty where
            `req_to_token_pool` says them.
        req_pool_indices: Each sequence's row of `req_to_token_pool`.
        req_to_token_pool: Token slots of the requests, for engines that keep those.
        encoder_lens: Tokens of each sequence's encoder; None in a model without one.
        encoder_out_cache_loc: The slots of this pass's encoder tokens; None if their keys are in the pool.
        encoder_page_table: The pages of each encoder, where `page_tables` says those of the sequences.
        spec_info: What drafting or verifying adds.
        unrolled: Whether a model may run its layers in turn without a loop: for a pass of a GPU so short that launching
            it counts, and that is no turn of a loop itself, which would keep copies of the layers' weights. Static.
    """

    forward_mode: ForwardMode = static()
    input_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    seq_lens: Int[Array, " B"]
    cu_q_lens: Int[Array, " B+1"]
    out_cache_loc: tuple[Int[Array, " T"], ...]
    page_tables: tuple[Int[Array, "B max_pages"], ...] = ()
    req_pool_indices: Int[Array, " B"] | None = None
    req_to_token_pool: ReqToTokenPool | None = None
    encoder_lens: Int[Array, " B"] | None = None
    encoder_out_cache_loc: Int[Array, " E"] | None = None
    encoder_page_table: Int[Array, "B max_encoder_pages"] | None = None
    spec_info: SpecInput | None = None
    unrolled: bool = static(default=False)

    def __post_init__(self):
        if hasattr(self.out_cache_loc, "shape"):  # of one group
            object.__setattr__(self, "out_cache_loc", (self.out_cache_loc,))

    @property
    def batch_size(self) -> int:
        """Sequences, padded ones included."""
        return self.seq_lens.shape[0]

    @property
    def seq_lens_sum(self) -> Int[Array, ""]:
        """Keys of all sequences."""
        return jnp.sum(self.seq_lens, dtype=jnp.int32)

    @property
    def extend_seq_lens(self) -> Int[Array, " B"]:
        """This pass's tokens of each sequence."""
        return jnp.diff(self.cu_q_lens)

    @property
    def extend_prefix_lens(self) -> Int[Array, " B"]:
        """Keys of each sequence that were there before an extend."""
        return self.seq_lens - self.extend_seq_lens


def with_columns(page_table: Int[Array, "B max_pages"], width: int) -> Int[Array, "B width"]:
    """A page table of at least `width` columns; those that it lacks are page 0, which belongs to nobody."""
    return jnp.pad(page_table, ((0, 0), (0, max(0, width - page_table.shape[1]))))


def checked_batch(forward_batch: ForwardBatch) -> ForwardBatch:
    """A batch as a user gave it, its lengths and places as arrays of int32.

    Raises:
        ValueError: It is none, or a field is not what it must be.
    """
    instance("forward_batch", forward_batch, ForwardBatch)
    mode = forward_batch.forward_mode
    instance("forward_mode", mode, ForwardMode)
    instance("spec_info", forward_batch.spec_info, EagleDraftInput, EagleVerifyInput, type(None))
    instance("req_to_token_pool", forward_batch.req_to_token_pool, ReqToTokenPool, type(None))
    input_ids = integers("input_ids", forward_batch.input_ids, "tokens")
    seq_lens = integers("seq_lens", forward_batch.seq_lens, "batch_size")
    rows = seq_lens.shape[0]
    groups = {"page_tables": ("batch_size", "max_pages"), "out_cache_loc": ("tokens",)}
    by_group = {name: _of_groups(name, getattr(forward_batch, name), axes) for name, axes in groups.items()}
    if not by_group["out_cache_loc"]:
        raise ValueError("`out_cache_loc` must have the slots of each group of the pool. Got ().")
    if by_group["page_tables"] and len(by_group["page_tables"]) != len(by_group["out_cache_loc"]):
        raise ValueError(
            "`page_tables` and `out_cache_loc` must have one entry for each group of the pool. "
            f"Got {len(by_group['page_tables'])} and {len(by_group['out_cache_loc'])}."
        )
    optional = {
        "req_pool_indices": ("batch_size",),
        "encoder_lens": ("batch_size",),
        "encoder_out_cache_loc": ("encoder_tokens",),
        "encoder_page_table": ("batch_size", "max_encoder_pages"),
    }
    given = {name: axes for name, axes in optional.items() if getattr(forward_batch, name) is not None}
    arrays = {name: integers(name, getattr(forward_batch, name), *axes) for name, axes in given.items()}
    of_rows = [("page_tables", table) for table in by_group["page_tables"]]
    of_rows += [(name, arrays[name]) for name, axes in given.items() if axes[0] == "batch_size"]
    for name, value in of_rows:
        if value.shape[0] != rows:
            raise ValueError(f"`{name}` must have a row for each of {rows} `seq_lens`. Got a shape of {value.shape}.")
    starts = forward_batch.cu_q_lens
    if mode.is_extend_or_draft_extend_or_mixed():
        starts = integers("cu_q_lens", starts, "batch_size + 1")
        if starts.shape[0] != rows + 1:
            raise ValueError(
                f"`cu_q_lens` must have an entry more than `seq_lens`, {rows + 1}. Got {starts.shape[0]} entries."
            )
    given = {"input_ids": input_ids, "seq_lens": seq_lens, "cu_q_lens": starts}
    return dataclasses.replace(forward_batch, **given, **by_group, **arrays)


def checked_requests(
    req_pool_indices: Any, seq_lens: Any, encoder_lens: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"] | None]:
    """The rows that a replay is given, as integers; `encoder_lens` may be None.

    Raises:
        ValueError: One is none of integers, or of another length than the others.
    """
    given = {"req_pool_indices": req_pool_indices, "seq_lens": seq_lens}
    given |= {} if encoder_lens is None else {"encoder_lens": encoder_lens}
    rows = {name: integers(name, values, "rows") for name, values in given.items()}
    if len({values.shape for values in rows.values()}) > 1:
        *names, last = rows
        shapes = ", ".join(f"{name}.shape={values.shape}" for name, values in rows.items())
        raise ValueError(f"`{'`, `'.join(names)}` and `{last}` must have the same length. Got {shapes}.")
    return rows["req_pool_indices"], rows["seq_lens"], rows.get("encoder_lens")


def _of_groups(name: str, arrays: Any, axes: tuple[str, ...]) -> tuple[Int[Array, "..."], ...]:
    if not isinstance(arrays, tuple | list | None):
        raise ValueError(
            f"`{name}` must be a tuple of arrays, one for each group of the pool. Got {shown(name, arrays)}."
        )
    return tuple(integers(f"{name}[{i}]", array, *axes) for i, array in enumerate(arrays or ()))


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """What only the host may know of a batch: NumPy copies of its lengths. It never enters jit, so it is no pytree.

    Attributes:
        seq_lens_cpu, extend_seq_lens_cpu, extend_prefix_lens_cpu: As the batch's own, on the host.
        encoder_lens_cpu: None in a model without an encoder.
    """

    seq_lens_cpu: np.ndarray
    extend_seq_lens_cpu: np.ndarray
    extend_prefix_lens_cpu: np.ndarray
    encoder_lens_cpu: np.ndarray | None = None

    @classmethod
    def of(cls, forward_batch: ForwardBatch) -> "HostBatch":
        """A batch's lengths, copied from the device: waits for it."""
        instance("forward_batch", forward_batch, ForwardBatch)
        lens, starts = np.asarray(forward_batch.seq_lens), np.asarray(forward_batch.cu_q_lens)
        encoder = forward_batch.encoder_lens
        return cls(lens, np.diff(starts), lens - np.diff(starts), None if encoder is None else np.asarray(encoder))

    @property
    def seq_lens_sum(self) -> int:
        """Keys of all sequences."""
        return int(self.seq_lens_cpu.sum())
