"""Text in, text out, on the bundled checkpoint."""

import dataclasses
import json
import threading
from importlib.metadata import entry_points

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.serving.frontend.chat import ChatTemplate
from tests.often import slow


@pytest.fixture(scope="module")
def llm():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    return jattn.LLM(point.load()(), max_num_seqs=4, max_context_len=128, prefill_tokens=64, progress=False)


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
    (mapping,) = llm.generate({"prompt": "import os"}, GREEDY)
    assert text == tokens == mapping


@pytest.mark.parametrize(
    "prompts",
    [
        slow(np.array([5, 6, 7])),
        np.array([[5, 6, 7]]),
        [np.int64(5), np.int64(6), np.int64(7)],
        slow([np.array([5, 6, 7])]),
    ],
    ids=["array", "rows", "scalars", "list_of_arrays"],
)
def test_token_ids_may_come_from_numpy(llm, prompts):
    assert llm.generate(prompts, GREEDY) == llm.generate([5, 6, 7], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "got"),
    [([[1.5, 2.5]], "1.5"), ([1.5], "1.5"), (np.array([1.5]), "1.5"), (b"abc", "b'abc'"), ([["a"]], "'a'")],
)
def test_prompts_that_are_no_token_ids_are_refused(llm, prompts, got):
    with pytest.raises(ValueError, match=rf"Token ids must be whole numbers .* Got .*{got}"):
        llm._requests(prompts, GREEDY)
    assert not llm.engine.has_work


def test_threads_may_share_it(llm):
    expected = [llm.generate(PROMPTS, GREEDY)] * 6
    results = [None] * 6

    def work(i):
        results[i] = llm.generate(PROMPTS, GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == expected
    assert llm.engine.kv_cache.num_free == llm.engine.kv_cache.num_pages


def test_generate_works_after_an_interrupted_one(llm, monkeypatch):
    expected = llm.generate(PROMPTS, GREEDY)
    steps = llm.engine.executor.compiled_steps

    def interrupted(*arguments):
        steps(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.executor, "compiled_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert llm.engine.kv_cache.num_free == llm.engine.kv_cache.num_pages
    assert llm.generate(PROMPTS, GREEDY) == expected


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
    assert llm.engine.kv_cache.num_free == llm.engine.kv_cache.num_pages


def test_stats_count_the_run(llm):
    completions = llm.generate(PROMPTS, GREEDY)
    stats = llm.stats
    assert stats.requests == 3
    assert stats.generated_tokens == 36
    assert stats.prompt_tokens == sum(len(completion.prompt_token_ids) for completion in completions)
    assert 0 < stats.time_to_first_token <= stats.seconds
    assert 3 <= stats.peak_pages <= stats.num_pages


def test_stats_are_those_of_the_threads_own_call(llm):
    counts = {}

    def work(count):
        llm.generate(PROMPTS[:count], GREEDY)
        counts[count] = (llm.stats.requests, llm.stats.generated_tokens)

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert counts == {count: (count, 12 * count) for count in (1, 2, 3)}


def test_stats_of_a_stream_bear_another_one_beside_it(llm):
    outer = llm.stream(PROMPTS, GREEDY)
    next(outer)
    stats, peak = llm.stats, llm.stats.peak_pages
    llm.generate("import os", GREEDY)
    assert llm.stats is not stats
    assert llm.stats.peak_pages > peak  # of all that ran beside it
    assert sum(1 for _ in outer) == 35
    assert stats.generated_tokens == 36
    assert stats.peak_pages >= llm.stats.peak_pages
    assert not llm._running


def test_logits_that_are_not_finite_end_a_request_with_a_sentence(llm, monkeypatch):
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), llm.engine.executor.weights)
    monkeypatch.setattr(llm.engine.executor, "weights", broken)
    completions = llm.generate(PROMPTS, GREEDY)
    assert [(c.text, c.token_ids, c.finish_reason) for c in completions] == [("", (), "error")] * 3
    assert completions[1].error.startswith("The model's logits after 3 tokens are NaN or infinite: the weights")
    assert llm.stats.generated_tokens == 0
    assert llm.stats.time_to_first_token == 0
    (delta,) = llm.stream("import os", GREEDY)
    assert (delta.token_ids, delta.finish_reason, delta.error) == ((), "error", completions[1].error)
    monkeypatch.undo()
    assert all(completion.error is None for completion in llm.generate(PROMPTS, GREEDY))


def test_a_prompt_that_cannot_be_served_starts_none(llm):
    with pytest.raises(ValueError, match="A prompt must leave room"):
        llm.generate(["fine", "x " * 400], GREEDY)
    assert not llm.engine.has_work


def test_sampling_params_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match=r"Got 2 for 3 prompts"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_without_sampling_params_the_checkpoints_own_are_taken(llm):
    ((request,),) = llm._requests(PROMPTS[0], None)
    assert request.params == llm.get_default_sampling_params() == jattn.SamplingParams(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], 5])
def test_sampling_params_that_are_none_are_refused(llm, params):
    with pytest.raises(ValueError, match="`sampling_params` must be `SamplingParams`, or several"):
        llm._requests("a", params)  # the public face is typed, and types are checked in tests


def test_prompts_are_truncated_to_their_last_tokens(llm):
    tokens = list(range(5, 205))
    for count, expected in ((3, tokens[-3:]), (-1, tokens[-127:]), (500, tokens[:90])):
        params = dataclasses.replace(GREEDY, truncate_prompt_tokens=count)
        ((request,),) = llm._requests(tokens if count != 500 else tokens[:90], params)
        assert request.prompt == expected


def test_bad_words_may_not_come_alone_or_after_a_space(llm):
    first = llm.tokenizer.encode("import", add_special_tokens=False)
    spaced = llm.tokenizer.encode(" import", add_special_tokens=False)
    assert len(first) == len(spaced) == 1
    ((request,),) = llm._requests("x", dataclasses.replace(GREEDY, bad_words=["import"], logit_bias={7: 1.0}))
    assert set(request.params.logit_bias) == {*first, *spaced, 7}
    (output,) = llm.generate("x", dataclasses.replace(GREEDY, logit_bias={first[0]: 100}, bad_words=["import"]))
    assert first[0] not in output.token_ids
    with pytest.raises(ValueError, match=r"`bad_words` must be words of one token each: .* Got 'qqqqzzzz', of \d"):
        llm._requests("x", dataclasses.replace(GREEDY, bad_words=["qqqqzzzz"]))


def test_greedy_sequences_of_one_prompt_are_equal(llm):
    (output,) = llm.generate("import os", dataclasses.replace(GREEDY, n=2))
    assert output.outputs[0].text == output.outputs[1].text != ""


SAMPLED = jattn.SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)


def test_each_of_n_sequences_is_what_its_seed_gives_alone(llm):
    params = dataclasses.replace(SAMPLED, n=3, seed=2**32 - 2, presence_penalty=0.5)
    (output,) = llm.generate(PROMPTS[0], params)
    assert llm.stats.requests == 1
    assert llm.stats.generated_tokens == 36
    assert len({completion.text for completion in output.outputs}) == 3
    for completion, seed in zip(output.outputs, (2**32 - 2, 2**32 - 1, 0), strict=True):
        (alone,) = llm.generate(PROMPTS[0], dataclasses.replace(params, n=1, seed=seed))
        assert dataclasses.replace(completion, index=0) == alone.outputs[0]


def test_sequences_without_a_seed_differ(llm):
    outputs = llm.generate(PROMPTS[:2], dataclasses.replace(SAMPLED, n=3, seed=None))
    assert [len({completion.text for completion in output.outputs}) for output in outputs] == [3, 3]


@pytest.mark.parametrize("seed", [1, slow(2)])
def test_stop_string_ends_a_text_before_it(llm, seed):
    """Any part of the text without it will do: cut from the middle, it spans tokens."""
    params = dataclasses.replace(SAMPLED, seed=seed)
    (free,) = llm.generate(PROMPTS[0], params)
    middle = len(free.text) // 2
    stop = free.text[middle - 3 : middle + 3]
    (stopped,) = llm.generate(PROMPTS[0], dataclasses.replace(params, stop=stop))
    (completion,) = stopped.outputs
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < len(free.token_ids)
    assert llm.engine.kv_cache.num_free == llm.engine.kv_cache.num_pages
    (whole,) = llm.generate(PROMPTS[0], dataclasses.replace(params, stop=stop, include_stop_str_in_output=True))
    assert whole.text == stopped.text + stop


def test_logprobs_are_of_the_tokens_and_of_the_prompt(llm):
    params = dataclasses.replace(SAMPLED, logprobs=2, prompt_logprobs=1, n=2)
    (output,) = llm.generate(PROMPTS[0], params)
    nothing, *of_prompt = output.prompt_logprobs
    assert nothing is None
    assert [next(iter(found)) for found in of_prompt] == list(output.prompt_token_ids[1:])
    for completion in output.outputs:
        assert [next(iter(found)) for found in completion.logprobs] == list(completion.token_ids)
        assert {len(found) for found in completion.logprobs} <= {2, 3}
        assert completion.cumulative_logprob < 0
        for found in completion.logprobs:
            assert all(logprob.decoded_token == llm.tokenizer.decode([token]) for token, logprob in found.items())
    streamed = list(llm.stream(PROMPTS[0], params))
    assert [delta.prompt_logprobs for delta in streamed if delta.prompt_logprobs] == [output.prompt_logprobs]
    assert all(len(delta.logprobs) == 1 for delta in streamed)
    (without,) = llm.generate(PROMPTS[0], SAMPLED)
    assert (without.prompt_logprobs, without.outputs[0].logprobs) == (None, None)


@pytest.fixture
def chat_llm(llm, tmp_path, monkeypatch):
    template = "{{ bos_token }}{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    template += "{{ extra }}{% if add_generation_prompt %}# assistant:{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": "<|endoftext|>"})
    )
    monkeypatch.setattr(llm, "chat_template", ChatTemplate(tmp_path))
    return llm


def test_chat_answers_what_the_template_writes(chat_llm):
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ho"}],
    ]
    texts = ["# user: Hi\n# assistant:", "# system: Be brief.\n# user: Ho\n# assistant:"]
    begin = chat_llm.tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    prompts = [begin + chat_llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert len(begin) == 1
    assert chat_llm.chat(conversations, GREEDY) == chat_llm.generate(prompts, GREEDY)
    assert chat_llm.chat(conversations[0], GREEDY) == chat_llm.generate(prompts[:1], GREEDY)
    tokens = chat_llm.chat_tokens(conversations[0], add_generation_prompt=False, extra="!")
    assert chat_llm.tokenizer.decode(tokens, skip_special_tokens=False) == "<|endoftext|># user: Hi\n!"


@pytest.mark.parametrize("messages", ["Hi", [], ["Hi"], [[]], [[{"role": "user"}], ["Hi"]], None])
def test_chat_of_no_messages_is_refused(chat_llm, messages):
    with pytest.raises(ValueError, match="`messages` must be "):
        chat_llm.chat(messages, GREEDY)
    assert not chat_llm.engine.has_work


def test_chat_without_a_template_is_refused(llm):
    with pytest.raises(ValueError, match="The checkpoint has no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])


LONG = "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self, path, encoding):\n        self.path = path\n"


def test_output_tells_how_much_of_the_prompt_was_in_the_prefix_cache(llm):
    assert llm.reset_prefix_cache()
    page_size, prompt_len = llm.engine.config.page_size, len(llm.tokenizer.encode(LONG))
    outputs = [
        *llm.generate(LONG, GREEDY),
        *llm.generate([LONG, LONG + "    def"], dataclasses.replace(GREEDY, n=2)),
        *llm.generate({"prompt": LONG, "cache_salt": "tenant"}, GREEDY),
    ]
    full = (prompt_len - 1) // page_size * page_size
    assert full > 0
    assert [output.num_cached_tokens for output in outputs] == [0, full, prompt_len // page_size * page_size, 0]
    assert outputs[0].text == outputs[1].text == outputs[3].text
    assert llm.reset_prefix_cache()
    assert llm.generate(LONG, GREEDY)[0].num_cached_tokens == 0
