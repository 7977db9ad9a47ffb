"""Programs made for the servers of vLLM and OpenAI, unchanged: all that they ask for is served, and rightly."""

import json
from pathlib import Path

import pytest

import jattn
from tests.jattn.harness.clients import called, checkpoint
from tests.jattn.harness.http_server import MODEL

pytestmark = pytest.mark.slow

LANGCHAIN_CALLS = Path(__file__).parent / "harness" / "langchain_calls.py"
TEXTS = [
    ("import os\nimport", " sys\n"),
    ("class Node:\n    def __init__(self", ", name):\n"),
    ("def main(argv):\n    return", " None"),
    ("# é 🙂\nfor i in range(", "10):"),
]
TASKS = {
    "endings": """
        task: endings
        output_type: loglikelihood
        metric_list: [{metric: acc}, {metric: perplexity}]""",
    "lines": """
        task: lines
        output_type: generate_until
        generation_kwargs: {until: ["\\n"], max_gen_toks: 12, temperature: 0}
        metric_list: [{metric: exact_match}]""",
}
DATA = """
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {file}}}}}
        test_split: test
        target_delimiter: ""
        doc_to_text: "{{{{text}}}}"
        doc_to_target: "{{{{ending}}}}"
"""


def evaluated(folder, port, model, path, tasks, *flags):
    """What lm-eval has of each text of each task."""
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text, "ending": ending}) + "\n" for text, ending in TEXTS))
    for name in tasks:
        (folder / f"{name}.yaml").write_text(TASKS[name] + DATA.format(file=file))
    arguments = f"model={MODEL},base_url=http://127.0.0.1:{port}{path},num_concurrent=3,max_length=256"
    command = ["run", "--model", model, "--model_args", arguments, "--tasks", ",".join(tasks), "--include_path", folder]
    command += ["--output_path", folder / "out", "--log_samples", *flags]
    called("lm-eval", "lm-eval[api]", "lm-eval", *command, folder=folder)
    found = {}
    for name in tasks:
        (samples,) = folder.glob(f"out/*/samples_{name}_*.jsonl")
        of_texts = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        found[name] = [sample["resps"][0][0] for sample in of_texts]
    return found


def in_process(llm):
    """Each ending's log-likelihood and whether it is the likeliest; and each text's greedy line."""
    endings, lines = [], []
    for text, ending in TEXTS:
        ids, whole = (llm.tokenizer.encode(t, add_special_tokens=False) for t in (text, text + ending))
        params = jattn.SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": whole}, params)
        found = [output.prompt_logprobs[i][whole[i]] for i in range(len(ids), len(whole))]
        endings.append((sum(one.logprob for one in found), all(one.rank == 1 for one in found)))
        params = jattn.SamplingParams(max_tokens=12, temperature=0.0, stop=["\n"])
        (output,) = llm.generate({"prompt_token_ids": ids}, params)
        lines.append(output.text)
    return endings, lines


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_finds_what_the_library_does(http_server, tmp_path, batch_size):
    path, flags = "/v1/completions", ("--batch_size", batch_size)
    found = evaluated(tmp_path, http_server.port, "local-completions", path, ["endings", "lines"], *flags)
    endings, lines = http_server.on_engine(lambda _: in_process(http_server.service.llm))
    assert [float(value) for value, _ in found["endings"]] == pytest.approx([value for value, _ in endings], abs=1e-3)
    assert [greedy == "True" for _, greedy in found["endings"]] == [greedy for _, greedy in endings]
    assert found["lines"] == lines


def test_lm_eval_chats(http_server, tmp_path):
    path, flags = "/v1/chat/completions", ("--apply_chat_template",)
    found = evaluated(tmp_path, http_server.port, "local-chat-completions", path, ["lines"], *flags)
    for (text, _), line in zip(TEXTS, found["lines"], strict=True):
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, "stop": ["\n"]}
        assert line == http_server.post(path, asked)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "flags",
    [
        "--dataset-name random --random-input-len 64 --random-output-len 16 --ignore-eos --logprobs 1",
        "--dataset-name prefix_repetition --prefix-repetition-prefix-len 64 --prefix-repetition-suffix-len 32 "
        "--prefix-repetition-num-prefixes 4 --prefix-repetition-output-len 16 --ignore-eos --temperature 0",
        "--backend openai-chat --endpoint /v1/chat/completions --random-input-len 64 --random-output-len 16 "
        "--ignore-eos --num-warmups 2 --ready-check-timeout-sec 30",
    ],
    ids=["completions", "prefixes", "chat"],
)
def test_vllm_bench_serve_has_no_failure(http_server, tmp_path, flags):
    command = f"bench serve --port {http_server.port} --model {MODEL} --tokenizer {checkpoint()} --num-prompts 40"
    command += f" --max-concurrency 8 --save-result --result-filename found.json {flags}"
    called("vllm", "vllm", "vllm", *command.split(), folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (40, 0, 640)
    assert 0 < found["median_ttft_ms"] < found["median_ttft_ms"] + found["median_tpot_ms"] < 60_000


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [
        ("chat", "--streaming --use-server-token-count --per-chunk-usage"),
        ("completions", "--streaming"),
        ("chat", ""),
    ],
    ids=["chat_streamed", "completions_streamed", "chat"],
)
def test_aiperf_has_no_error(http_server, tmp_path, endpoint, flags):
    command = f"profile -m {MODEL} --tokenizer {checkpoint()} --url http://127.0.0.1:{http_server.port} --ui none"
    command += f" --endpoint-type {endpoint} --request-count 40 --concurrency 8 --isl 64 --osl 16 --reset-kv-cache"
    command += f" --extra-inputs ignore_eos:true --artifact-dir {tmp_path / 'out'} {flags}"
    called("aiperf", "aiperf", "aiperf", *command.split(), folder=tmp_path)
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert (found["request_count"]["avg"], found["error_summary"], found["was_cancelled"]) == (40, [], False)
    assert found["total_usage_completion_tokens"]["avg"] == 640
    metrics = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())["metrics"]
    assert {"vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds", "vllm:request_success"} <= set(metrics)


def test_langchain_calls_in_all_its_ways(http_server, tmp_path):
    url = f"http://127.0.0.1:{http_server.port}/v1"
    printed = called("langchain-openai", "langchain-openai", "python", LANGCHAIN_CALLS, url, MODEL, folder=tmp_path)
    found = json.loads(printed)
    roles = [("user", "import os"), ("assistant", "import sys"), ("user", "import re")]
    messages = [{"role": role, "content": content} for role, content in roles]
    answer = http_server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12})
    (choice,), usage = answer["choices"], answer["usage"]
    text = choice["message"]["content"]
    expected = {
        "text": text,
        "usage": [usage["prompt_tokens"], usage["completion_tokens"]],
        "finish_reason": choice["finish_reason"],
    }
    for way in ("invoked", "streamed", "streamed_async"):
        assert found[way] == expected, way
    assert found["batched"] == [expected] * 8
    assert found["scored"] == [2] * usage["completion_tokens"]
    assert (found["stopped"]["finish_reason"], found["stopped"]["text"]) == ("stop", text[: text.index(text[3:5])])
    asked = {"prompt": "import os\n", "temperature": 0, "max_tokens": 12}
    assert found["completed"] == http_server.post("/v1/completions", asked)["choices"][0]["text"]
    assert "".join(found["completed_streamed"]) == found["completed"]
    for way in ("tool_called", "tool_streamed", "any_tool_called"):
        (call,) = found[way]
        assert call["name"] == "Weather", way
        assert_is_weather(call["args"])
    for method in ("json_schema", "function_calling"):
        assert_is_weather(found["structured"][method])


def assert_is_weather(found):
    """An object of the harness's `Weather`."""
    assert found.keys() == {"city", "days"}
    assert found["city"] in ("Oslo", "Rome")
    assert found["days"] in (1, 7)
