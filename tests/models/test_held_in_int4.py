"""Checkpoints that are rounded to int4 while they load: as the kernels' package rounds, and a quarter of the bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.checkpoint import Checkpoint
from jattn.matmul import QuantizedKernel, dequantize_groups, interleave, quantize_groups
from jattn.model import load_model, model_without_weights
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from jattn_models.bundled import checkpoint_path
from jattn_models.few_bits import group_size_of
from tests.jattn.harness.tiny import one_variant, run
from tests.models.harness.goldens import GOLDEN, load, prompts, shares
from tests.often import slow

CONFIG = EngineConfig(
    num_pages=20, max_num_seqs=1, max_context_len=64, prefill_tokens=16, page_size=8, dtype="bfloat16"
)


rounded_groups = jax.jit(quantize_groups, static_argnames="group_size")  # divides by what may be a last place off


def leaves(model):
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(nnx.state(model))}


# A gate of one output, experts and biases beside projections; parts of heads; heads that turn in pairs.
@pytest.mark.parametrize("case", ["qwen2_moe", *(slow(case) for case in ("gqa", "deepseek_v3", "glm4"))])
def test_projections_are_rounded_while_loading_and_nothing_else_is(case):
    wide = leaves(load(case, jnp.float32))
    found = leaves(load_model(Checkpoint(GOLDEN / case).quantized("int4"), dtype=jnp.float32))
    rounded = {path[:-1] for path in found if path[-1] == "scales"}
    assert {"o_proj", "down_proj", "gate_up_proj"} <= {path[-1] for path in rounded}
    assert found.keys() == wide.keys() | {(*path, "scales") for path in rounded}
    for path, leaf in wide.items():
        if path[:-1] not in rounded or path[-1] != "kernel":
            np.testing.assert_array_equal(found[path], leaf, err_msg=str(path))
            if path[-1] == "kernel" and leaf.ndim == 3 and path[-2] not in ("router", "shared_gate"):
                assert path[0] != "layers" or group_size_of(leaf.shape[-2]) < 8, path
            continue
        expected = interleave(rounded_groups(jnp.swapaxes(leaf, -1, -2), group_size=group_size_of(leaf.shape[-2])))
        np.testing.assert_array_equal(found[path], expected.values, err_msg=str(path))
        np.testing.assert_array_equal(found[*path[:-1], "scales"], expected.scales, err_msg=str(path))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [(4096, 128), (2048, 128), (1024, 64), (256, 16), (48, 8), (14336, 128), (2880, 64), (20, 4)],
)
def test_groups_are_of_128_inputs_or_of_a_sixteenth(inputs, expected):
    assert group_size_of(inputs) == expected


def test_devices_have_the_groups_that_one_has():
    """What is rounded on each is what is rounded on one."""
    whole = load_model(Checkpoint(GOLDEN / "gqa").quantized("int4"), dtype=jnp.float32).layers[0]
    _, states = shares(Checkpoint(GOLDEN / "gqa").quantized("int4"), 2)
    for which in (("mlp", "down_proj"), ("attention", "o_proj")):
        module = getattr(getattr(whole, which[0]), which[1])
        parts = [state["layers"][0][which[0]][which[1]] for state in states]
        for name, axis in (("kernel", -1), ("scales", -2)):
            joined = np.concatenate([part[name][...] for part in parts], axis=axis)
            np.testing.assert_array_equal(joined, getattr(module, name)[...])


def test_text_is_that_of_what_the_weights_stand_for():
    """In a dtype that holds that exactly; and a number takes half a byte in what is told of memory."""
    model = load_model(Checkpoint(GOLDEN / "gqa").quantized("int4"), dtype=jnp.float32)
    plain = load_model(Checkpoint(GOLDEN / "gqa"), dtype=jnp.float32)
    wide, narrow = leaves(plain), leaves(model)
    for path, module in nnx.iter_modules(model):
        if getattr(module, "scales", None) is not None:
            kernel = QuantizedKernel(values=module.kernel[...], scales=module.scales[...])
            kernel = dataclasses.replace(kernel, interleaved=kernel.may_be_interleaved)
            target = plain.layers[path[1]]
            for name in path[2:]:
                target = getattr(target, name)
            target.kernel[...] = jnp.swapaxes(dequantize_groups(kernel, jnp.float32), -1, -2)
    config, texts = dataclasses.replace(CONFIG, dtype="float32"), []
    params, memory = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True), []
    with one_variant("greedy"):
        for each in (model, plain):
            engine = Engine(each, config)
            texts.append(run(engine, [engine.make_request(prompts("gqa")[2].tolist(), params)]))
            memory.append(engine.executor.memory_use().weights)
    assert texts[0] == texts[1]
    kernels = [path for path, leaf in narrow.items() if leaf.dtype == jnp.int4]
    scales = sum(narrow[*path[:-1], "scales"].nbytes for path in kernels)
    assert memory[1] - memory[0] == sum(wide[path].size * 4 - wide[path].size // 2 for path in kernels) - scales


@pytest.mark.slow
def test_text_of_two_devices_is_that_of_one():
    texts = []
    for devices in (1, 2):
        llm = jattn.LLM(
            checkpoint_path(),
            quantization="int4",
            tensor_parallel=devices,
            full_sampling=False,
            **{
                field: getattr(CONFIG, field) for field in ("num_pages", "max_num_seqs", "max_context_len", "page_size")
            },
        )
        (output,) = llm.generate(["def parse_header(line):"], jattn.SamplingParams(max_tokens=16, temperature=0.0))
        texts.append(output.outputs[0].text)
    assert texts[0] == texts[1]


def test_engine_of_a_model_in_another_dtype_refuses_to_say_so():
    model = load_model(Checkpoint(GOLDEN / "gqa").quantized("fp8"), dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"`quantization` must be None for a model .* Got 'int4'"):
        Engine(model, dataclasses.replace(CONFIG, quantization="int4"))


def test_a_model_cut_down_to_draft_is_quantised_too():
    model = model_without_weights(Checkpoint(GOLDEN / "gqa").quantized("int4").cut_down(1), dtype=jnp.float32)
    assert model is not None
    kernel = model.layers[0].mlp.down_proj.kernel.get_value()
    assert (kernel.dtype, kernel.shape[0]) == (jnp.int4, 1)
