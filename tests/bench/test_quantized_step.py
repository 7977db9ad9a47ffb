"""Steps of a model with weights in fewer bits: a row for each kind and each batch."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from bench import quantized_step
from bench.decode_step import random_model
from tests.bench.test_decode_step import TOY


def test_rows_say_what_weights_there_were(monkeypatch, capsys):
    monkeypatch.setattr(quantized_step, "random_model", functools.partial(random_model, TOY))
    quantized_step.main(["--batch", "2:24", "--page", "16", "--steps", "4"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["weights"], row["model"]) for row in rows] == [
        (weights, f"Llama-3-8B shapes, random {weights}") for weights in ("bf16", "fp8", "int4")
    ]
    assert all(row["batch"] == 2 and row["ctx"] == 24 and row["time_ms"] > 0 for row in rows)
    with pytest.raises(SystemExit):
        quantized_step.main(["--weights", "int3"])


@pytest.mark.slow
def test_keys_in_fp8_are_half_the_bytes_and_the_rows_say_so(monkeypatch, capsys):
    monkeypatch.setattr(quantized_step, "random_model", functools.partial(random_model, TOY))
    batch = ["--weights", "fp8", "--batch", "2:512", "--steps", "4"]
    quantized_step.main([*batch, "--kv", "bfloat16,float8_e4m3fn"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kv"] for row in rows] == ["bfloat16", "float8_e4m3fn"]
    assert rows[1]["roofline_ms"] < rows[0]["roofline_ms"]


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_random_weights_in_few_bits_are_as_large_as_others(quantization):
    model = random_model(TOY, quantization=quantization)
    down = model.weights["layers"][0]["mlp"]["down_proj"]
    scale = down["scales"][...].reshape(-1)[0]  # of all
    weights = down["kernel"][...].astype(jnp.float32) * scale.astype(jnp.float32)
    assert float(jnp.std(weights)) == pytest.approx(0.02, rel=0.1)
    bits = sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) for leaf in jax.tree.leaves(model.weights))
    read = bits // 8 - 2 * 64 * 64
    assert model.read_bytes(1) == read < random_model(TOY).read_bytes(1)
