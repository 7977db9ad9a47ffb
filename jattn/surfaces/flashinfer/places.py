"""Where a batch's keys are: pages from tables of pages or of token slots, an encoder's apart."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn.arguments import integers
from jattn.forward_batch import ForwardBatch, with_columns
from jattn.surfaces.flashinfer.config import FlashInferConfig


class Places(NamedTuple):
    """Where a batch's keys are.

    Attributes:
        tables: The sequences' pages, for each group of the pool.
        encoder_table, encoder_lens: The encoders' pages and keys; None without encoders.
    """

    tables: tuple[Int[Array, "B max_pages"], ...]
    encoder_table: Int[Array, "B max_encoder_pages"] | None
    encoder_lens: Int[Array, " B"] | None


def places_of(forward_batch: ForwardBatch, config: FlashInferConfig) -> Places:
    """Where a batch's keys are; tokens to be verified beyond the pages there are have their keys in page 0.

    Raises:
        ValueError: The batch does not say it.
    """
    encoder_lens = forward_batch.encoder_lens if config.is_encoder_decoder else None
    is_verify = forward_batch.forward_mode.is_target_verify()
    drafted = forward_batch.input_ids.shape[0] // forward_batch.batch_size if is_verify else 0
    if forward_batch.page_tables:
        table = forward_batch.encoder_page_table if config.is_encoder_decoder else None
        if config.is_encoder_decoder and (table is None or encoder_lens is None):
            raise ValueError("`encoder_page_table` and `encoder_lens` must be given beside `page_tables`. Got None.")
        width = -(-(config.max_context_len + drafted) // config.page_size) if is_verify else 0
        return Places(tuple(with_columns(own, width) for own in forward_batch.page_tables), table, encoder_lens)
    requests, slots = forward_batch.req_pool_indices, forward_batch.req_to_token_pool
    if requests is None or slots is None:
        raise ValueError(
            "`forward_batch` must have `page_tables`, or `req_pool_indices` and `req_to_token_pool`. Got neither."
        )
    return split_encoder(pages_of_requests(requests, slots.req_to_token, drafted, config), encoder_lens, config)


def pages_of_requests(
    requests: Int[Array, " B"], req_to_token: Int[Array, "R slots"], drafted: int, config: FlashInferConfig
) -> Int[Array, "B max_pages"]:
    """The pages of requests whose token slots are known.

    Args:
        drafted: Keys that may follow those of the longest sequence; without columns of theirs they are in page 0.

    Raises:
        ValueError: `req_to_token` is no table of requests that long.
    """
    req_to_token = integers("req_to_token", req_to_token, "requests", "slots")
    config.check_table("req_to_token", req_to_token.shape)
    requests = integers("req_pool_indices", requests, "batch_size")
    most = config.max_context_len + drafted
    table = req_to_token[requests, : most : config.page_size] // config.page_size
    return with_columns(table, -(-most // config.page_size))


def split_encoder(
    table: Int[Array, "B max_pages"], encoder_lens: Int[Array, " B"] | None, config: FlashInferConfig
) -> Places:
    """Rows of an encoder's pages and then the decoder's own, taken apart.

    Raises:
        ValueError: There is an encoder, and its lengths are missing.
    """
    if not config.is_encoder_decoder:
        return Places((table,), None, None)
    if encoder_lens is None:
        raise ValueError("`encoder_lens` must be given with `is_encoder_decoder`. Got None.")
    columns = -(-encoder_lens // config.page_size)[:, None] + jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    own = jnp.take_along_axis(table, columns, axis=1, mode="fill", fill_value=0)
    return Places((own,), table, encoder_lens)
