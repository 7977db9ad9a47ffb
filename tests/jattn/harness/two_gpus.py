"""A decode step that two H200s share, compiled for them on a machine without a GPU; prints what it became, as JSON.

python -m tests.jattn.harness.two_gpus FOLDER    (started with an `environment` of its own)
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jattn import device_mesh
from jattn.backend import BackendOptions, backend_class
from jattn.compiled_steps import StepPlan
from jattn.kv_pool import make_pool
from jattn.mailbox import PeerTable
from jattn.parallel import Parallel
from jattn.serving.executor.mesh_plans import on_mesh
from jattn.serving.executor.step_plans import StepKey
from jattn.serving.steps.loop_state import empty_rows
from jattn.serving.steps.plain import Steps
from jattn.step_compilation import compiler_options
from jattn_kernels.call import Device, assume_device
from jattn_models.llama import LlamaForCausalLM

PARALLEL = Parallel("tensor", 2)
SHAPES = {
    "vocab_size": 4096,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
BATCH, CTX, PAGE = 8, 1024, 64
# An H200 as XLA describes one, linked to others by NVLink: else it would not think of kernels of its own for sums.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0" device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def environment(folder: Path) -> dict[str, str]:
    """What the process is told by, in which nothing is interpreted; also what a step for several GPUs must not mind.

    Args:
        folder: Where XLA writes what it makes.
    """
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_gpu_enable_pdl=true --xla_gpu_enable_pdl_launch=true"
    return told | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": flags}


def gpu_options(*, shared: bool) -> dict[str, Any]:
    """What XLA is told of a step on a GPU, or on several that share it."""
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        return compiler_options(unrolled=True, shared=shared) or {}


def plan_of(mesh: Mesh, *, connected: bool) -> StepPlan:
    """A greedy decode step, whose devices exchange by kernels or by XLA."""
    config = LlamaForCausalLM.config_class.from_dict(SHAPES)
    make = functools.partial(LlamaForCausalLM, config, dtype=jnp.bfloat16, parallel=PARALLEL)
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    if connected:
        model.peers = nnx.data(PeerTable(jax.ShapeDtypeStruct((2 * PARALLEL.size + 2,), jnp.uint32)))
    graph, weights = nnx.split(model)
    width = -(-CTX // PAGE)
    make = functools.partial(make_pool, model.kv_groups, num_pages=1 + BATCH * width, page_size=PAGE, dtype="bfloat16")
    pool = jax.eval_shape(make)
    state = jax.eval_shape(lambda: empty_rows(BATCH, max_pages=width, max_stop_ids=8))
    options = BackendOptions(
        max_context_len=CTX, page_size=PAGE, max_num_seqs=BATCH, dtype="bfloat16", kv_cache_dtype="bfloat16"
    )
    backend = backend_class("paged").for_model(model.attention_layers, options)
    decode = functools.partial(Steps(graph, backend, parallel=PARALLEL).decode, variant="greedy")

    def placed(leaf, shared):
        shape = (PARALLEL.size * leaf.shape[0], *leaf.shape[1:]) if shared else leaf.shape
        spec = PartitionSpec(PARALLEL.axis) if shared else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    shapes = (weights, True), (state, False), (pool, True), (jax.ShapeDtypeStruct((BATCH, 3), jnp.int32), False)
    arguments = tuple(jax.tree.map(functools.partial(placed, shared=shared), tree) for tree, shared in shapes)
    key = StepKey("decode", BATCH, "greedy")
    return on_mesh({key: StepPlan(decode, arguments, donate=(1, 2))}, PARALLEL)[key]


def main(folder: Path) -> None:
    """Compiles the step both ways."""
    assume_device(Device("gpu", (9, 0), 132))
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="2x1x1", topology="1x1x2", target_config=H200
    )
    mesh = Mesh(np.array(topology.devices), (PARALLEL.axis,), axis_types=(AxisType.Auto,))
    options, found = gpu_options(shared=True), {}
    with mock.patch.object(device_mesh, "mesh_of", return_value=mesh):
        for name, connected in (("kernels", True), ("xla", False)):
            plan = plan_of(mesh, connected=connected)
            step = jax.jit(plan.function, donate_argnums=plan.donate, compiler_options=options)
            text = step.trace(*plan.arguments).lower(lowering_platforms=("cuda",)).compile().as_text()
            thunks, told = (
                max(folder.glob(files), key=lambda file: file.stat().st_mtime).read_text(encoding="utf-8")
                for files in ("*thunk_sequence_after_thunk_passes.txt", "*.debug_options")
            )
            found[name] = {
                "all_reduces": text.count(" all-reduce(") + text.count(" all-reduce-start("),
                "all_gathers": text.count(" all-gather(") + text.count(" all-gather-start("),
                "thunks": thunks,
                "told": told.splitlines(),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
