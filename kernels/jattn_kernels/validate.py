"""Host-side checks of the data that kernels assume to be in range."""

import numpy as np


def validate(page_table, seq_lens, num_pages: int, page_size: int, *, cu_q_lens=None, num_tokens: int | None = None):
    """Checks the values of page tables, lengths and offsets; copies them to the host, so not for use inside jit.

    Args:
        page_table: [B, max_pages]; entries past a sequence's last page are not looked at.
        seq_lens: [B], in tokens; 0 for a padded row.
        num_pages: Pages in the pool.
        page_size: Tokens a page.
        cu_q_lens: [B + 1], if the queries are ragged.
        num_tokens: Rows of the ragged queries.

    Raises:
        ValueError: A length is negative or longer than its table, a page is not in the pool, or `cu_q_lens` does not
            rise from 0 to at most `num_tokens`.
    """
    page_table, seq_lens = np.asarray(page_table), np.asarray(seq_lens)
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
        _validate_offsets(np.asarray(cu_q_lens), len(seq_lens), num_tokens)


def _validate_offsets(cu_q_lens: np.ndarray, num_seqs: int, num_tokens: int | None) -> None:
    if cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"`cu_q_lens` must be [B + 1] = [{num_seqs + 1}]. Got cu_q_lens.shape={cu_q_lens.shape}.")
    if cu_q_lens[0] != 0 or (np.diff(cu_q_lens) < 0).any():
        raise ValueError(f"`cu_q_lens` must start at 0 and never fall. Got cu_q_lens={cu_q_lens.tolist()}.")
    if num_tokens is not None and cu_q_lens[-1] > num_tokens:
        raise ValueError(f"`cu_q_lens` must end at {num_tokens} at most. Got cu_q_lens[-1]={cu_q_lens[-1]}.")
