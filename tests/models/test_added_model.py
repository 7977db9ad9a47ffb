"""The model that README.md adds: a package of its own, found by its entry point, served as any other."""

import json
import pathlib
import re
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from tests.jattn.harness.tiny import one_variant, run
from tests.models.harness.goldens import assert_shares_are_golden, dense_logits

README = pathlib.Path(__file__).parents[2] / "README.md"
CONFIG = {
    "architectures": ["SquaredForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def block(language):
    section = re.search(r"^## Add a model\n(.*?)^## ", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert section
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", section[1], re.DOTALL | re.MULTILINE)
    return text


def tensors():
    shapes = {"model.embed_tokens": (48, 32), "lm_head": (48, 32), "model.norm": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"{name}_layernorm": (32,) for name in ("input", "post_attention")}
        shapes |= {prefix + f"self_attn.{name}_proj": (width, 32) for name, width in (("q", 32), ("k", 16), ("v", 16))}
        shapes[prefix + "self_attn.o_proj"] = (32, 32)
        shapes |= {prefix + "mlp.up_proj": (40, 32), prefix + "mlp.down_proj": (32, 40)}
    rng = np.random.default_rng(0)
    return {f"{name}.weight": rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A checkpoint of the model, whose package is installed for as long as the test runs."""
    package, folder = tmp_path / "package", tmp_path / "checkpoint"
    metadata = package / "squared-1.0.dist-info"
    metadata.mkdir(parents=True)
    (package / "squared.py").write_text(block("python"))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: squared\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(package)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), folder / "model.safetensors")
    yield Checkpoint(folder)
    sys.modules.pop("squared", None)


def test_added_model_is_found_loaded_and_served(checkpoint):
    model = model_class("SquaredForCausalLM").from_checkpoint(checkpoint, dtype=jnp.float32)
    config = EngineConfig(
        num_pages=20, max_num_seqs=1, max_context_len=32, prefill_tokens=16, page_size=8, full_sampling=False
    )
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with one_variant("greedy"):
        engine = Engine(model, config)
        (generated,) = run(engine, [engine.make_request(prompt, SamplingParams(max_tokens=8, temperature=0.0))])
    whole = dense_logits(model, prompt + generated)
    assert generated == np.argmax(whole[len(prompt) - 1 : -1], axis=-1).tolist()
    assert_shares_are_golden(checkpoint, prompt, whole[: len(prompt)])


def test_added_model_computes_what_its_author_wrote(checkpoint):
    model = model_class("SquaredForCausalLM").from_checkpoint(checkpoint, dtype=jnp.float32)
    graph, stacked = nnx.split(model.layers[0].mlp)
    mlp = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[1], stacked))
    up, down = (tensors()[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("up", "down"))
    x = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
    hidden = np.maximum(x @ up.T, 0) ** 2
    # Two sums, of 32 and 40 terms, that may round at every term.
    tolerance = (2 * 32 + 40) * np.finfo(np.float32).eps * np.max(hidden @ np.abs(down.T))
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden @ down.T, rtol=0, atol=tolerance)
