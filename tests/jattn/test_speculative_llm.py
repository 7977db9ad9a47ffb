"""LLM with drafts, on the bundled checkpoint: stop strings amid accepted runs, figures, streams that end early."""

import dataclasses
from importlib.metadata import entry_points

import pytest

import jattn
from jattn.serving.executor import step_plans

GREEDY = jattn.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPT = "x = [1, 2, 3, 4, 5]\n" * 3


@pytest.fixture(scope="module")
def llm():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plans, "VARIANTS", ("greedy",))
        return jattn.LLM(
            point.load()(),
            max_num_seqs=4,
            max_context_len=128,
            prefill_tokens=64,
            full_sampling=False,
            speculative=jattn.DraftModel(num_layers=3, num_draft_tokens=4),
            progress=False,
        )


def test_default_pool_lets_all_requests_grow_to_the_context_at_once(llm):
    """128 tokens and 4 drafted ones take 9 pages of 16."""
    assert llm.engine.kv_cache.num_pages >= 4 * 9


def test_stop_string_amid_a_run_ends_the_text_before_it(llm):
    (free,) = llm.generate(PROMPT, GREEDY)
    assert len(free.token_ids) == 24
    for begin in range(1, 20, 6):
        stop = free.text[begin : begin + 3]
        (output,) = llm.generate(PROMPT, dataclasses.replace(GREEDY, stop=stop))
        assert output.text == free.text[: free.text.index(stop)]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert llm.engine.kv_cache.num_free == llm.engine.kv_cache.num_pages


def test_stats_are_of_the_calls_own_requests(llm):
    prompts = [PROMPT, "import os", "def main():"]
    outputs = llm.generate(prompts, GREEDY)
    drafts = llm.stats.drafts
    assert drafts.tokens == sum(len(output.token_ids) - 1 for output in outputs)  # but those that the prefills give
    assert drafts.drafted == 4 * drafts.steps
    assert 0 < drafts.accepted <= drafts.tokens - drafts.steps + len(prompts)
    assert drafts.acceptance_rate == drafts.accepted / drafts.drafted
    assert drafts.tokens_per_step == drafts.tokens / drafts.steps
    assert drafts.tokens_per_step > 1
    llm.generate("import os", dataclasses.replace(GREEDY, max_tokens=1))
    assert (llm.stats.drafts.steps, llm.stats.drafts.acceptance_rate, llm.stats.drafts.tokens_per_step) == (
        0,
        None,
        None,
    )


def test_stream_left_amid_a_run_frees_its_pages(llm):
    stream = llm.stream([PROMPT, "import os"], GREEDY)
    for _ in range(9):
        next(stream)
    stream.close()
    assert llm.engine.kv_cache.num_free == llm.engine.kv_cache.num_pages
    assert llm.generate("import os", GREEDY)[0].finish_reason == "length"
