"""Compiled steps: made once, replayed without compiling, in a private cache."""

import stat

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import step_cache, step_compilation
from jattn.compiled_steps import StepPlan, power_of_two_buckets, smallest_bucket, token_buckets
from jattn.norm import rms_norm
from jattn.step_compilation import compile_steps


def doubled(x):
    return 2 * x


@pytest.fixture
def steps():
    return compile_steps({size: StepPlan(doubled, (jnp.zeros(size),)) for size in (2, 4)})


def test_replay_of_a_bucket_runs_its_executable(steps):
    assert steps(2, jnp.ones(2)).tolist() == [2, 2]


def test_replay_of_an_unknown_bucket_lists_those_there_are(steps):
    with pytest.raises(KeyError, match=r"No step was compiled for 3. Compiled: 2, 4"):
        steps(3, jnp.ones(3))


def test_replay_with_another_shape_is_an_error(steps):
    with pytest.raises(TypeError):
        steps(2, jnp.ones(3))


def test_donated_arguments_are_consumed():
    held = jnp.zeros(4)
    steps = compile_steps({"step": StepPlan(lambda x: x + 1, (held,), donate=(0,))})
    steps("step", held)
    assert held.is_deleted()


LAYER_SIZES = ((8, 1024), (5, 1024, 1024), (5, 1024))


def layers_in_a_loop(x, weights, scales):
    def layer(number, x):
        own = jax.lax.dynamic_index_in_dim(weights, number, keepdims=False)
        return x + rms_norm(x, scales, eps=1e-6, layer_index=number) @ own

    return jax.lax.fori_loop(0, len(weights), layer, x)


def layers_by_numpy(x, weights, scales):
    for own, scale in zip(weights, scales, strict=True):
        x = x + x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale @ own
    return x


def check_that_layers_read_their_own_weights(*, unrolled):
    x, weights, scales = (jax.random.normal(jax.random.key(i), size) for i, size in enumerate(LAYER_SIZES))
    arguments = [a.astype(jnp.bfloat16) for a in (x, weights / LAYER_SIZES[0][1] ** 0.5, scales)]
    steps = compile_steps({"step": StepPlan(layers_in_a_loop, tuple(arguments), unrolled=unrolled)})
    expected = layers_by_numpy(*(np.asarray(a, np.float64) for a in arguments))
    chex.assert_trees_all_close(np.asarray(steps("step", *arguments), np.float64), expected, atol=0.25, rtol=0.02)


def test_layers_in_a_loop_read_their_own_weights():
    check_that_layers_read_their_own_weights(unrolled=False)


@pytest.mark.gpu
def test_layers_in_a_loop_read_their_own_weights_on_a_gpu():
    check_that_layers_read_their_own_weights(unrolled=True)


def test_only_unrolled_plans_are_told_to_a_gpus_compiler(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    told = [step_compilation.compiler_options(unrolled=unrolled) for unrolled in (False, True)]
    assert [any("unrolling" in name for name in options) for options in told] == [False, True]
    assert not any("scheduling" in name for options in told for name in options)
    shared = step_compilation.compiler_options(unrolled=True, shared=True)
    assert shared["xla_gpu_command_buffer_scheduling_mode"] == "SERIALIZE"
    assert [shared[name] for name in ("xla_gpu_enable_pdl", "xla_gpu_enable_pdl_launch")] == [False, False]
    loops = [options["xla_gpu_enable_while_loop_unrolling"] for options in (told[1], shared)]
    assert loops == ["WHILE_LOOP_UNROLLING_DOUBLE_BUFFER", "WHILE_LOOP_UNROLLING_FULL_UNROLL"]
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert step_compilation.compiler_options(unrolled=True) is None


@pytest.mark.parametrize("shared", [False, True])
def test_no_step_is_rematerialised_for_a_pool_that_xla_counts_thrice(monkeypatch, shared):
    """The options are ones that this version of XLA knows: others fail on a CPU too."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    told = step_compilation.compiler_options(unrolled=True, shared=shared)
    monkeypatch.undo()
    assert told["xla_disable_hlo_passes"] == "rematerialization"
    assert jax.jit(doubled, compiler_options=told)(1.0) == 2


@pytest.mark.parametrize(
    ("largest", "smallest", "buckets"), [(8, 1, (1, 2, 4, 8)), (6, 1, (1, 2, 4, 6)), (1, 1, (1,)), (48, 64, (48,))]
)
def test_buckets_double_up_to_the_largest(largest, smallest, buckets):
    assert power_of_two_buckets(largest, smallest) == buckets


@pytest.mark.parametrize("largest", [1, 64, 1000, 1024, 1100, 2048, 5000, 8192, 16384])
def test_token_buckets_bound_padding_and_number(largest):
    buckets = token_buckets(largest, 64)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] == min(64, largest)
    assert buckets[-1] == largest
    padding = [1 - size / smallest_bucket(buckets, size) for size in range(513, largest + 1)]
    assert max(padding, default=0) < 1 / 5
    assert np.mean(padding or 0) < 0.11
    assert len(buckets) <= 4 + max(0, np.ceil(4 * np.log2(largest / 512)))


def test_smallest_bucket_holds_the_size_or_says_that_none_does():
    assert smallest_bucket((1, 2, 4), 3) == 4
    with pytest.raises(ValueError, match=r"Got 5, buckets \[1, 2, 4\]"):
        smallest_bucket((1, 2, 4), 5)


@pytest.fixture
def no_cache():
    """JAX has no cache folder; an LLM of a test before may have set one."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_persistent_cache_is_private_and_yields_to_the_users_own(no_cache, tmp_path, monkeypatch):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step_cache.use_persistent_cache()
    folder = tmp_path / "jattn" / "xla"
    assert updates["jax_compilation_cache_dir"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("error", [RuntimeError("Could not determine home directory."), PermissionError()])
def test_persistent_cache_is_left_out_without_a_usable_home(no_cache, monkeypatch, error):
    def home():
        raise error

    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(step_cache.Path, "home", home)
    step_cache.use_persistent_cache()
    assert updates == {}
