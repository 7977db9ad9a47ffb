"""Steps on disk: found again by another process, compiled anew whenever that is in doubt."""

import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jattn import compiled_steps, step_cache, step_compilation, step_keys
from jattn.compiled_steps import StepPlan
from jattn.device_mesh import OnAll, side_by_side
from jattn.parallel import Parallel
from jattn.step_cache import StepCache
from jattn.step_compilation import compile_steps
from jattn.step_keys import NoName, StepNames

SIZES = (2, 4)
# A step that another process can name, of a function of a module.
PLANS = {size: StepPlan(jnp.sum, (jax.ShapeDtypeStruct((size,), jnp.float32),)) for size in SIZES}


def grown(x):
    return x + 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where this test's steps are kept."""
    folder = tmp_path / "steps"
    monkeypatch.setattr(step_compilation, "step_cache", lambda: StepCache(folder))
    return folder


@pytest.fixture
def lowered(monkeypatch):
    """The plans that are lowered, in their order."""
    plans, lower = [], step_compilation._lowered
    monkeypatch.setattr(step_compilation, "_lowered", lambda plan: plans.append(plan) or lower(plan))
    return plans


def check_runs(steps):
    for size in SIZES:
        assert steps(size, jnp.ones(size, jnp.float32)) == size


def test_steps_are_lowered_once_and_then_loaded(folder, lowered):
    check_runs(compile_steps(PLANS))
    check_runs(compile_steps(PLANS))
    assert len(lowered) == len(SIZES)
    assert len(list(folder.iterdir())) == len(SIZES)


def test_a_loaded_step_consumes_what_is_donated_and_takes_no_other_shape(folder, lowered):
    held = jnp.zeros(4)
    plans = {"step": StepPlan(grown, (held,), donate=(0,))}
    compile_steps(plans)
    steps = compile_steps(plans)
    assert len(lowered) == 1
    steps("step", held)
    assert held.is_deleted()
    with pytest.raises(TypeError):
        steps("step", jnp.zeros(5))


def test_what_jax_had_in_its_own_cache_is_kept_too(tmp_path, folder, lowered):
    """XLA cannot write it a second time, so it is compiled for it."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        least = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        jax.jit(jnp.sum).clear_cache()
        for plan in PLANS.values():
            jax.jit(plan.function).lower(*plan.arguments).compile()
        assert list((tmp_path / "jax").iterdir())
        jax.jit(jnp.sum).clear_cache()
        compile_steps(PLANS)
        check_runs(compile_steps(PLANS))
        assert len(lowered) == len(SIZES)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: pickle.dumps("another program's"),
        lambda content: step_cache._MAGIC + step_cache.hashlib.sha256(b"no pickle").digest() + b"no pickle",
    ],
    ids=["empty", "cut short", "changed", "foreign", "unreadable"],
)
def test_a_damaged_file_is_compiled_anew_and_mended(folder, lowered, damaged):
    compile_steps(PLANS)
    for path in folder.iterdir():
        path.write_bytes(damaged(path.read_bytes()))
    check_runs(compile_steps(PLANS))
    assert len(lowered) == 2 * len(SIZES)
    check_runs(compile_steps(PLANS))
    assert len(lowered) == 2 * len(SIZES)


def summed(share):
    return jax.lax.psum(share, "tensor")


def test_a_step_of_several_devices_is_loaded_for_them(folder, lowered):
    """Two of the devices that there are; four run another one."""
    for size in (2, 2, 4):
        parallel = Parallel("tensor", size)
        parts = [jax.device_put(np.full(3, number, np.float32), jax.local_devices()[number]) for number in range(size)]
        shares = side_by_side(parts, parallel)
        step = OnAll(summed, parallel, takes_shares=(True,), gives_shares=False)
        total = compile_steps({"sum": StepPlan(step, (shares,))})("sum", shares)
        np.testing.assert_array_equal(total, [sum(range(size))] * 3)
    assert len(lowered) == 2


def test_a_folder_that_cannot_be_written_is_done_without(folder, lowered):
    folder.parent.joinpath("steps").write_text("a file where the folder should be")
    check_runs(compile_steps(PLANS))
    check_runs(compile_steps(PLANS))
    assert len(lowered) == 2 * len(SIZES)


def test_a_full_disk_leaves_nothing_behind(folder, lowered, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    check_runs(compile_steps(PLANS))
    assert not list(folder.iterdir())


def test_the_steps_used_least_lately_make_way(tmp_path, folder):
    compile_steps(PLANS)
    first, second = sorted(folder.iterdir())
    os.utime(first, (1, 1))
    steps = StepCache(folder, most_bytes=second.stat().st_size + 100)
    assert steps.load(first.stem, jax.local_devices()[:1])  # used: now it is the newer one
    os.utime(second, (2, 2))
    steps.store("new", compile_steps({"new": StepPlan(grown, (jnp.ones(1),))})["new"])
    assert not second.exists()


def test_processes_that_write_at_once_leave_whole_files(tmp_path):
    program = (
        "import sys, jax, jax.numpy as jnp\n"
        "from pathlib import Path\n"
        "from jattn.step_cache import StepCache\n"
        "cache = StepCache(Path(sys.argv[1]))\n"
        "step = jax.jit(jnp.sum).lower(jnp.ones(4)).compile()\n"
        "for _ in range(50):\n"
        "    cache.store('step', step)\n"
        "    assert cache.load('step', jax.local_devices()[:1])(jnp.ones(4)) == 4\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["step.step"]


def test_flags_longer_than_a_path_may_be_count_too(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true " * 100)
    assert name() == name()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"jax_compilation_cache_dir": None}, False),
        ({"jax_compilation_cache_dir": "gs://bucket/folder"}, False),
        ({"jax_compilation_cache_dir": "here", "jax_enable_compilation_cache": False}, False),
        ({"jax_compilation_cache_dir": "here", "jax_enable_compilation_cache": True}, True),
    ],
)
def test_steps_are_kept_where_jax_keeps_its_own(monkeypatch, settings, kept):
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        assert (step_cache.step_cache() is not None) == kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


FOUR = (np.ones(4, np.float32),)


def name(function=jnp.sum, arguments=FOUR, *options):
    return StepNames().name(function, arguments, *options)


@pytest.mark.parametrize(
    "other",
    [
        lambda: name(jnp.max),
        lambda: name(functools.partial(jnp.sum, axis=0)),
        lambda: name(jnp.sum, (np.ones(5, np.float32),)),
        lambda: name(jnp.sum, (np.ones(4, np.int32),)),
        lambda: name(jnp.sum, ({"x": np.ones(4, np.float32)},)),
        lambda: name(jnp.sum, (np.ones(4, np.float32),), (0,)),
    ],
    ids=["function", "static", "shape", "dtype", "tree", "option"],
)
def test_another_step_has_another_name(other):
    assert name() == name()
    assert other() != name()


def test_other_settings_give_other_names(monkeypatch, tmp_path):
    plain = name()
    with jax.default_matmul_precision("highest"):
        assert name() != plain
    tiles = tmp_path / "tiles"
    tiles.write_text("first")
    monkeypatch.setenv("JATTN_DECODE_TILES", str(tiles))
    first = name()
    tiles.write_text("second")
    assert len({plain, first, name()}) == 3
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert name() not in (plain, first)


def test_edited_sources_give_another_name_to_the_next_process(monkeypatch, tmp_path):
    package = tmp_path / "edited_model"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("def step(x):\n    return x\n")
    os.utime(source, (1, 1))
    monkeypatch.syspath_prepend(tmp_path)
    import edited_model  # pyright: ignore[reportMissingImports]

    before = name(edited_model.step)
    step_keys._sources.cache_clear()
    source.write_text("def step(x):\n    return 2 * x\n")
    with pytest.raises(NoName, match="edited_model was changed since this process began"):
        name(edited_model.step)
    os.utime(source, (1, 1))
    assert name(edited_model.step) != before


def test_patched_functions_give_another_name_or_none(monkeypatch):
    plain = name()
    monkeypatch.setattr(compiled_steps, "smallest_bucket", grown)
    assert name() != plain
    monkeypatch.undo()
    assert name() == plain
    monkeypatch.setattr(grown, "__module__", "__main__")
    monkeypatch.setattr(compiled_steps.CompiledSteps, "__call__", grown)
    with pytest.raises(NoName, match="a notebook has patched"):
        name()


def test_an_engines_steps_have_the_same_names_in_every_process():
    program = (
        "from jattn.step_compilation import _names\n"
        "from tests.jattn.harness.tiny import CONFIG, plans_of\n"
        "print(*_names(plans_of(CONFIG).executor.compiled_steps).values())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            cwd=Path(__file__).parents[2],
        )
        for seed in ("1", "2")
    ]
    names = [run.stdout.split() for run in runs]
    assert names[0] == names[1]
    assert len(set(names[0])) == len(names[0]) >= 6


def test_a_function_that_another_process_cannot_have_has_no_name(monkeypatch):
    with pytest.raises(NoName):
        name(lambda x: x)
    monkeypatch.setattr(test_steps_without_a_name_are_compiled_each_time, "__module__", "__main__")
    with pytest.raises(NoName, match="is of a script or a notebook"):
        name(test_steps_without_a_name_are_compiled_each_time)


def test_steps_without_a_name_are_compiled_each_time(folder, lowered):
    plans = {"step": StepPlan(lambda x: 2 * x, (jnp.ones(2),))}
    for _ in range(2):
        assert compile_steps(plans)("step", jnp.ones(2)).tolist() == [2, 2]
    assert len(lowered) == 2
    assert not folder.exists()


def test_what_cannot_be_read_is_compiled_all_the_same(folder, lowered, monkeypatch):
    def unreadable(package):
        raise PermissionError(f"{package} cannot be read")

    monkeypatch.setattr(step_keys, "_sources", unreadable)
    check_runs(compile_steps(PLANS))
    assert len(lowered) == len(SIZES)
