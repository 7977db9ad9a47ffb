"""The step that is timed is the serving loop's, on a Llama of two layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench import decode_step
from bench.decode_step import Loop, measured, random_model, set_up
from bench.step_workload import LLAMA_3_8B, StepWorkload
from jattn.parallel import Parallel
from jattn_models.gpt_oss import GptOssForCausalLM
from jattn_models.llama import LlamaForCausalLM

TOY = LLAMA_3_8B | {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WORKLOAD = StepWorkload(batch=3, ctx=40)


@pytest.fixture(scope="module")
def model():
    return random_model(TOY)


def test_random_model_is_that_of_the_class(model):
    made = nnx.merge(model.graph, model.weights)
    expected = nnx.eval_shape(lambda: LlamaForCausalLM(model.config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    for leaf, other in zip(jax.tree.leaves(model.weights), jax.tree.leaves(nnx.state(expected)), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
    assert jnp.all(made.norm.scale[...] == 1)
    kernel = made.layers[0].mlp.down_proj.kernel[...]
    assert float(jnp.std(kernel.astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
    assert not jnp.array_equal(kernel[0], kernel[1])


def test_model_counts_all_weights_but_the_embedding(model):
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))
    assert model.read_bytes(1) == total - 2 * 64 * 64


def test_loop_grows_every_row_around_the_context(model):
    setup = set_up(model, WORKLOAD, steps=10)
    loop = Loop(model, WORKLOAD, setup)
    first_len = loop.rewind(10)
    # A step at length n sees n + 1 keys.
    assert np.mean([first_len + step + 1 for step in range(10)]) == pytest.approx(WORKLOAD.ctx, abs=0.5)
    assert loop.timed(10) > 0


def test_loop_writes_pool_pages_that_the_rows_own(model):
    setup = set_up(model, WORKLOAD, steps=10)
    before = np.asarray(setup.pool.groups[0].k.astype(jnp.float32))
    table = np.asarray(setup.state.page_tables[0])
    loop = Loop(model, WORKLOAD, setup)
    first_len = loop.rewind(2)
    loop.run(2)
    changed = np.any(np.asarray(loop._pool.groups[0].k.astype(jnp.float32)) != before, axis=(0, 3, 4))
    slots = {(int(row[n // 16]), n % 16) for row in table for n in (first_len, first_len + 1)}
    assert set(zip(*(axis.tolist() for axis in np.nonzero(changed)), strict=True)) == slots


def test_plans_open_pages_row_by_row_and_leave_the_table_as_it_is(model):
    setup = set_up(model, WORKLOAD, steps=10)
    table = np.asarray(setup.state.page_tables[0])
    assert WORKLOAD.batch <= WORKLOAD.page  # so no two rows open one in the same step
    opened = np.any(np.diff(setup.plans, axis=0) != 0, axis=2)
    assert opened.shape == (2 * WORKLOAD.page - 1, WORKLOAD.batch)
    assert (opened.sum(axis=0) >= 1).all()
    assert opened.sum(axis=1).max() == 1
    for plan in setup.plans:
        np.testing.assert_array_equal(setup.state.with_pages(jnp.asarray(plan)).page_tables[0], table)


def test_loop_notices_rows_that_stand_still(model):
    loop = Loop(model, WORKLOAD, set_up(model, WORKLOAD, steps=4))
    loop._plans = np.full_like(loop._plans, 99)
    with pytest.raises(RuntimeError, match="Rows must grow by a token a step"):
        loop.timed(4)


@pytest.mark.slow
def test_loop_of_a_model_with_windows_has_a_table_for_each_page_list():
    windowed = random_model(
        TOY | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16}, GptOssForCausalLM
    )
    setup = set_up(windowed, WORKLOAD, steps=10)
    assert len(setup.state.page_tables) == 2
    assert Loop(windowed, WORKLOAD, setup).timed(10) > 0  # where no table is given away twice


def test_measured_row_has_the_peers_names(model):
    row = measured(model, WORKLOAD, steps=6, repeats=1).row
    assert row.items() >= WORKLOAD.fields().items()
    assert row["impl"] == "jattn-xla"
    assert 0 < row["min_ms"] <= row["time_ms"]
    assert {"roofline_ms", "compile_s", "temp_MB"} <= row.keys()


def test_each_of_several_devices_reads_its_share(model):
    shared = random_model(TOY, parallel=Parallel("tensor", 2))
    assert shared.read_bytes(1) == pytest.approx(model.read_bytes(1) / 2, rel=0.01)


def test_serving_implementation_is_dispatchs(model):
    assert decode_step.serving_implementation(model, WORKLOAD, None) == "xla"
