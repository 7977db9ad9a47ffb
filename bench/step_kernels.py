"""What XLA makes of a decode step for an H200, on a machine without one: the kernels outside the layers and of a layer.

JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m bench.step_kernels [--only PART ...]

Needs the wheels of jax[cuda13]. A step is compiled with two numbers of layers, and the rest follows: a line of JSON
each, with the names of those kernels that XLA makes.
"""

import argparse
import collections
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from bench.step_workload import DEEPSEEK_V2_LITE, GPT_OSS_20B, LLAMA_3_8B, QWEN3_30B_A3B
from jattn.backend import BackendOptions, backend_class
from jattn.kv_pool import make_pool
from jattn.page_lists import WindowList, narrower_spans
from jattn.serving.config import EngineConfig
from jattn.serving.steps.loop_state import empty_rows
from jattn.serving.steps.plain import Steps
from jattn_kernels.call import Device, assume_device
from jattn_kernels.traced_once import traced_once
from jattn_models.deepseek import DeepseekV2ForCausalLM
from jattn_models.few_bits import hold_mixtures, hold_projections
from jattn_models.gpt_oss import GptOssForCausalLM
from jattn_models.llama import LlamaForCausalLM
from jattn_models.quantization import Mxfp4
from jattn_models.qwen3_moe import Qwen3MoeForCausalLM
from tests.jattn.harness.two_gpus import H200, gpu_options

_OPTIONS = {**gpu_options(shared=False), "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_FULL_UNROLL"}
_DUMP = "--xla_dump_to="
_LEAVES = ("kCustomKernel", "kCustomCall", "kCublasLtMatmul", "kGemm", "kCopy", "kMemset32BitValue", "kMemzero")


class Step(NamedTuple):
    """A step, and how many layers one period has.

    Attributes:
        held: What projections or experts are held in; None is bf16.
    """

    shapes: dict[str, Any]
    family: Any
    batch: int
    ctx: int
    held: str | None = None
    page: int = 16
    period: int = 1


_QWEN3 = functools.partial(Step, QWEN3_30B_A3B, Qwen3MoeForCausalLM, ctx=1024)
_LLAMA = functools.partial(Step, LLAMA_3_8B, LlamaForCausalLM)
STEPS = {
    "llama_bf16_b1": _LLAMA(batch=1, ctx=1024),
    "llama_bf16_b64": _LLAMA(batch=64, ctx=2048),
    "llama_fp8_b64": _LLAMA(batch=64, ctx=2048, held="fp8"),
    "llama_int4_b1": _LLAMA(batch=1, ctx=1024, held="int4"),
    "qwen3_b1": _QWEN3(batch=1),
    "qwen3_b8": _QWEN3(batch=8),
    "qwen3_b64": _QWEN3(batch=64),
    "gpt_oss_b1": Step(GPT_OSS_20B, GptOssForCausalLM, 1, 2048, held="mxfp4", period=2),
    "deepseek_v2_lite_b1": Step(DEEPSEEK_V2_LITE, DeepseekV2ForCausalLM, 1, 4096, page=64),
}


class Kernel(NamedTuple):
    """A launch.

    Attributes:
        kind: XLA's name for what launches it.
        name: Of a kernel that XLA makes; empty else.
    """

    kind: str
    name: str


def of_step(step: Step, folder: Path) -> dict[str, Any]:
    """How many kernels it has outside the layers, and how many each layer; of them those that XLA makes.

    Args:
        folder: Where XLA writes what it makes.
    """
    fewer, more = (compiled(step, layers * step.period, folder) for layers in (2, 3))
    counts = [collections.Counter("xla" if name else "other" for _, name in kernels) for kernels in (fewer, more)]
    row: dict[str, Any] = {}
    for what in ("other", "xla"):
        of_period = counts[1][what] - counts[0][what]
        row |= {f"{what}_of_a_layer": of_period / step.period, f"{what}_outside": counts[0][what] - 2 * of_period}
    return row | {"xla_kernels": [name for _, name in fewer if name]}


def compiled(step: Step, layers: int, folder: Path) -> list[Kernel]:
    """The launches of a step of so many layers."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=H200
    )
    decode, arguments = _step_of(step, layers)
    placed = SingleDeviceSharding(topology.devices[0])
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)
    with traced_once():
        function = jax.jit(decode, donate_argnums=(1, 2), compiler_options=_OPTIONS)
        function.trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    return list(_launches(_newest(folder, "*thunk_sequence.txt").read_text(encoding="utf-8")))


def _step_of(step: Step, layers: int) -> tuple[Any, Any]:
    """A greedy decode step and the shapes of its arguments."""
    config = step.family.config_class.from_dict(step.shapes | {"num_hidden_layers": layers})
    model = nnx.eval_shape(lambda: step.family(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    if step.held == "mxfp4":
        hold_mixtures(model, Mxfp4())
    elif step.held is not None:
        hold_projections(model, step.held)
    graph, weights = nnx.split(model)
    width = -(-step.ctx // step.page)
    pages = 1 + step.batch * width
    spans = narrower_spans((group.span for group in model.kv_groups), step.ctx)
    sizes = {"num_pages": pages, "page_size": step.page, "dtype": "bfloat16"}
    windows = [WindowList(span, pages) for span in spans]
    pool = jax.eval_shape(lambda: make_pool(model.kv_groups, windows=windows, **sizes))
    lists = 1 + len(windows)
    state = jax.eval_shape(lambda: empty_rows(step.batch, max_pages=width, max_stop_ids=8, num_lists=lists))
    options = BackendOptions(max_context_len=step.ctx, page_size=step.page, max_num_seqs=step.batch, dtype="bfloat16")
    backend = backend_class(EngineConfig().backend).for_model(model.attention_layers, options)
    decode = functools.partial(Steps(graph, backend).decode, variant="greedy")
    return decode, (weights, state, pool, jax.ShapeDtypeStruct((step.batch, 2 + lists), jnp.int32))


def _launches(thunks: str) -> Iterator[Kernel]:
    """Of what XLA runs, those that launch something; a loop's body counts once, for XLA has unrolled it."""
    for kind, rest in re.findall(r"^\s*\d+:\s+(k\w+)\s+\[[^\]]*\] *(.*)$", thunks, re.MULTILINE):
        if kind in _LEAVES:
            made = {"kCustomKernel": rest.split(" ")[0], "kCopy": "copy"}
            yield Kernel(kind, made.get(kind, ""))


def _newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda file: file.stat().st_mtime)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_kernels", description=__doc__)
    parser.add_argument("--only", action="append", help="part of a step's name; may be repeated")
    options = parser.parse_args()
    assume_device(Device("gpu", (9, 0), 132))
    with tempfile.TemporaryDirectory() as folder:
        # Read when JAX makes the topology, the first time that it needs XLA.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DUMP}{folder} --xla_dump_hlo_as_text"
        for name, step in STEPS.items():
            if options.only is None or any(part in name for part in options.only):
                print(json.dumps({"step": name} | of_step(step, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
