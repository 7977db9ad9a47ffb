"""What a launch does with latent rows where prompts are expanded: made once, for all layers of a kind."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn.attention.latent_form import HeadWidths, expanded_spec
from jattn.attention.metadata import QueriesOverPages
from jattn.attention.paged_call import PagedCall
from jattn.pytree import pytree, static

# Tokens of short extends that a launch absorbs at most: places for them cost time whether they are taken or not.
_MOST_SHORT = 1024
# Keys and values of a part of the prefixes take this, or what those of the launch's own tokens take if that is more.
_PART_BYTES = 64 * 2**20
_PART_MULTIPLE = 128


@pytree(kw_only=True)
class AbsorbedPart:
    """Sequences of a launch that are absorbed, and their tokens.

    Attributes:
        tokens: Their places among the launch's, out of range where there is none.
        seq_lens, cu_q_lens, q_len: As in QueriesOverPages; other sequences have no keys and no queries here.
        schedule: Of a call over their pages.
    """

    tokens: Int[Array, " A"]
    seq_lens: Int[Array, " B"]
    cu_q_lens: Int[Array, " B+1"] | None
    q_len: int | None = static()
    schedule: Any

    def over(self, page_table: Int[Array, "B max_pages"]) -> QueriesOverPages:
        """What the part's call reads."""
        lens = {"seq_lens": self.seq_lens, "cu_q_lens": self.cu_q_lens, "q_len": self.q_len}
        return QueriesOverPages(page_table=page_table, **lens)


@pytree(kw_only=True)
class LatentPlan:
    """A launch that extends: its new tokens' keys and values are made for all, prefixes' for sequences of many.

    Attributes:
        cu_q_lens: Where each sequence's tokens begin.
        prefix_lens: Keys of each sequence that were there before.
        prefix_starts: Where each expanded sequence's prefix begins among those of all; others have none.
        part_tokens: Tokens of prefixes whose keys and values are there at the same time.
        absorbed: The sequences that are not expanded; the result for them is that of their parts.
    """

    cu_q_lens: Int[Array, " B+1"]
    prefix_lens: Int[Array, " B"]
    prefix_starts: Int[Array, " B+1"]
    part_tokens: int = static()
    absorbed: tuple[AbsorbedPart, ...]


def latent_plan(
    call: PagedCall,
    heads: HeadWidths,
    read: QueriesOverPages,
    num_tokens: int,
    *,
    fewest: int,
    is_mixed: bool,
) -> LatentPlan:
    """The plan of a launch of ragged queries.

    A sequence is expanded if it has no prefix, or at least `fewest` new tokens; or if it is alone, as it then has what
    the launch is for. Those that are not are absorbed, as many as there is room for.

    Args:
        call: Of layers over absorbed rows.
        is_mixed: Whether there are sequences that decode; those of one token have a part of their own then.
    """
    assert read.cu_q_lens is not None
    q_lens = jnp.diff(read.cu_q_lens)
    prefix_lens = jnp.maximum(read.seq_lens - q_lens, 0)
    absorbs = (prefix_lens > 0) & (q_lens > 0) & (q_lens < fewest)
    expands, parts = q_lens > 0, []
    if is_mixed:
        decodes = absorbs & (q_lens == 1)
        parts.append(_decodes(call, read, decodes, num_tokens))
        expands, absorbs = expands & ~decodes, absorbs & ~decodes
    if q_lens.shape[0] > 1:
        room = min(num_tokens, _MOST_SHORT)
        fit = absorbs & (jnp.cumsum(jnp.where(absorbs, q_lens, 0)) <= room)
        parts.append(_shorts(call, read, fit, num_tokens, room))
        expands &= ~fit
    spec, itemsize = expanded_spec(call.spec, heads), jnp.dtype(call.dtype).itemsize
    token_bytes = spec.num_kv_heads * (spec.head_dim + spec.value_dim) * itemsize
    most_keys = read.page_table.size * call.page_size
    of_part = max(num_tokens, _PART_BYTES // token_bytes // _PART_MULTIPLE * _PART_MULTIPLE)
    return LatentPlan(
        cu_q_lens=read.cu_q_lens,
        prefix_lens=prefix_lens,
        prefix_starts=_starts(jnp.where(expands, prefix_lens, 0)),
        part_tokens=min(of_part, most_keys),
        absorbed=tuple(parts),
    )


def owners(starts: Int[Array, " B_plus_1"], places: Int[Array, " A"]) -> Int[Array, " A"]:
    """The sequence that each place belongs to; the last one past the end."""
    # One kernel, where the default is a loop: layers ask for each part of their prefixes.
    owner = jnp.searchsorted(starts[1:], places, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(owner, starts.shape[0] - 2)


def _decodes(call: PagedCall, read: QueriesOverPages, which: Bool[Array, " B"], num_tokens: int) -> AbsorbedPart:
    assert read.cu_q_lens is not None
    tokens = jnp.where(which, read.cu_q_lens[:-1], num_tokens)
    return _part(call, read, which, tokens, q_len=1)


def _shorts(
    call: PagedCall, read: QueriesOverPages, which: Bool[Array, " B"], num_tokens: int, room: int
) -> AbsorbedPart:
    assert read.cu_q_lens is not None
    starts = _starts(jnp.where(which, jnp.diff(read.cu_q_lens), 0))
    place = jnp.arange(room, dtype=jnp.int32)
    owner = owners(starts, place)
    tokens = jnp.where(place < starts[-1], read.cu_q_lens[owner] + place - starts[owner], num_tokens)
    return _part(call, read, which, tokens, cu_q_lens=starts)


def _part(
    call: PagedCall,
    read: QueriesOverPages,
    which: Bool[Array, " B"],
    tokens: Int[Array, " A"],
    *,
    cu_q_lens: Int[Array, " B_plus_1"] | None = None,
    q_len: int | None = None,
) -> AbsorbedPart:
    lens: dict[str, Any] = {"seq_lens": jnp.where(which, read.seq_lens, 0), "cu_q_lens": cu_q_lens, "q_len": q_len}
    schedule = call.schedule(QueriesOverPages(page_table=read.page_table, **lens), tokens.shape[0])
    return AbsorbedPart(tokens=tokens, schedule=schedule, **lens)


def _starts(lens: Int[Array, " B"]) -> Int[Array, " B_plus_1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
