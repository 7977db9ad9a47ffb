"""The checkpoints in tests/models/golden/ and what transformers computes with them; see make_golden.py."""

import dataclasses
import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.checkpoint import Checkpoint
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.model import model_class
from jattn.parallel import Parallel
from tests.models.harness.paged_run import PagedRun

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PROMPT_LENS = (1, 8, 21)
DECODE_STEPS = 32
CAPACITY = max(PROMPT_LENS) + DECODE_STEPS
TOLERANCE = 1e-4


def architecture(case):
    return Checkpoint(GOLDEN / case).architecture


LLAMA_CASES, WRAPPED_CASES, OTHER_CASES = [], [], []
for folder in sorted(GOLDEN.iterdir()):
    cases = {"LlamaForCausalLM": LLAMA_CASES}.get(architecture(folder.name), OTHER_CASES)
    (WRAPPED_CASES if folder.name.endswith("_wrapped") else cases).append(folder.name)


@functools.cache
def load(case, dtype=jnp.float32):
    checkpoint = Checkpoint(GOLDEN / case)
    return model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=dtype)


@functools.cache
def golden(case, kind="logits"):
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        return [arrays[f"{kind}_{number}"] for number in range(len(PROMPT_LENS))]


def prompts(case):
    return [row[:length] for row, length in zip(golden(case, "tokens"), PROMPT_LENS, strict=True)]


def paged_run(case, page_size, dtype=jnp.float32, surface="flash_attention"):
    sizes = {"capacity": CAPACITY, "page_size": page_size}
    return PagedRun(load(case, dtype), len(PROMPT_LENS), **sizes, dtype=dtype, surface=surface)


def assert_golden(logits, expected, tolerance=TOLERANCE):
    chex.assert_tree_all_finite(logits)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


def assert_run_is_golden(case, page_size, surface="flash_attention"):
    """Prompts in one ragged pass, then a token at a time, against transformers' logits."""
    run = paged_run(case, page_size, surface=surface)
    for logits, expected in zip(run.extend(prompts(case)), golden(case), strict=True):
        assert_golden(logits, expected[: len(logits)])
    for step in range(DECODE_STEPS):
        at = [length + step for length in PROMPT_LENS]
        logits = run.decode([row[i] for row, i in zip(golden(case, "tokens"), at, strict=True)])
        assert_golden(logits, np.stack([row[i] for row, i in zip(golden(case), at, strict=True)]))


def shares(checkpoint, size, by_expert=False):
    """The parts of a model on `size` devices: what all have in common, and each one's state."""
    model = model_class(checkpoint.architecture)
    parallel = Parallel("tensor", size, by_expert=by_expert)
    parts = [model.from_checkpoint(checkpoint, dtype=jnp.float32, parallel=parallel, rank=i) for i in range(size)]
    return nnx.graphdef(parts[0]), [nnx.state(part) for part in parts]


def assert_shares_are_golden(checkpoint, tokens, expected, size=2, by_expert=False):
    """Several devices' shares of a model, side by side under vmap: each has the whole model's logits."""
    graph, states = shares(checkpoint, size, by_expert)
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *states)
    both = jax.vmap(lambda state: _dense_logits(graph, state, jnp.asarray(tokens)), axis_name="tensor")(stacked)
    for device in both:
        assert_golden(device, expected)
    model = nnx.merge(graph, states[0])
    group = model.kv_groups[0]  # a latent row is all heads'
    assert group.num_kv_heads == (1 if group.latent else max(1, model.config.num_kv_heads // size))


def dense_logits(model, tokens):
    """The logits after each of one sequence's tokens, without a pool."""
    return _dense_logits(*nnx.split(model), jnp.asarray(tokens))


@functools.partial(jax.jit, static_argnames="graph")
def _dense_logits(graph, state, tokens):
    model = nnx.merge(graph, state)
    hidden, _ = model(sequence(tokens), None, DenseBackend(), None)
    return model.compute_logits(hidden)


@dataclasses.dataclass(frozen=True)
class DenseBackend:
    """Attention within the pass, over one sequence; it has no pool."""

    def init_forward_metadata(self, forward_batch):
        return None

    def forward_extend(self, q, k, v, layer, forward_batch, metadata, pool, save_kv_cache=True):
        dtype = q.dtype
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        index = jnp.arange(len(q))
        back, chunk = index[:, None] - index[None, :], index // (layer.chunk_size or len(q))
        window = len(q) if layer.sliding_window_size < 0 else layer.sliding_window_size
        seen = (back >= 0) & (back <= window) & (chunk[:, None] == chunk[None, :])
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        logits = layer.scaling * jnp.einsum("tnh,snh->nts", q, k, precision="highest")
        if layer.logit_cap:
            logits = layer.logit_cap * jnp.tanh(logits / layer.logit_cap)
        logits = jnp.where(seen[None], logits, -jnp.inf)
        if (sinks := layer.own_sinks) is not None:
            logits = jnp.pad(logits, ((0, 0), (0, 0), (0, 1)))
            logits = logits.at[..., -1].set(sinks[:, None].astype(jnp.float32))
        weights = jax.nn.softmax(logits, axis=-1)[..., : len(q)]
        out = jnp.einsum("nts,snh->tnh", weights, v, precision="highest")
        return out.astype(dtype), pool

    forward_decode = forward_extend


def sequence(tokens, groups=1):
    """One sequence from its beginning, in page 1 and the pages after it, of as many groups of a pool."""
    index = jnp.arange(len(tokens), dtype=jnp.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=tokens,
        positions=index,
        seq_lens=jnp.array([len(tokens)], jnp.int32),
        cu_q_lens=jnp.array([0, len(tokens)], jnp.int32),
        out_cache_loc=(8 + index,) * groups,
        page_tables=(jnp.array([[1, 2]], jnp.int32),) * groups,
    )
