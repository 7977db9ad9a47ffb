"""Host-side checks of the data that kernels assume to be in range."""

import numpy as np

from jattn_kernels.shapes.options import check_mask, check_mask_covers


def validate(
    page_table,
    seq_lens,
    num_pages: int,
    page_size: int,
    *,
    cu_q_lens=None,
    num_tokens: int | None = None,
    custom_mask=None,
):
    """Checks the values of page tables, lengths and offsets; copies them to the host, so not for use inside jit.

    Args:
        page_table: [B, max_pages]; entries past a sequence's last page are not looked at.
        seq_lens: [B], in tokens; 0 for a padded row.
        num_pages: Pages in the pool.
        page_size: Tokens a page.
        cu_q_lens: [B + 1], if the queries are ragged.
        num_tokens: Rows of the ragged queries; without `cu_q_lens` the query tokens a sequence.
        custom_mask: [M], per sequence [q_len, seq_len]. What it lacks would be read as hidden.

    Raises:
        ValueError: An array is not of integers, a length is negative or longer than its table, a page is not in the
            pool, `cu_q_lens` does not rise from 0 to at most `num_tokens`, or `custom_mask` is too short.
    """
    page_table, seq_lens = _integers("page_table", page_table), _integers("seq_lens", seq_lens)
    if page_table.ndim != 2 or seq_lens.shape != page_table.shape[:1]:
        raise ValueError(
            "`page_table` must be [B, max_pages] and `seq_lens` [B]. "
            f"Got page_table.shape={page_table.shape}, seq_lens.shape={seq_lens.shape}."
        )
    capacity = page_table.shape[1] * page_size
    wrong = (seq_lens < 0) | (seq_lens > capacity)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"`seq_lens` must be in 0 .. {capacity}, the tokens of a row of `page_table`. "
            f"Got seq_lens[{row}]={seq_lens[row]}."
        )
    used = np.arange(page_table.shape[1])[None] * page_size < seq_lens[:, None]
    wrong = used & ((page_table < 0) | (page_table >= num_pages))
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(
            f"`page_table` must hold pages in 0 .. {num_pages - 1}. "
            f"Got page_table[{row}, {column}]={page_table[row, column]}."
        )
    if cu_q_lens is not None:
        cu_q_lens = _integers("cu_q_lens", cu_q_lens)
        _validate_offsets(cu_q_lens, len(seq_lens), num_tokens)
    if custom_mask is not None:
        custom_mask = np.asarray(custom_mask)
        check_mask(custom_mask)
        q_len = 1 if num_tokens is None else num_tokens
        check_mask_covers(custom_mask, num_tokens=q_len, cu_q_lens=cu_q_lens, seq_lens=seq_lens)


def _integers(name: str, array) -> np.ndarray:
    array = np.asarray(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must be integers. Got {name}.dtype={array.dtype}.")
    return array


def _validate_offsets(cu_q_lens: np.ndarray, num_seqs: int, num_tokens: int | None) -> None:
    if cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"`cu_q_lens` must be [B + 1] = [{num_seqs + 1}]. Got cu_q_lens.shape={cu_q_lens.shape}.")
    if cu_q_lens[0] != 0 or (np.diff(cu_q_lens) < 0).any():
        raise ValueError(f"`cu_q_lens` must start at 0 and never fall. Got cu_q_lens={cu_q_lens.tolist()}.")
    if num_tokens is not None and cu_q_lens[-1] > num_tokens:
        raise ValueError(f"`cu_q_lens` must end at {num_tokens} at most. Got cu_q_lens[-1]={cu_q_lens[-1]}.")
