"""What the kernels read about a batch, and no more."""

from typing import Any

from jaxtyping import Array, Bool, Int

from jattn.attention.specs import LayerKind
from jattn.pytree import pytree, static


@pytree(kw_only=True)
class QueriesOverPages:
    """A batch's queries, and the pages of the keys that they see: the arrays of a paged call.

    Attributes:
        page_table: Pages of each sequence; 0 past its last one.
        seq_lens: Keys of each sequence; a row of 0 is padding.
        cu_q_lens: Where each sequence's queries begin; None where each has `q_len`.
        q_len: Queries of every sequence; None where they are ragged. This is what makes a call decode or extend.
        q_start: Absolute position of each sequence's first query; None if queries end where the keys do.
        q_positions: Absolute position of each query, in place of those that follow from `q_start`.
        custom_mask: Which keys the queries see, in place of the causal rule.
    """

    page_table: Int[Array, "B max_pages"]
    seq_lens: Int[Array, " B"]
    cu_q_lens: Int[Array, " B+1"] | None = None
    q_len: int | None = static(default=None)
    q_start: Int[Array, " B"] | None = None
    q_positions: Int[Array, " T"] | None = None
    custom_mask: Bool[Array, " M"] | None = None


@pytree(kw_only=True)
class AttentionMetadata:
    """A batch, for every layer of a model.

    Attributes:
        page_tables: For each group of the pool, the pages of each sequence.
        seq_lens, cu_q_lens, q_len, q_positions, custom_mask: As in QueriesOverPages.
        slots: For each group of the pool, where this pass's keys and values go; out of range where nowhere.
        encoder_page_table, encoder_lens: The encoders' pages and keys; None without encoders.
        kinds: The kinds of layer that have a schedule; static.
        schedules: The schedule of each; None where its kernels need none, a LatentPlan where it expands latent rows.
    """

    page_tables: tuple[Int[Array, "B max_pages"], ...]
    seq_lens: Int[Array, " B"]
    cu_q_lens: Int[Array, " B+1"] | None
    q_len: int | None = static()
    slots: tuple[Int[Array, " T"], ...]
    q_positions: Int[Array, " T"] | None = None
    custom_mask: Bool[Array, " M"] | None = None
    encoder_page_table: Int[Array, "B max_encoder_pages"] | None = None
    encoder_lens: Int[Array, " B"] | None = None
    kinds: tuple[LayerKind, ...] = static(default=())
    schedules: tuple[Any, ...] = ()

    def read_by(self, kind: LayerKind, group: int) -> QueriesOverPages:
        """What layers of a kind read, whose keys are in a group of the pool.

        Raises:
            ValueError: They are of cross attention, and the batch has no encoder.
        """
        if not kind.is_cross:
            table, lens, mask, positions = self.page_tables[group], self.seq_lens, self.custom_mask, self.q_positions
        elif self.encoder_page_table is None or self.encoder_lens is None:
            raise ValueError("`is_cross_attention` needs a batch with `encoder_lens`. Got encoder_lens=None.")
        else:
            table, lens, mask, positions = self.encoder_page_table, self.encoder_lens, None, None
        return QueriesOverPages(
            page_table=table,
            seq_lens=lens,
            cu_q_lens=self.cu_q_lens,
            q_len=self.q_len,
            q_positions=positions,
            custom_mask=mask,
        )

    def schedule_of(self, kind: LayerKind) -> Any:
        """The schedule of a kind of layer; None if there is none."""
        return self.schedules[self.kinds.index(kind)] if kind in self.kinds else None
