"""Where the keys of SGLang's and pymllm's batches are: pages, from tables of pages or of requests' token slots."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn.arguments import integers
from jattn.forward_batch import ForwardBatch, ReqToTokenPool, checked_requests, with_columns

NOWHERE = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where a batch's keys are: pages of the sequences and, in an encoder-decoder model, of the encoders.

    Attributes:
        page_tables: For each group of the pool.
        room: Tokens that a row has pages for; what lies beyond, up to the tables' width, is in page 0.
    """

    page_tables: tuple[Int[Array, "B max_pages"], ...]
    encoder_page_table: Int[Array, "B max_encoder_pages"] | None = None
    room: Int[Array, " B"] | int


def places_of(batch: ForwardBatch, max_context_len: int, page_size: int, num_drafted: int) -> Places:
    """The places of a batch, whose requests' rows are padding if out of range.

    Args:
        num_drafted: Keys that may follow those of the longest sequence; without columns of theirs they are in page 0.

    Raises:
        ValueError: The batch says neither its pages nor its requests, or `req_to_token` is too narrow.
    """
    width = -(-(max_context_len + num_drafted) // page_size)
    if tables := batch.page_tables:
        room = min(table.shape[1] for table in tables) * page_size
        wide = tuple(with_columns(table, width if num_drafted else 0) for table in tables)
        return Places(page_tables=wide, encoder_page_table=batch.encoder_page_table, room=room)
    if batch.req_to_token_pool is None or batch.req_pool_indices is None:
        raise ValueError(
            "`forward_batch` must have `page_tables`, or `req_pool_indices` and `req_to_token_pool`. Got neither."
        )
    slots = integers("req_to_token", batch.req_to_token_pool.req_to_token, "requests", "slots")
    check_slots("req_to_token", slots.shape, max_context_len)
    requests, held = integers("req_pool_indices", batch.req_pool_indices, "batch_size"), slots.shape[1]
    rows = slots.at[requests].get(mode="fill", fill_value=0)
    own, room = (
        with_columns(rows[:, : width * page_size : page_size] // page_size, width),
        -(-held // page_size) * page_size,
    )
    if batch.encoder_lens is None:
        return Places(page_tables=(own,), room=room)
    first = -(-batch.encoder_lens // page_size) * page_size
    columns = jnp.arange(width, dtype=jnp.int32)[None] * page_size + first[:, None]
    decoders = jnp.take_along_axis(rows, columns, axis=1, mode="fill", fill_value=0) // page_size
    encoders = own[:, : -(-max_context_len // page_size)]
    return Places(page_tables=(decoders,), encoder_page_table=encoders, room=room - first)


def check_slots(name: str, shape: tuple[int, ...], max_context_len: int) -> None:
    """Checks the shape of a table of token slots.

    Raises:
        ValueError: It has no row a request of `max_context_len` slots.
    """
    if len(shape) != 2 or shape[1] < max_context_len:
        raise ValueError(
            f"`{name}` must have a row a request of at least `max_context_len`={max_context_len} slots. "
            f"Got {name}.shape={shape}."
        )


def replayed_batch(
    bs: int,
    q_len: int,
    req_pool_indices: Any,
    seq_lens: Any,
    encoder_lens: Any,
    fill: int,
    req_to_token: Any,
    **step: Any,
) -> ForwardBatch:
    """The requests of a replay as a batch of `bs` rows, `q_len` tokens each; those not given are padding.

    Args:
        fill: The length of padding.
        step: `forward_mode` and `spec_info`.

    Raises:
        ValueError: The rows do not belong together.
    """
    requests, lens, encoder_lens = checked_requests(req_pool_indices, seq_lens, encoder_lens)
    nothing = jnp.zeros(bs * q_len, jnp.int32)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        seq_lens=_rows(lens, bs, fill),
        cu_q_lens=jnp.arange(bs + 1, dtype=jnp.int32) * q_len,
        out_cache_loc=(),
        req_pool_indices=_rows(requests, bs, NOWHERE),
        req_to_token_pool=ReqToTokenPool(req_to_token),
        encoder_lens=None if encoder_lens is None else _rows(encoder_lens, bs, 0),
        **step,
    )


def _rows(values: Int[Array, " B"], bs: int, fill: int) -> Int[Array, " bs"]:
    """The first `bs` values; `fill` where there are fewer."""
    values = values[:bs].astype(jnp.int32)
    return jnp.pad(values, (0, bs - values.shape[0]), constant_values=fill)
