"""A prompt of a model of latent attention by both forms."""

import json

from bench import family_step, latent_prompt
from jattn_models.deepseek import DeepseekV2ForCausalLM
from tests.bench.test_family_step import TOY


def test_command_prints_a_row_a_form(monkeypatch, capsys):
    shapes = {"deepseek-v2-lite": family_step.Shapes("toy", TOY, DeepseekV2ForCausalLM)}
    monkeypatch.setattr(latent_prompt, "SHAPES", shapes)
    expanded = []
    extend = latent_prompt.PagedAttentionBackend.extend_latent

    def noted(*arguments):
        result = extend(*arguments)
        expanded.append(result is not None)
        return result

    monkeypatch.setattr(latent_prompt.PagedAttentionBackend, "extend_latent", noted)
    latent_prompt.main(["--layers", "2", "--tokens", "12", "--prefix", "20", "--page", "8", "--repeats", "1"])
    rows = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [row["form"] for row in rows] == ["absorbed", "expanded"]
    assert expanded == [False, False, True, True]
    assert all(row.items() >= {"model": "toy", "tokens": 12, "prefix": 20, "layers": 2}.items() for row in rows)
    assert all(row["time_ms"] >= row["min_ms"] > 0 for row in rows)
