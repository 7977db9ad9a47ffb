"""What the host sends with each launch: the scheduler's plans as arrays of a bucket's sizes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.serving.plan import Chunk
from jattn.serving.request import Request
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.choice import Variant
from jattn.serving.steps.loop_state import LoopState, empty_rows
from jattn.serving.steps.plain import PrefillBatch


def decode_batch(requests: Sequence[Request], bucket: int, config: ResolvedConfig) -> np.ndarray:
    """What a decode launch takes (`LoopState.with_pages`): rows and their last pages, padded to `bucket`.

    The last pages include those that this launch's tokens open. Where they go in the row's tables only the host knows.
    """
    width, num_lists = config.pages_a_step, 1 + len(config.windows)
    plan = np.zeros((bucket, 2 + num_lists * width), np.int32)
    plan[:, 0] = config.max_num_seqs
    rows = []
    for request in requests:
        assert request.row is not None
        column = max(0, len(request.page_lists[0]) - width)
        row = [request.row, column]
        for pages in request.page_lists:
            row += pages[column:]
            row += [0] * (width - len(pages))
        rows.append(row)
    if rows:
        plan[: len(rows)] = rows
    return plan


def prefill_batch(chunks: Sequence[Chunk], bucket: int, config: ResolvedConfig, variant: Variant) -> PrefillBatch:
    """Parts of prompts, padded to `bucket` tokens."""
    size = config.prefill_seqs
    is_full = variant == "full"
    as_it_is: Any = None
    values = empty_rows(
        size,
        max_pages=config.max_pages,
        max_stop_ids=config.max_stop_ids,
        max_logit_bias=config.max_logit_bias if is_full else None,
        with_limits=config.speculative is not None,
        numpy=np,
    )
    batch = PrefillBatch(
        input_ids=_host_array(bucket, 0, np.int32),
        cu_q_lens=_host_array(size + 1, 0, np.int32),
        rows=_host_array(size, config.max_num_seqs, np.int32),
        is_first=_host_array(size, False, np.bool_),
        is_last=_host_array(size, False, np.bool_),
        values=dataclasses.replace(values, page_tables=(*values.page_tables, *(as_it_is for _ in config.windows))),
        window_pages=tuple(_host_array((size, 1 + width), 0, np.int32) for width in config.window_widths),
    )
    end = 0
    for i, chunk in enumerate(chunks):
        begin, end = end, end + chunk.stop - chunk.start
        batch.input_ids[begin:end] = chunk.request.tokens[chunk.start : chunk.stop]
        batch.cu_q_lens[i + 1 :] = end
        batch.rows[i] = chunk.request.row
        batch.is_first[i], batch.is_last[i] = chunk.is_first, chunk.is_last
        batch.values.seq_lens[i] = chunk.stop
        _fill_row(batch.values, i, chunk.request)
        for window, own in zip(batch.window_pages, chunk.request.page_lists[1:], strict=True):
            begin = max(0, len(own) - window.shape[1] + 1)
            window[i, : 1 + len(own) - begin] = begin, *own[begin:]
        if is_full:
            _fill_rules(batch.values, i, chunk.request)
    return batch


def _host_array(size: int | tuple[int, int], value: int | bool, dtype: Any) -> Any:
    """A NumPy array where a launch takes a JAX one."""
    return np.full(size, value, dtype)


def _fill_row(rows: LoopState, i: int, request: Request) -> None:
    rows.page_tables[0][i, : len(request.pages)] = request.pages
    stop_ids = sorted(request.stop_ids)
    rows.stop_ids[i, : len(stop_ids)] = stop_ids
    if rows.tokens:
        rows.tokens.limits[i] = request.limit
    params = request.params
    rows.sampling.temperature[i] = params.temperature
    rows.sampling.top_k[i] = params.top_k
    rows.sampling.top_p[i] = params.top_p
    rows.sampling.min_p[i] = params.min_p
    rows.sampling.seed[i] = request.number if params.seed is None else params.seed


def _fill_rules(rows: LoopState, i: int, request: Request) -> None:
    rules, params = rows.rules, request.params
    assert rules
    rules.in_force[i] = request.needs_full_steps
    rules.repetition_penalty[i] = params.repetition_penalty
    rules.presence_penalty[i] = params.presence_penalty
    rules.frequency_penalty[i] = params.frequency_penalty
    bias = params.logit_bias or {}
    if params.allowed_token_ids:
        bias = {token: bias.get(token, 0.0) for token in params.allowed_token_ids}
        rules.bias_ids[i] = params.allowed_token_ids[0]
        rules.only_listed[i] = True
    rules.bias_ids[i, : len(bias)] = list(bias)
    rules.bias[i, : len(bias)] = list(bias.values())
    rules.prompt_len[i] = len(request.prompt)
    rules.min_len[i] = min(len(request.prompt) + params.min_tokens, request.limit)  # an int32 of the device
