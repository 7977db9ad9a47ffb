"""Random requests for pymllm's backend: a pool, batches of every mode, and what the oracle says of them."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jattn.backend import AttentionLayer
from jattn.flashinfer import FlashInferAttnBackend
from jattn.forward_batch import ForwardBatch, ReqToTokenPool
from jattn.kv_pool import KVGroup, KVPool
from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec

CONTEXT, REQUESTS, NOWHERE, WINDOW = 128, 4, np.iinfo(np.int32).max, 9
LAYER = AttentionLayer(
    layer_id=1, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, head_dim=16, v_head_dim=16, scaling=0.3
)
WINDOWED = dataclasses.replace(LAYER, sliding_window_size=WINDOW)
CROSS = dataclasses.replace(LAYER, is_cross_attention=True)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def make_backend(page_size=1, **options):
    usual = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "kv_cache_dtype": "float32",
        "q_dtype": "float32",
        "max_context_len": CONTEXT,
        "req_to_token": (REQUESTS, CONTEXT),
        "device": None,
        "max_req_pool_size": 8,
    }
    return FlashInferAttnBackend(**(usual | options), page_size=page_size)


@dataclasses.dataclass(frozen=True)
class World:
    """A pool of two layers, and requests whose pages lie scattered in it; page 0 is nobody's, and zeros."""

    page_size: int
    page_table: np.ndarray
    pool: KVPool

    @property
    def req_to_token(self):
        tokens = self.page_table[:, :, None] * self.page_size + np.arange(self.page_size)
        return jnp.asarray(tokens.reshape(REQUESTS, -1)[:, :CONTEXT], jnp.int32)

    def slots(self, request, start, end):
        return np.asarray(self.req_to_token)[request, start:end].tolist()


def make_world(page_size, layout="NHD", dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    columns = -(-CONTEXT // page_size)
    num_pages = REQUESTS * columns + 2
    table = 1 + rng.permutation(num_pages - 1)[: REQUESTS * columns].reshape(REQUESTS, columns).astype(np.int32)
    shape = (2, num_pages, page_size, 2, 16) if layout == "NHD" else (2, num_pages, 2, page_size, 16)
    k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32).at[:, 0].set(0).astype(dtype) for _ in range(2))
    return World(page_size, table, KVPool((KVGroup(k=k, v=v, name="x", page_layout=layout),)))


def padded_to(values, size, fill):
    return jnp.asarray([*values, *[fill] * (size - len(values))], jnp.int32)


def make_batch(world, mode, requests, q_lens, kv_lens, *, rows=4, tokens=24, encoder_lens=None, **options):
    """The last `q_lens` tokens of each request, padded; in verify those after the `kv_lens`. One a row in decode."""
    decode, verify = mode.is_decode_or_idle(), mode.is_target_verify()
    begin = np.zeros(len(requests), int)
    if encoder_lens is not None:
        begin = -(-np.array(encoder_lens) // world.page_size) * world.page_size
    slots = []
    for request, first, q_len, kv_len in zip(requests, begin, q_lens, kv_lens, strict=True):
        end = first + kv_len + (q_len if verify else 0)
        slots += world.slots(request, end - q_len, end)
    tokens = rows * q_lens[0] if decode or verify else tokens
    starts = np.arange(rows + 1) * q_lens[0] if decode or verify else np.cumsum([0, *q_lens])
    return ForwardBatch(
        forward_mode=mode,
        input_ids=jnp.zeros(tokens, jnp.int32),
        positions=jnp.zeros(tokens, jnp.int32),
        seq_lens=padded_to(kv_lens, rows, 0),
        cu_q_lens=padded_to(starts, rows + 1, starts[-1]),
        out_cache_loc=(padded_to(slots, tokens, NOWHERE),),
        req_pool_indices=padded_to(requests, rows, 0),
        req_to_token_pool=ReqToTokenPool(world.req_to_token),
        encoder_lens=None if encoder_lens is None else padded_to(encoder_lens, rows, 0),
        **options,
    )


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def q_k_v(batch, seed=10):
    tokens = batch.input_ids.shape[0]
    return random(seed, tokens, 4, 16), random(seed + 1, tokens, 2, 16), random(seed + 2, tokens, 2, 16)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=7)
def step(backend, options, layer, batch, q, k, v, pool):
    metadata = (
        backend.init_forward_metadata(batch)
        if batch.forward_mode.is_decode_or_idle()
        else backend.init_forward_metadata(batch, **dict(options))
    )
    forward = backend.forward_decode if batch.forward_mode.is_decode_or_idle() else backend.forward_extend
    return forward(q, k, v, layer, batch, metadata, pool)


def oracle(world, layer, batch, q, new_pool, *, q_lens, kv_lens, requests, encoder_lens=None, **options):
    """Attention over the keys that `new_pool` holds."""
    group = new_pool.groups[0]
    spec = AttentionSpec(
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        sm_scale=layer.scaling,
        logits_soft_cap=layer.logit_cap or None,
        window_left=None if layer.sliding_window_size < 0 else layer.sliding_window_size,
        causal=not layer.is_cross_attention,
        page_layout=group.page_layout,
    )
    lens, table = np.array(kv_lens), world.page_table[np.array(requests)]
    if batch.forward_mode.is_target_verify():
        lens = lens + np.array(q_lens)
    if layer.is_cross_attention:
        lens = np.array(encoder_lens)
    elif encoder_lens is not None:
        first = -(-np.array(encoder_lens) // world.page_size)
        table = np.stack([np.roll(row, -shift) for row, shift in zip(table, first, strict=True)])
    starts = np.cumsum([0, *q_lens])
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    return reference.paged_extend(
        np.asarray(q), np.asarray(group.k), np.asarray(group.v), table, lens, starts,
        spec=spec, layer_index=layer.layer_id, **scales, **options,
    )  # fmt: skip


def written(world, layer, slots, k, v):
    """The pool after layer's rows were written by hand, one after the other."""
    group = jax.tree.map(np.array, world.pool.groups[0])
    for token, slot in enumerate(np.asarray(slots)):
        if slot != NOWHERE:
            page, offset = divmod(int(slot), world.page_size)
            where = (1, page, offset) if group.page_layout == "NHD" else (1, page, slice(None), offset)
            for pages, rows, scale in ((group.k, k, layer.k_scale), (group.v, v, layer.v_scale)):
                stored = rows[token] if scale is None else rows[token] / jnp.reshape(scale, (-1, 1))
                pages[where] = np.asarray(stored.astype(pages.dtype))
    return KVPool((group,))


def check(backend, world, layer, mode, *, requests, q_lens, kv_lens, encoder_lens=None, **options):
    """Runs a step with the pool donated, and holds what it wrote and said against what it must."""
    batch = make_batch(world, mode, requests, q_lens, kv_lens, encoder_lens=encoder_lens)
    q, k, v = q_k_v(batch)
    slots = batch.out_cache_loc[0]
    if layer.is_cross_attention:
        k, v, slots = None, None, []
    expected = written(world, layer, slots, k, v)
    out, pool = step(backend, tuple(options.items()), layer, batch, q, k, v, jax.tree.map(jnp.copy, world.pool))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, pool), expected)
    lengths = {"q_lens": q_lens, "kv_lens": kv_lens, "requests": requests, "encoder_lens": encoder_lens}
    exact = oracle(world, layer, batch, q, expected, **lengths)
    real = sum(q_lens)
    np.testing.assert_allclose(out[:real], exact[:real], **TOLERANCE)
    np.testing.assert_array_equal(out[real:], 0)
