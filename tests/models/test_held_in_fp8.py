"""Checkpoints that are quantised to fp8 while they load: the same as stored so, and near what they were."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.matmul import QuantizedRows, Ungated, matmul_splits
from jattn.model import load_model, model_without_weights
from jattn.norm import add_rms_norm, taken
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.executor import executor
from jattn.serving.request import SamplingParams
from jattn_kernels import quantize_rows
from jattn_models.bundled import checkpoint_path
from jattn_models.layers import Linear
from tests.jattn.harness.tiny import one_variant, run
from tests.kernels.harness.splits import splits_of
from tests.models.harness.goldens import (
    GOLDEN,
    OTHER_CASES,
    WRAPPED_CASES,
    DenseBackend,
    load,
    prompts,
    sequence,
    shares,
)
from tests.models.harness.in_fp8 import TRANSFORMERS, copies, is_projection
from tests.often import slow

CONFIG = EngineConfig(
    num_pages=20, max_num_seqs=1, max_context_len=64, prefill_tokens=16, page_size=8, dtype="bfloat16"
)


def leaves(model):
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(nnx.state(model))}


def of_layers(name, tensor):
    return is_projection(name, tensor) and ".experts." not in name


# A gate of one output, experts and biases beside projections; parts of heads.
@pytest.mark.parametrize("case", [slow("qwen2_moe"), "gqa", slow("deepseek_v3")])
def test_quantised_while_loading_is_what_is_stored_so(tmp_path, case):
    def chosen(name, tensor):
        return of_layers(name, tensor) and "kv_b_proj" not in name

    stored, _ = copies(GOLDEN / case, tmp_path, chosen=chosen)
    expected = leaves(load_model(stored, dtype=jnp.bfloat16))
    found = leaves(load_model(Checkpoint(GOLDEN / case).quantized("fp8"), dtype=jnp.bfloat16))
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=str(path))
    in_few_bits = {path[-2] for path, leaf in found.items() if leaf.dtype == jnp.float8_e4m3fn}
    assert in_few_bits <= {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "q_proj", "in_proj"}
    wide = {path[-2:] for path, leaf in found.items() if leaf.dtype == jnp.bfloat16}
    assert {("vocabulary", "embedding"), ("norm", "scale")} <= wide
    if case == "qwen2_moe":
        assert {("router", "kernel"), ("shared_gate", "kernel"), ("mlp", "down_proj")} & wide
        assert all(leaf.dtype == jnp.bfloat16 for leaf in found.values() if leaf.ndim == 4)


def rows_rounded(x, kernel, *, bias=None, layer_index=None, out_dtype=None, implementation=None, ahead=()):
    """A layer's product with weights that stand for themselves, the rows rounded to fp8 beforehand."""
    x = taken(x)
    if layer_index is None or kernel.shape[-1] == 1:
        kernel = kernel if layer_index is None else kernel[layer_index]
    else:
        values, scales = quantize_rows(x)
        x, kernel = values.astype(jnp.float32) * scales, kernel[layer_index]
    y = jnp.matmul(x, kernel, precision="highest").astype(out_dtype or x.dtype)
    if bias is None:
        return y
    return y + jnp.broadcast_to(bias if layer_index is None else bias[layer_index], y.shape).astype(y.dtype)


def logits(graph, state, tokens):
    model = nnx.merge(graph, state)
    hidden, _ = model(sequence(jnp.asarray(tokens)), None, DenseBackend(), None)
    return model.compute_logits(hidden)


FAMILIES = [slow(case, 1) for case in ("gqa", *OTHER_CASES, *WRAPPED_CASES)]


@pytest.mark.parametrize(("case", "size"), [("gqa", 2), *FAMILIES])
def test_logits_are_those_of_weights_that_stand_for_themselves_and_rounded_rows(tmp_path, monkeypatch, case, size):
    """Products are summed in another order, which now and then takes a number of a row to the other side of a step.

    A token that it sends to another expert, and those behind it, then differ by more. Rounding itself moves gqa's by
    0.29 of their size: the model is not trained.
    """
    tokens, found = prompts(case)[2], []
    for number, checkpoint in enumerate(copies(GOLDEN / case, tmp_path)):
        if number:
            for face in ("matmul", "matmul_splits"):
                monkeypatch.setattr(f"jattn_models.layers.{face}", rows_rounded)
            monkeypatch.setattr(Linear, "later", Linear.splits)
            monkeypatch.setattr(Linear, "gated", ungated)
        found.append(logits_of_shares(checkpoint, size, tokens))
    assert_alike(*found)


def ungated(linear, x, activation, ahead=()):
    return Ungated(rows=linear.splits(x), activation=activation)


def logits_of_shares(checkpoint, size, tokens):
    graph, states = shares(checkpoint, size)
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *states)
    return jax.jit(jax.vmap(functools.partial(logits, graph, tokens=tokens), axis_name="tensor"))(stacked)


def assert_alike(found, expected):
    """But for numbers of rows that were rounded to the other side of a step."""
    apart, size = np.linalg.norm(found - expected, axis=-1), np.linalg.norm(expected, axis=-1)
    assert np.median(apart / size) < 0.002
    assert np.linalg.norm(apart) < 0.05 * np.linalg.norm(size)


def rounded_by_the_norm(x, addition, scale, *, rounded, **options):
    """`add_rms_norm` by a kernel that rounds, rows that nobody has in NaN."""
    total, normed = add_rms_norm(x, addition, scale, **options)
    if not rounded:
        return total, normed
    values, scales = quantize_rows(normed)
    more = ((0, 3), (0, 0))
    values, scales = (jnp.pad(each, more, constant_values=jnp.nan) for each in (values, scales))
    return total, QuantizedRows(values=values, scales=scales[:, 0], num_rows=x.shape[0], dtype=x.dtype)


# Layers alike, layers that do not turn; a factor or a norm of its own on what is added.
@pytest.mark.parametrize(
    ("case", "is_left"),
    [
        ("gqa", True),
        slow("smollm3", True),
        slow("granite", False),
        *(slow(*each) for each in (("llama4", True), ("gemma3", False))),
    ],
)
def test_what_products_leave_to_norms_is_added_up_and_rounded_by_them(monkeypatch, case, is_left):
    model, tokens = load_model(Checkpoint(GOLDEN / case).quantized("fp8"), dtype=jnp.float32), prompts(case)[2]
    expected, norm = (
        jax.jit(functools.partial(logits, *nnx.split(model)))(tokens),
        mock.Mock(side_effect=rounded_by_the_norm),
    )
    monkeypatch.setattr("jattn_models.layers.matmul_splits", lambda *args, **kw: splits_of(matmul_splits(*args, **kw)))
    monkeypatch.setattr("jattn_models.norms.add_rms_norm", norm)
    assert_alike(jax.jit(functools.partial(logits, *nnx.split(model)))(tokens), expected)
    assert any(call.kwargs["rounded"] for call in norm.call_args_list) == is_left


@pytest.mark.slow  # weights are equal by a test above, and test_held_in_int4 has an engine's text
def test_text_is_that_of_the_checkpoint_stored_in_fp8_from_half_the_bytes(tmp_path):
    stored, _ = copies(GOLDEN / "gqa", tmp_path)
    models = [load_model(each, dtype=jnp.bfloat16) for each in (Checkpoint(GOLDEN / "gqa").quantized("fp8"), stored)]
    params, texts = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True), []
    with one_variant("greedy"):
        engine = Engine(models[0], CONFIG)
        with mock.patch.object(executor, "compile_steps", return_value=engine.executor.compiled_steps):
            for each in (engine, Engine(models[1], engine.config)):
                texts.append(run(each, [each.make_request(prompts("gqa")[2].tolist(), params)]))
    assert texts[0] == texts[1]
    wide = leaves(load("gqa", jnp.bfloat16))
    projections = [leaf for path, leaf in wide.items() if path[-1] == "kernel" and path[0] == "layers"]
    kernels = sum(leaf.nbytes for leaf in projections)
    scales = sum(4 * leaf.shape[0] * leaf.shape[-1] for leaf in projections)
    scales = sum(
        4 * leaf.shape[0] * leaf.shape[-1]
        for path, leaf in wide.items()
        if path[-1] == "kernel" and path[0] == "layers"
    )
    others = sum(leaf.nbytes for leaf in wide.values()) - kernels
    assert engine.executor.memory_use().weights == kernels // 2 + scales + others


def test_each_device_has_the_scales_of_its_outputs(tmp_path):
    """All of those of outputs that it returns a part of; and where it quantises itself, by what it has."""
    stored, _ = copies(GOLDEN / "gqa", tmp_path)
    whole, (_, states) = load_model(stored, dtype=jnp.float32).layers[0], shares(stored, 2)
    _, own = shares(Checkpoint(GOLDEN / "gqa").quantized("fp8"), 2)
    for rank in range(2):
        of_stored, of_own = (each[rank]["layers"][0] for each in (states, own))
        down, o = of_stored["mlp"]["down_proj"], of_stored["attention"]["o_proj"]
        np.testing.assert_array_equal(down["scales"][...], whole.mlp.down_proj.scales[...])
        np.testing.assert_array_equal(o["scales"][...], whole.attention.o_proj.scales[...])
        gate_up = of_stored["mlp"]["gate_up_proj"]
        gate, up = (np.split(half, 2, axis=1)[rank] for half in np.split(whole.mlp.gate_up_proj.scales[...], 2, axis=1))
        np.testing.assert_array_equal(gate_up["scales"][...], np.concatenate([gate, up], axis=1))
        np.testing.assert_array_equal(of_own["mlp"]["gate_up_proj"]["scales"][...], gate_up["scales"][...])
        largest = np.abs(of_own["mlp"]["down_proj"]["kernel"][...].astype(np.float32)).max(axis=-1)
        assert np.all(largest == 448)


def test_model_is_never_held_twice(monkeypatch):
    """Of what is not rounded yet there is no more than a tensor, as it is stored and as it is computed with."""
    checkpoint, held = Checkpoint(checkpoint_path()).quantized("fp8"), []

    def count():
        held.append(sum(array.nbytes for array in jax.live_arrays()))

    count()
    model = load_model(checkpoint.watched(count), dtype=jnp.bfloat16)
    largest = max(np.prod(checkpoint.shape(name)) for name in checkpoint.tensor_names) * 4
    total = sum(leaf.nbytes for leaf in leaves(model).values())
    assert max(held) - held[0] <= total + 2 * largest < 2.5 * total


def test_engine_of_a_model_that_was_not_quantised_refuses_to_say_so():
    with pytest.raises(ValueError, match=r"`quantization` must be None for a model .* Got 'fp8'"):
        Engine(load("gqa", jnp.bfloat16), dataclasses.replace(CONFIG, quantization="fp8"))


def test_a_model_cut_down_to_draft_is_quantised_too():
    draft = Checkpoint(GOLDEN / "gqa").quantized("fp8").cut_down(1)
    model = model_without_weights(draft, dtype=jnp.float32)
    assert model is not None
    kernel = model.layers[0].mlp.down_proj.kernel.get_value()
    assert (kernel.dtype, kernel.shape[0]) == (jnp.float8_e4m3fn, 1)


def test_weights_in_blocks_are_not_quantised_again(tmp_path):
    in_blocks, _ = copies(GOLDEN / "gqa", tmp_path, announced=TRANSFORMERS | {"weight_block_size": [12, 20]})
    with pytest.raises(NotImplementedError, match=r"`quantization` must be None .* scale for each block.* Got 'fp8'"):
        model_without_weights(in_blocks.quantized("fp8"), dtype=jnp.float32)


@pytest.mark.parametrize("quantization", ["int8", "FP8", 8, ["fp8"]])
def test_what_nothing_is_quantised_to_is_refused(quantization):
    with pytest.raises(ValueError, match=r"`quantization` must be None or one of: fp8, int4. Got"):
        EngineConfig(quantization=quantization)


def test_checkpoint_refuses_what_nothing_is_quantised_to():
    with pytest.raises(ValueError, match=r"`quantization` must be None or one of: fp8, int4. Got 'nf4'"):
        Checkpoint(GOLDEN / "gqa").quantized("nf4")


def test_model_that_says_nothing_of_quantising_is_refused(monkeypatch):
    checkpoint = Checkpoint(GOLDEN / "gqa").quantized("fp8")
    monkeypatch.setattr("jattn_models.llama.LlamaForCausalLM.quantizations", ())
    for load_it in (load_model, model_without_weights):
        with pytest.raises(NotImplementedError, match=r"be None for LlamaForCausalLM, .* Got 'fp8'"):
            load_it(checkpoint, dtype=jnp.float32)
