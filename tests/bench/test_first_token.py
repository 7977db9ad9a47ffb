"""The first-token bench drives the engine, on a Llama of two layers, and tells a profile's parts."""

import pytest

from bench import first_token
from bench.decode_step import random_model
from bench.first_token import measured, parts, sentence
from bench.timing import Profile
from tests.bench.test_decode_step import TOY
from tests.jattn.harness.tiny import one_variant


@pytest.mark.slow  # test_inter_token drives an engine likewise
def test_measured_waits_for_the_prompts_first_token():
    with one_variant("greedy"):
        row = measured(random_model(TOY), prompt=100, prefill_tokens=32)
    assert row.items() >= {"case": "first_token", "prompt": 100, "prefill_tokens": 32}.items()
    assert row["time_ms"] > 0
    assert "100 tokens came after" in sentence(row)


def test_parts_are_products_and_attention():
    times = {"nvjet_sm90_x": 3000.0, "paged_extend_mosaic": 1000.0, "rms_norm": 700.0, "sm90_xmma_GEMM": 1000.0}
    row = parts(Profile(times, dict.fromkeys(times, 1), 5700.0, 6000.0), 6.0)
    assert row == {"products_ms": 4.0, "attention_ms": 1.0, "over_both": 1.2}
    words = sentence({"prompt": 32768, "prefill_tokens": 8192, "time_ms": 6.0, **row})
    assert words.endswith("8,192 tokens a launch: 1.2 x what products (4.0 ms) and attention (1.0 ms) take.")
    assert parts(Profile({}, {}, 0.0, 0.0), 6.0) == {}


def test_command_line_runs_each_size(monkeypatch, capsys):
    monkeypatch.setattr(
        first_token, "random_model", lambda shapes, parallel, quantization: shapes["max_position_embeddings"]
    )
    monkeypatch.setattr(
        first_token,
        "measured",
        lambda model, prompt, prefill_tokens: {"prompt": prompt, "prefill_tokens": prefill_tokens, "time_ms": model},
    )
    first_token.main(["--prompt", "1024", "--prefill-tokens", "256", "512"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("ms, ")[1] for line in lines] == ["256 tokens a launch.", "512 tokens a launch."]
    assert "after 2,048 ms" in lines[0]
    with pytest.raises(SystemExit):
        first_token.main(["--prompt", "x"])
