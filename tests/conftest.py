"""Settings that hold for every test: strict promotion of dtypes and ranks, threads enough, and compiling in haste."""

import gc
import importlib.util
import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    # Each worker would parse all anew, for 15 seconds, and each process that a test starts JAX, for 3: it is kept here.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The interpreter of GPU kernels blocks a thread of XLA's CPU client for each warpgroup that waits: two hang on 2 cores.
os.environ.setdefault("NPROC", "8")
# Tests of several devices share the process with those of one, which must not mind the others.
# XLA's newer emitters for the CPU take 8 ms a kernel to compile, the older ones 1, all in one module the least.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "--xla_cpu_parallel_codegen_split_count=1",
        # What is compiled with care: two thirds of the time of a whole -O2, for code as fast to a tenth.
        "--xla_backend_optimization_level=1",
        "--xla_llvm_disable_expensive_passes=true",
        # A seventh of an engine's compilation, for loops that do little here.
        "--xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion",
    ]
)

import hypothesis
import jax

from tests.moves import move_by_numpy

if importlib.util.find_spec("beartype"):  # which a machine with a GPU may lack
    from tests.annotations import check_without_axes_by_beartype

    check_without_axes_by_beartype()
# An example that waits for another process on the machine is none that is too slow.
hypothesis.settings.register_profile("jattn", deadline=None)
hypothesis.settings.load_profile("jattn")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests write nothing into a home, and what a patched function was compiled to is found by no later one.
jax.config.update("jax_enable_compilation_cache", False)


def pytest_configure(config):
    """On the CPU most of a test's time is compiling what then runs for milliseconds; on a GPU kernels are as users'."""
    selected = config.getoption("markexpr")
    if "not gpu" in selected:
        jax.config.update("jax_disable_most_optimizations", True)
        move_by_numpy()
    if "gpu" not in selected.replace("not gpu", ""):
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported


def pytest_collection_finish():
    """What is loaded by now stays to the end, and tracing leaves few cycles: garbage is looked for less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
