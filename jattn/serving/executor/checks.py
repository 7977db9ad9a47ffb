"""What `ResolvedConfig.debug_checks` checks before a launch: kernels take page tables, lengths and slots on trust."""

import numpy as np

from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.loop_state import LoopState
from jattn.serving.steps.plain import PrefillBatch
from jattn_kernels.validate import validate


def check_decode(state: LoopState, plan: np.ndarray, config: ResolvedConfig) -> None:
    """Checks what a decode launch will use; waits for the launches that make `state`.

    Raises:
        ValueError: A length is longer than its page table, a page is not in the pool, or a slot is of the reserved page
            or written twice.
    """
    page_tables, seq_lens, q_lens = _of_decodes(state, plan, config)
    _check(page_tables, seq_lens, _starts(q_lens), len(q_lens) * (1 + config.num_draft_tokens), config)


def check_prefill(state: LoopState, plan: np.ndarray, batch: PrefillBatch, config: ResolvedConfig) -> None:
    """Checks what a prefill launch will use, its decodes included; waits as `check_decode` does.

    Raises:
        ValueError: As for `check_decode`, or `cu_q_lens` does not fit the tokens or the lengths.
    """
    page_tables, seq_lens, q_lens = _of_decodes(state, plan, config)
    of_prompts = [batch.values.page_tables[0], *(_wide(np.asarray(window), config) for window in batch.window_pages)]
    page_tables = [np.concatenate(tables) for tables in zip(of_prompts, page_tables, strict=True)]
    seq_lens = np.concatenate([batch.values.seq_lens, seq_lens])
    cu_q_lens = np.concatenate([batch.cu_q_lens, batch.cu_q_lens[-1] + _starts(q_lens)[1:]])
    _check(page_tables, seq_lens, cu_q_lens, len(batch.input_ids), config)


def _of_decodes(
    state: LoopState, plan: np.ndarray, config: ResolvedConfig
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Page tables, keys and tokens of the rows that a plan names; rows that have finished have none."""
    plan = plan[plan[:, 0] < config.max_num_seqs]
    rows, columns = plan[:, 0], plan[:, 1]
    q_lens = (1 + config.num_draft_tokens) * ~np.asarray(state.finished)[rows]
    seq_lens = np.where(q_lens > 0, np.asarray(state.seq_lens)[rows] + q_lens, 0)
    page_tables = [np.asarray(table)[rows] for table in state.page_tables]
    for table, pages in zip(page_tables, np.split(plan[:, 2:], len(page_tables), axis=1), strict=True):
        for i, column in enumerate(columns):
            table[i, column : column + pages.shape[1]] = pages[i, : config.max_pages - column]
    return page_tables, seq_lens, q_lens


def _wide(window: np.ndarray, config: ResolvedConfig) -> np.ndarray:
    """Page tables that have what is sent of a window's, and page 0 elsewhere."""
    table = np.zeros((len(window), config.max_pages), np.int32)
    for row, (column, *pages) in zip(table, window, strict=True):
        row[column : column + len(pages)] = pages[: config.max_pages - column]
    return table


def _starts(q_lens: np.ndarray) -> np.ndarray:
    return np.cumsum([0, *q_lens])


def _check(
    page_tables: list[np.ndarray], seq_lens: np.ndarray, cu_q_lens: np.ndarray, num_tokens: int, config: ResolvedConfig
) -> None:
    page_size, q_lens = config.page_size, np.diff(cu_q_lens)
    for table, num_pages in zip(page_tables, config.pages_of_lists, strict=True):
        validate(table, seq_lens, num_pages, page_size, cu_q_lens=cu_q_lens, num_tokens=num_tokens)
    if (q_lens > seq_lens).any():
        row = int(np.argmax(q_lens > seq_lens))
        raise ValueError(
            f"`seq_lens` must count the launch's own tokens. Got seq_lens[{row}]={seq_lens[row]}, {q_lens[row]} tokens."
        )
    row = np.repeat(np.arange(len(seq_lens)), q_lens)
    position = np.arange(cu_q_lens[-1]) - cu_q_lens[row + 1] + seq_lens[row]
    for table in page_tables:
        pages = table[row, position // page_size]
        slots, times = np.unique(pages * page_size + position % page_size, return_counts=True)
        wrong = (slots < page_size) | (times > 1)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                "A launch must write each slot once and none of page 0, which is reserved. "
                f"Got slot {slots[i]} of page {slots[i] // page_size} {times[i]} times."
            )
