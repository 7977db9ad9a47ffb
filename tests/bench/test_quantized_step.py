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
        (weights, f"Llama-3-8B shapes, random {weights}") for weights in ("bf16", "fp8")
    ]
    assert all(row["batch"] == 2 and row["ctx"] == 24 and row["time_ms"] > 0 for row in rows)
    with pytest.raises(SystemExit):
        quantized_step.main(["--weights", "int3"])


def test_random_weights_in_fp8_are_as_large_as_others():
    model = random_model(TOY, in_fp8=True)
    down = model.weights["layers"][0]["mlp"]["down_proj"]
    weights = down["kernel"][...].astype(jnp.float32) * down["scales"][...]
    assert float(jnp.std(weights)) == pytest.approx(0.02, rel=0.1)
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)) - 2 * 64 * 64
    assert model.read_bytes(1) == read < random_model(TOY).read_bytes(1)
