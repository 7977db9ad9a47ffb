"""Text in, text out, on the bundled checkpoint."""

from importlib.metadata import entry_points

import pytest

import jattn


@pytest.fixture(scope="module")
def llm():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    return jattn.LLM(point.load()(), max_num_seqs=4, max_context_len=128, progress=False)


PROMPTS = ["def main():\n", "import os", "class Point:\n    "]
GREEDY = jattn.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_generate_and_stream_give_the_same_text(llm):
    completions = llm.generate(PROMPTS, GREEDY)
    streamed = [""] * len(PROMPTS)
    reasons = [None] * len(PROMPTS)
    for delta in llm.stream(PROMPTS, GREEDY):
        streamed[delta.index] += delta.text
        reasons[delta.index] = delta.finish_reason
    assert [completion.text for completion in completions] == streamed
    assert [completion.finish_reason for completion in completions] == reasons == ["length"] * 3
    assert all(len(completion.token_ids) == 12 for completion in completions)
    assert all(llm.tokenizer.decode(list(c.token_ids)) == c.text for c in completions)


def test_one_prompt_may_stand_alone_as_text_or_tokens(llm):
    (text,) = llm.generate("import os", GREEDY)
    (tokens,) = llm.generate(llm.tokenizer.encode("import os"), GREEDY)
    assert text == tokens


def test_streams_may_interleave(llm):
    expected = llm.generate(PROMPTS[:2], GREEDY)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    for pair in zip(*streams, strict=True):
        for i, delta in enumerate(pair):
            texts[i] += delta.text
    assert texts == [completion.text for completion in expected]


def test_leaving_a_stream_frees_its_pages(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_pages


def test_stats_count_the_run(llm):
    completions = llm.generate(PROMPTS, GREEDY)
    stats = llm.stats
    assert stats.requests == 3
    assert stats.generated_tokens == 36
    assert stats.prompt_tokens == sum(len(completion.prompt_token_ids) for completion in completions)
    assert 0 < stats.time_to_first_token <= stats.seconds
    assert 3 <= stats.peak_pages <= stats.num_pages


def test_a_prompt_that_cannot_be_served_starts_none(llm):
    with pytest.raises(ValueError, match="A prompt must leave room"):
        llm.generate(["fine", "x " * 400], GREEDY)
    assert not llm.engine.has_work


def test_sampling_params_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match=r"Got 2 for 3 prompts"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_unknown_dtype_lists_the_choices():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    with pytest.raises(ValueError, match=r"auto, float32, bfloat16, float16. Got 'int8'"):
        jattn.LLM(point.load()(), dtype="int8")
