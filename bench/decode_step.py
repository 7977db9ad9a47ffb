"""The serving loop's decode step at full size: real step, random weights and pool, tokens read one step behind."""

import contextlib
import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.attention import Measured
from bench.latent_workload import random_rows
from bench.step_workload import LLAMA_3_8B, StepWorkload
from bench.timing import profiled
from bench.workloads import random_normal, random_page_table
from jattn.attention.specs import kind_of
from jattn.backend import BackendOptions, backend_class
from jattn.compiled_steps import CompiledSteps, StepPlan
from jattn.device_mesh import bytes_on_one, held_by_all, made
from jattn.kv_pool import KVPool, make_pool
from jattn.mailbox import connect
from jattn.matmul import FP8, INT4, MXFP4
from jattn.page_lists import WindowList, narrower_spans
from jattn.parallel import ONE_DEVICE, Parallel
from jattn.serving.config import EngineConfig
from jattn.serving.executor.last_sent import LastSent
from jattn.serving.executor.mesh_plans import on_mesh
from jattn.serving.executor.step_plans import StepKey
from jattn.serving.steps.loop_state import LoopState, empty_rows
from jattn.serving.steps.plain import Steps
from jattn.step_compilation import compile_steps
from jattn_kernels.call import AttentionCall, default_device
from jattn_kernels.dispatch import choose
from jattn_kernels.packed_latents import is_packed
from jattn_models.decoder import Decoder
from jattn_models.decoder_config import DecoderConfig
from jattn_models.few_bits import hold_mixtures, hold_projections, hold_zero_points
from jattn_models.llama import LlamaForCausalLM
from jattn_models.quantization import Mxfp4

_WEIGHT_SIZE = 0.02
_FP8_SIZE = 100.0  # of numbers in fp8, which go to 448
_INT4_SIZE = 4.6  # of numbers in int4, each as often
_MXFP4_EXPONENT = 120  # of a scale of 2^-7: its numbers, each as often, are of size 2.9
_STOP_IDS = 8
_WARM_UP_STEPS = 4
_PROFILED_STEPS = 20
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Model(NamedTuple):
    """A model of random weights, held once."""

    config: DecoderConfig
    graph: nnx.GraphDef
    weights: Any
    kv_groups: Any
    attention_layers: Any
    parallel: Parallel = ONE_DEVICE

    def read_bytes(self, batch: int) -> int:
        """Bytes of weights that a step of so many tokens reads on a device, experts as a uniform draw meets them."""
        experts, total = self.config.experts, 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.weights):
            met = 1.0
            # [layers, experts, inputs, outputs]; of attention those with four axes have heads for experts.
            if experts is not None and leaf.ndim == 4 and "attention" not in jax.tree_util.keystr(path):
                met = _share_met(experts.routing, batch, leaf.shape[1])
            total += bytes_on_one(leaf) * met
        tokens = self.config.vocab_size // self.parallel.size
        embedding = tokens * self.config.hidden_size * jnp.dtype(jnp.bfloat16).itemsize
        return round(total if self.config.tied else total - embedding)

    @property
    def held_in(self) -> str:
        """The formats of fewer bits that there are weights in, or bf16."""
        names = {jnp.dtype(FP8): "fp8", jnp.dtype(INT4): "int4", jnp.dtype(MXFP4): "mxfp4"}
        return (
            "+".join(sorted({names[leaf.dtype] for leaf in jax.tree.leaves(self.weights) if leaf.dtype in names}))
            or "bf16"
        )

    def seen_share(self, ctx: int) -> float:
        """The part of so long a text's keys that a new token sees, on the average of the layers."""
        stacks = self.config.stacks
        windows = [(len(layers), ctx if kind.window_left is None else kind.window_left + 1) for layers, kind in stacks]
        return sum(count * min(ctx, window) for count, window in windows) / (ctx * self.config.num_layers)


def _share_met(routing: Any, tokens: int, held: int) -> float:
    """The part of the experts held that some token goes to, if each goes to any alike; to those past them all go."""
    return 1 - (1 - routing.per_token / routing.num_experts) ** tokens * min(held, routing.num_experts) / held


def random_model(
    shapes: dict[str, Any] = LLAMA_3_8B,
    family: type[Decoder] = LlamaForCausalLM,
    parallel: Parallel = ONE_DEVICE,
    *,
    quantization: str | None = None,
) -> Model:
    """A bf16 model of these shapes, perhaps held in fewer bits; each stacked leaf is made where it will lie.

    Args:
        quantization: Of projections, and of experts where there is a kernel for those: fp8 or int4; awq, which is int4
            with zero points; or mxfp4, of experts alone.
    """
    config = family.config_class.from_dict(shapes)
    abstract = nnx.eval_shape(lambda: family(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), parallel=parallel))
    if quantization == "mxfp4":
        hold_mixtures(abstract, Mxfp4())
    elif quantization is not None:
        hold_projections(abstract, "int4" if quantization == "awq" else quantization)
    if quantization == "awq":
        hold_zero_points(abstract)
    graph, state = nnx.split(abstract)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)

    def filled(number: int, path: Any, leaf: Any) -> Any:
        if "scales" in jax.tree_util.keystr(path) and leaf.dtype == MXFP4:
            return jnp.full(leaf.shape, _MXFP4_EXPONENT, leaf.dtype)
        if "scales" in jax.tree_util.keystr(path):
            return jnp.full(leaf.shape, _WEIGHT_SIZE / (_FP8_SIZE if quantization == "fp8" else _INT4_SIZE), leaf.dtype)
        if "scale" in jax.tree_util.keystr(path):
            return jnp.ones(leaf.shape, leaf.dtype)
        key = jax.random.key(number + len(leaves) * parallel.first_of(1))
        if leaf.dtype == jnp.int8:  # zero points
            return jax.random.randint(key, leaf.shape, -1, 2, jnp.int8)
        if leaf.dtype == MXFP4:
            return jax.random.bits(key, leaf.shape, jnp.uint8)
        if leaf.dtype == INT4:
            in_bytes = jax.random.bits(key, (*leaf.shape[:-1], leaf.shape[-1] // 2), jnp.uint8)
            return jax.lax.bitcast_convert_type(in_bytes, INT4).reshape(leaf.shape)
        size = _FP8_SIZE if leaf.dtype == FP8 else _WEIGHT_SIZE
        return random_normal(key, leaf.shape, leaf.dtype.name, size)

    weights = [
        made(functools.partial(filled, number, path, leaf), parallel, shares=True)
        for number, (path, leaf) in enumerate(leaves)
    ]
    model = nnx.merge(graph, jax.tree.unflatten(tree, weights))
    connect(model, parallel)
    graph, weights = nnx.split(model)
    return Model(config, graph, weights, abstract.kv_groups, abstract.attention_layers, parallel)


class Setup(NamedTuple):
    """What the engine would hold when every row of a bucket is in the middle of its text.

    Attributes:
        plans: What it sends with a step, for some steps one after the other: each row opens a page as often as it
            would, and not when its neighbours do.
    """

    steps: CompiledSteps
    compile_s: float
    state: LoopState
    pool: KVPool
    plans: np.ndarray


def set_up(model: Model, workload: StepWorkload, *, steps: int, implementation: str | None = None) -> Setup:
    """Pool and loop state on the device, and the step compiled for them as the engine compiles it.

    The pages let rows grow by `steps` tokens past `ctx`. Lists of windows have as many, though the engine's have fewer.
    """
    longest, parallel = workload.ctx + steps, model.parallel
    page_table, num_pages = random_page_table((longest,) * workload.batch, workload.page)
    windows = [
        WindowList(span, num_pages) for span in narrower_spans((group.span for group in model.kv_groups), longest)
    ]
    sizes = {"num_pages": num_pages, "page_size": workload.page, "dtype": workload.stored}
    shapes = jax.eval_shape(lambda: make_pool(model.kv_groups, windows=windows, **sizes))
    leaves, tree = jax.tree.flatten(shapes)

    def random_pages(number: int, leaf: Any) -> jax.Array:
        if is_packed(leaf.dtype):
            return random_rows(jax.random.key(number), leaf.shape[:-1], leaf.dtype.name)
        return random_normal(jax.random.key(number), leaf.shape, leaf.dtype.name)

    pages = [made(functools.partial(random_pages, i, leaf), parallel, shares=True) for i, leaf in enumerate(leaves)]
    pool = jax.tree.unflatten(tree, pages)

    def rows() -> LoopState:
        return dataclasses.replace(
            empty_rows(workload.batch, max_pages=page_table.shape[1], max_stop_ids=_STOP_IDS),
            page_tables=tuple(jnp.array(page_table) for _ in range(1 + len(windows))),
            last_tokens=jax.random.randint(
                jax.random.key(0), (workload.batch,), 0, model.config.vocab_size, dtype=jnp.int32
            ),
        )

    state = made(rows, parallel, shares=False)
    options = BackendOptions(
        max_context_len=longest,
        page_size=workload.page,
        max_num_seqs=workload.batch,
        dtype="bfloat16",
        kv_cache_dtype=workload.kv,
        implementation=implementation,
    )
    backend = backend_class(EngineConfig().backend).for_model(model.attention_layers, options)
    plans = _plans(np.asarray(page_table), workload.page, num_lists=1 + len(windows))
    decode = functools.partial(Steps(model.graph, backend, parallel=parallel).decode, variant="greedy")
    plan = StepPlan(decode, (model.weights, state, pool, plans[0]), donate=(1, 2), unrolled=True)
    (plan,) = on_mesh({StepKey("decode", workload.batch, "greedy"): plan}, parallel).values()
    if default_device().platform == "gpu":
        importlib.import_module("jattn_kernels.mosaic.entry")  # Pallas, a second: a process's, not a bucket's
    start = time.perf_counter()
    compiled = compile_steps({workload.name: plan})
    return Setup(compiled, time.perf_counter() - start, state, pool, plans)


def _plans(page_table: np.ndarray, page_size: int, *, num_lists: int) -> np.ndarray:
    """Plans that open pages which stand in the tables already, one of two, so that no step changes them."""
    rows, steps = np.arange(page_table.shape[0], dtype=np.int32), np.arange(2 * page_size, dtype=np.int32)
    columns = (steps[:, None] + rows) // page_size % min(2, page_table.shape[1])
    pages = [page_table[rows, columns]] * num_lists
    return np.stack([np.broadcast_to(rows, columns.shape), columns, *pages], axis=2)


class Loop:
    """Runs steps as the engine does: launch the next one, then read the tokens of the one before."""

    def __init__(self, model: Model, workload: StepWorkload, setup: Setup):
        self._step = setup.steps[workload.name]
        self._weights = model.weights
        self._state, self._pool = setup.state, setup.pool
        self._everywhere = held_by_all(model.parallel)
        self._plans, self._on_device = setup.plans, LastSent(self._everywhere)
        self._on_device.prepare(setup.plans[:1])
        self._ctx = workload.ctx
        self.call_ms: list[float] = []  # of each step, until the host has sent it

    def rewind(self, steps: int) -> int:
        """Sets every row's length such that `steps` steps see `ctx` keys on the average; returns the length."""
        first_len = self._ctx - 1 - steps // 2
        lens = jax.device_put(jnp.full(self._state.seq_lens.shape, first_len, jnp.int32), self._everywhere)
        self._state = jax.block_until_ready(dataclasses.replace(self._state, seq_lens=lens))
        return first_len

    def run(self, steps: int) -> None:
        """Takes `steps` steps and waits for the last."""
        before = None
        for number in range(steps):
            plan = self._on_device(self._plans[number % len(self._plans)])
            start = time.perf_counter()
            self._state, self._pool, output = self._step(self._weights, self._state, self._pool, plan)
            self.call_ms.append((time.perf_counter() - start) * 1e3)
            output.tokens.copy_to_host_async()
            if before is not None:
                np.asarray(before)
            before = output.tokens
        jax.block_until_ready(self._state)

    def timed(self, steps: int) -> float:
        """Milliseconds a step, of so many.

        Raises:
            RuntimeError: A row stood still, so the steps did not do the work that they are timed for.
        """
        first_len = self.rewind(steps)
        start = time.perf_counter()
        self.run(steps)
        elapsed = time.perf_counter() - start
        lens = np.asarray(self._state.seq_lens)
        if np.any(lens != first_len + steps) or np.any(np.asarray(self._state.finished)):
            raise RuntimeError(f"Rows must grow by a token a step. Got lengths {lens} after {steps} steps.")
        return elapsed / steps * 1e3


def measured(
    model: Model, workload: StepWorkload, *, steps: int = 200, repeats: int = 3, implementation: str | None = None
) -> Measured:
    """Times a step workload on the default device, or on those that share the model."""
    setup = set_up(model, workload, steps=steps, implementation=implementation)
    loop = Loop(model, workload, setup)
    page_bytes = sum(group.page_bytes(workload.page, workload.stored) for group in model.kv_groups)
    memory = setup.steps[workload.name].memory_analysis()
    assert memory is not None
    compile_s = setup.compile_s
    del setup  # its state and pool are donated to the first step
    loop.rewind(_WARM_UP_STEPS)
    loop.run(_WARM_UP_STEPS)
    with compilations() as compiled:
        times = [loop.timed(steps) for _ in range(repeats)]
    host_ms = statistics.median(loop.call_ms)
    if compiled:
        raise RuntimeError(f"{workload.name}: {len(compiled)} compilations in {repeats * steps} steps.")
    profiled_steps = min(_PROFILED_STEPS, steps // 2)
    loop.rewind(2 * profiled_steps)
    profile = profiled(functools.partial(loop.run, profiled_steps), runs=1)
    roofline_ms = workload.roofline_ms(
        weight_bytes=model.read_bytes(workload.batch),
        kv_bytes_per_token=page_bytes / workload.page * model.seen_share(workload.ctx),
    )
    time_ms = statistics.median(times)
    row = {
        **workload.fields(),
        "impl": f"jattn-{serving_implementation(model, workload, implementation)}",
        "time_ms": round(time_ms, 4),
        "min_ms": round(min(times), 4),
        "roofline_ms": round(roofline_ms, 4),
        "roofline_share": round(roofline_ms / time_ms, 4),
        "steps": steps,
        "compile_s": round(compile_s, 2),
        "temp_MB": round(memory.temp_size_in_bytes / 1e6, 2),
    }
    if model.parallel.axis is not None:
        row["tensor_parallel"] = model.parallel.size
        row["host_ms"] = round(host_ms, 4)
    elif profile.busy_share is not None:
        row["device_ms"] = round(profile.busy_us / profiled_steps / 1e3, 4)
        # Of the time outside the profile: while it is traced, XLA replays no command buffers.
        row["busy_share"] = round(profile.busy_us / profiled_steps / 1e3 / time_ms, 4)
        row["longest_copy_us"] = round(profile.longest_copy_us, 2)
        row["kernels"] = round(sum(profile.kernel_counts.values()) / profiled_steps, 1)
    kernels = [{"of": workload.name, "impl": row["impl"], **kernel} for kernel in profile.rows(per=profiled_steps)]
    return Measured(row, kernels)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Every compilation inside, by the name of JAX's event."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def serving_implementation(model: Model, workload: StepWorkload, implementation: str | None) -> str:
    """Name of the implementation that serves the step's attention on the default device."""
    kind = kind_of(model.attention_layers[0])
    call = AttentionCall(
        operation="mla_decode" if kind.latent else "paged_decode",
        spec=kind.spec,
        q_dtype="bfloat16",
        kv_dtype=workload.stored.name,
        page_size=workload.page,
        features=frozenset({"layer_index"}),
    )
    return choose(call, implementation).implementation.name
