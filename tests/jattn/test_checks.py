"""Debug checks: what the loop launches passes, and a launch that would leave its pages is refused with a sentence."""

import dataclasses

import numpy as np
import pytest

from jattn.serving.executor.batches import decode_batch, prefill_batch
from jattn.serving.executor.checks import check_decode, check_prefill
from jattn.serving.plan import Chunk
from jattn.serving.request import Request, SamplingParams
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.loop_state import empty_rows
from tests.jattn.harness.tiny import run, sampled, tiny_engine

CONFIG = ResolvedConfig(
    num_pages=8, page_size=4, max_num_seqs=3, max_context_len=16, prefill_tokens=16, prefill_seqs=2, max_stop_ids=8
)


def decode_arguments(new_page=5, **changes):
    """Rows of 6, 8 and no tokens; the second one's next token opens a page. `changes` go into the state's arrays."""
    state = empty_rows(3, max_pages=4, max_stop_ids=1, numpy=np)
    state.seq_lens[:] = 6, 8, 0
    state.page_tables[0][:2, :2] = [[1, 2], [3, 4]]
    state.finished[2] = True
    for name, (index, value) in changes.items():
        array = state.page_tables[0] if name == "page_table" else getattr(state, name)
        array[index] = value
    return state, np.array([[0, 0, 1], [1, 2, new_page], [2, 0, 6], [3, 0, 0]], np.int32)


def test_decode_within_its_pages_passes():
    check_decode(*decode_arguments(), CONFIG)


def test_finished_row_is_not_looked_at():
    check_decode(*decode_arguments(page_table=((2, 1), 99), seq_lens=(2, 77)), CONFIG)


@pytest.mark.parametrize(
    ("changes", "new_page", "sentence"),
    [
        ({"page_table": ((0, 1), 99)}, 5, r"`page_table` must hold pages in 0 \.\. 7\. Got page_table\[0, 1\]=99"),
        ({"page_table": ((1, 0), -1)}, 5, r"Got page_table\[1, 0\]=-1"),
        ({"seq_lens": (0, 16)}, 5, r"`seq_lens` must be in 0 \.\. 16, .* Got seq_lens\[0\]=17"),
        ({}, 8, r"Got page_table\[1, 2\]=8"),
        ({}, 0, r"each slot once and none of page 0, .* Got slot 0 of page 0 1 times"),
        ({"seq_lens": (0, 8), "page_table": ((0, 2), 5)}, 5, r"Got slot 20 of page 5 2 times"),
    ],
)
def test_decode_out_of_its_pages_is_refused(changes, new_page, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_decode(*decode_arguments(new_page, **changes), CONFIG)


def prefill_arguments(pages=((1, 2), (3,), (5, 6))):
    """Tokens 2 to 6 of one prompt and 0 to 3 of another; beside them a row of 7 tokens decodes, and a finished one."""
    requests = [
        Request(number=i, prompt=[1] * 6, params=SamplingParams(), limit=9, stop_ids=frozenset()) for i in range(3)
    ]
    for row, request in enumerate(requests):
        request.row, request.page_lists = row, [list(pages[row])]
    state = empty_rows(3, max_pages=4, max_stop_ids=1, numpy=np)
    state.seq_lens[2], state.page_tables[0][2, 0] = 7, pages[2][0]
    chunks = [Chunk(requests[0], 2, 2, 6, is_last=True), Chunk(requests[1], 0, 0, 3, is_last=False)]
    return state, decode_batch(requests[2:], 2, CONFIG), prefill_batch(chunks, 8, CONFIG, "plain")


def test_prefill_within_its_pages_passes():
    check_prefill(*prefill_arguments(), CONFIG)


@pytest.mark.parametrize(
    ("pages", "sentence"),
    [
        (((1, 8), (3,), (5, 6)), r"Got page_table\[0, 1\]=8"),
        (((1, 3), (3,), (5, 6)), r"each slot once .* Got slot 12 of page 3 2 times"),
        (((1,), (3,), (5, 6)), r"Got slot 0 of page 0 1 times"),
        (((1, 2), (3,), (5, 8)), r"Got page_table\[2, 1\]=8"),
        (((1, 6), (3,), (5, 1)), r"Got slot 7 of page 1 2 times"),
    ],
)
def test_prefill_out_of_its_pages_is_refused(pages, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_prefill(*prefill_arguments(pages), CONFIG)


def test_prefill_longer_than_its_sequence_is_refused():
    state, plan, batch = prefill_arguments()
    batch.values.seq_lens[0] = 3
    with pytest.raises(ValueError, match=r"`seq_lens` must count the launch's own tokens. Got seq_lens\[0\]=3, 4 tok"):
        check_prefill(state, plan, batch, CONFIG)


@pytest.fixture
def check_launches(monkeypatch):
    """Switches the debug checks on."""

    def switch(engine):
        monkeypatch.setattr(engine.executor, "config", dataclasses.replace(engine.config, debug_checks=True))

    return switch


def make_crowd(engine):
    return [engine.make_request(list(range(i, i + 5 * i)), sampled(seed=i, max_tokens=20)) for i in range(1, 7)]


def test_checked_crowd_with_preemption_gives_the_same_tokens(check_launches):
    engine = tiny_engine()
    expected = run(engine, make_crowd(engine))
    check_launches(engine)
    crowd = make_crowd(engine)
    assert run(engine, crowd) == expected
    assert any(request.num_preemptions for request in crowd)


def test_refused_launch_loses_no_request(check_launches):
    engine = tiny_engine()
    expected = run(engine, make_crowd(engine)[:3])
    check_launches(engine)
    crowd = make_crowd(engine)[:3]
    for request in crowd:
        engine.add(request)
    while not all(len(request.generated) > 2 for request in crowd):
        engine.step()
    (table,) = engine.executor.state.page_tables
    tables = (table.at[crowd[1].row, 0].set(99),)
    engine.executor.state = dataclasses.replace(engine.executor.state, page_tables=tables)
    with pytest.raises(ValueError, match=r"`page_table` must hold pages in 0 \.\. 16\. Got page_table\[1, 0\]=99"):
        engine.step()
    run(engine)
    assert [request.generated for request in crowd] == expected
