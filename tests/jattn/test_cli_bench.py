"""`jattn bench serve` asks for the runs that it was told to make, and shows what came of them."""

import json

import pytest

from jattn.load import run as run_module
from jattn.load import served as served_module
from jattn.load.client import Answer
from jattn.load.figures import figures
from jattn.load.workload import Level, Workload
from jattn.serving.config import EngineConfig
from tests.jattn.harness.fake_llm import run


def row_of(level):
    answer = Answer()
    answer.times, answer.num_tokens = [answer.sent + 0.25, answer.sent + 0.5], 2
    return figures(level, [answer], [7], seconds=1.0)


@pytest.fixture
def asked(monkeypatch):
    """The runs that were made, and with what."""
    found = []

    def measured(url, workload, level, *, api_key):
        found.append((url, workload, level, api_key))
        return row_of(level)

    def measured_served(llm, workload, levels):
        found.append((llm, workload, levels))
        return [row_of(level) | {"own_output_tokens_per_s": 4.0, "served_share": 0.5} for level in levels]

    monkeypatch.setattr(run_module, "measured", measured)
    monkeypatch.setattr(served_module, "measured_served", measured_served)
    return found


def bench(*arguments):
    return run("bench", "serve", *arguments)


def test_bench_asks_a_running_server(asked, tmp_path):
    flags = "--concurrency 1,8 --input-len 30 --output-len 4 --range 0.5 --prefix-len 5 --seed 3 --api-key secret"
    result = bench("--url", "http://there:1", *flags.split(), "--json", tmp_path / "figures.json")
    assert result.exit_code == 0, result.stderr
    drawn = {"input_len": 30, "output_len": 4, "spread": 0.5, "prefix_len": 5}
    assert asked == [
        ("http://there:1", Workload(**drawn, seed=3), Level(num_prompts=16, concurrency=1), "secret"),
        ("http://there:1", Workload(**drawn, seed=4), Level(num_prompts=32, concurrency=8), "secret"),
    ]
    assert "250.00" in result.stdout
    assert "8 at a time: 1 requests in 1.0 s, 0 failed, 2.0 output tokens a second" in result.stderr
    content = json.loads((tmp_path / "figures.json").read_text())
    assert [r["concurrency"] for r in content["runs"]] == [1, 8]
    assert content["workload"]["prefix_len"] == 5


def test_bench_sends_at_rates(asked):
    assert bench("--url", "http://there:1", "--rate", "2.5,inf", "--num-prompts", 9).exit_code == 0
    levels = [level for _, _, level, _ in asked]
    assert levels == [Level(num_prompts=9, rate=2.5), Level(num_prompts=9, rate=float("inf"))]


def test_bench_serves_a_checkpoint_itself(llm, asked, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "vocab_size", 77, raising=False)
    result = bench("folder", "--input-len", 30, "--output-len", 4, "--concurrency", 2, "--max-num-seqs", 3)
    assert result.exit_code == 0, result.stderr
    expected = EngineConfig(max_num_seqs=3, max_context_len=34, compile_in_background=False)
    assert EngineConfig(**llm.options) == expected
    ((_, workload, levels),) = asked
    assert (workload.vocab_size, levels) == (77, [Level(num_prompts=16, concurrency=2)])
    assert "50.0%" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--concurrency", "1", "--rate", "1"), "`--concurrency` and `--rate` must not be given together."),
        (("--concurrency", "1,x"), "`--concurrency` must be numbers above 0, with commas between them. Got '1,x'."),
        (("--rate", "0"), "`--rate` must be numbers above 0"),
        (("folder", "--url", "http://there:1"), "CHECKPOINT and `--url` must not be given together"),
        (("--json", "missing/figures.json"), "`--json` must be a file in a folder that is there."),
        (("--json", "/"), "`--json` must be a file in a folder that is there. Got /."),
    ],
)
def test_bench_refuses_in_a_sentence(llm, asked, arguments, said):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not asked
