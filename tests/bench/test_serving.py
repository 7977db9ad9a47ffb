"""The bench of serving: a server of random weights in this process, its client in another."""

import json
import tempfile
from pathlib import Path

from bench import client_limit, serving
from jattn.load import steady
from jattn.serving.frontend.text import Tokenizer
from tests.bench.test_decode_step import TOY
from tests.jattn.harness.tiny import one_variant


def test_served_rate_stands_beside_the_engines_own(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(steady, "_LOOK_SECONDS", 0.0005)  # a run takes some 20 ms
    monkeypatch.setitem(serving.SHAPES, "toy", (TOY, serving.LlamaForCausalLM))
    sizes = "--input-len 12 --output-len 6 --range 0.5 --prefix-len 16 --prefill-tokens 64"
    with one_variant("greedy"):
        arguments = ["--shapes", "toy", "--concurrency", "1,3", "--num-prompts", "5", *sizes.split()]
        serving.main([*arguments, "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert [row["concurrency"] for row in rows] == [1, 3]
    for row in rows:
        assert (row["requests"], row["failed"]) == (5, 0)
        assert row["input_tokens"] >= 5 * (16 + 6)
        assert 5 * 3 <= row["output_tokens"] <= 5 * 9
        assert row["served_share"] == round(row["output_tokens_per_s"] / row["own_output_tokens_per_s"], 4)
        assert 0 <= row["found_idle_share"] <= 1
        assert 0 <= row["idle_share_at_least"] <= row["idle_share_at_most"]  # with the warm-up's: perhaps above 1
        if row["concurrency"] == 1:  # three may be together for too short a time to be seen twice
            assert row["steady_seconds"] > 0
            assert 0 <= row["steady_idle_share_at_least"] <= row["steady_idle_share_at_most"]
        assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p99"]
    assert "served of the engine's own" in capsys.readouterr().out


def test_every_random_token_is_a_word():
    with tempfile.TemporaryDirectory() as folder:
        serving.write_tokenizer(Path(folder), 300)
        tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([0, 299, 17]) == " 0 299 17"


def test_client_limit_counts_the_events_of_all_streams(capsys):
    client_limit.main(["--concurrency", "4", "--events", "50"])
    assert capsys.readouterr().out.startswith("4 streams at once: ")
