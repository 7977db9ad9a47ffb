"""Engines over checkpoints that the CPU's devices share, and what must be the same on one device and on several."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from safetensors.numpy import save_file

from jattn.model import load_model
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from jattn.serving.resolved_config import parallel_of
from jattn.serving.steps.draft_model import DraftModel
from tests.jattn.harness.tiny import run

CONFIG = EngineConfig(
    num_pages=33,
    page_size=4,
    max_num_seqs=4,
    max_context_len=64,
    prefill_tokens=16,
    full_sampling=False,
    greedy_steps=False,
    progress=False,
)
_EXCHANGES = ("psum", "all_gather")  # the primitives
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, seed=7)


def write_llama(folder, *, heads=8, kv_heads=2, layers=2, hidden=32, head_dim=8, units=48, vocab=96):
    """A checkpoint of random weights, far enough from 0 that its text says something."""
    rng = np.random.default_rng(0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": units,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for layer in range(layers):
        of_attention = {"q": heads, "k": kv_heads, "v": kv_heads}
        shapes |= {f"model.layers.{layer}.self_attn.{x}_proj": (n * head_dim, hidden) for x, n in of_attention.items()}
        shapes[f"model.layers.{layer}.self_attn.o_proj"] = (hidden, heads * head_dim)
        shapes |= {f"model.layers.{layer}.mlp.{x}_proj": (units, hidden) for x in ("gate", "up")}
        shapes[f"model.layers.{layer}.mlp.down_proj"] = (hidden, units)
    tensors = {f"{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ["model.norm"]
    norms += [f"model.layers.{i}.{x}_layernorm" for i in range(layers) for x in ("input", "post_attention")]
    tensors |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def engine_of(checkpoint, devices, **changes):
    """An engine of float32; one step for decodes, one for prompts."""
    config = dataclasses.replace(CONFIG, tensor_parallel=devices, **changes)
    placed = {"dtype": jnp.float32, "parallel": parallel_of(config)}
    draft = config.speculative.load(checkpoint, **placed) if isinstance(config.speculative, DraftModel) else None
    return Engine(load_model(checkpoint, **placed), config, draft_model=draft)


def texts(engine, prompts, *params):
    """What the engine writes after each prompt, with each of the parameters."""
    requests = [engine.make_request(prompt, each) for each in params for prompt in prompts]
    return run(engine, requests)


def assert_all_hold_the_same(engine):
    """The loop state, from which the next tokens are made, has the same bits on every device."""
    for leaf in jax.tree.leaves(engine.executor.state):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(others) == engine.config.tensor_parallel - 1
        for other in others:
            np.testing.assert_array_equal(other.view(np.uint8), first.view(np.uint8))


def unordered_exchanges(jaxpr):
    """Exchanges between devices that do not wait for the one before them, in a program and all that it calls."""
    found, latest, behind = [], None, {}
    for number, equation in enumerate(jaxpr.eqns):
        before = {each for var in equation.invars for each in behind.get(id(var), ())}
        inner = list(jaxprs_in_params(equation.params))
        found += [each for one in inner for each in unordered_exchanges(one)]
        if equation.primitive.name in _EXCHANGES or any(exchanges(one) for one in inner):
            if latest is not None and latest not in before:
                found.append(equation)
            latest = number
            before.add(number)
        behind |= {id(var): before for var in equation.outvars}
    return found


def exchanges(jaxpr):
    """Whether devices exchange in a program."""
    return any(
        equation.primitive.name in _EXCHANGES or any(map(exchanges, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
