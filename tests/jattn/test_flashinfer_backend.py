"""pymllm's backend agrees with the oracle in every mode, and its steps replay in place without compiling."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.backend import AttentionBackend, AttentionLayer
from jattn.flash_attention import CudaGraphState
from jattn.flashinfer import FlashInferAttnBackend, KVBuffers, WrapperDispatch, should_use_tensor_core
from jattn.forward_batch import ForwardBatch, ForwardMode, ReqToTokenPool
from jattn.kv_pool import KVGroup, KVPool
from jattn.spec_info import EagleVerifyInput
from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec
from tests.jattn.listening import compilations

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


DECODE = {"requests": (2, 0, 3), "q_lens": (1, 1, 1), "kv_lens": (1, 97, 20)}
EXTEND = {"requests": (2, 0, 3), "q_lens": (3, 1, 14), "kv_lens": (3, 97, 30)}
NEW = {"requests": (1, 3), "q_lens": (9, 2), "kv_lens": (9, 2)}
VERIFY = {"requests": (2, 0, 3), "q_lens": (3, 3, 3), "kv_lens": (1, 70, 18)}
CAPPED = dataclasses.replace(LAYER, logit_cap=2.0)
SCALED = dataclasses.replace(LAYER, k_scale=jnp.float32(0.5), v_scale=jnp.array([0.25, 2.0], jnp.float32))


@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (16, "HND"), (64, "NHD")])
def test_decode_writes_then_agrees_with_the_oracle(page_size, layout):
    check(make_backend(page_size), make_world(page_size, layout), CAPPED, ForwardMode.DECODE, **DECODE)


@pytest.mark.parametrize("use_ragged", [True, False], ids=["ragged", "paged"])
@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (16, "HND")])
def test_extend_writes_then_agrees_with_the_oracle(page_size, layout, use_ragged):
    world = make_world(page_size, layout)
    check(make_backend(page_size), world, CAPPED, ForwardMode.EXTEND, **EXTEND, use_ragged=use_ragged)


def test_extend_without_prefix_needs_no_pages():
    check(make_backend(), make_world(1), LAYER, ForwardMode.EXTEND, **NEW, extend_no_prefix=True)


def test_extend_without_prefix_is_refused_where_there_is_one():
    batch = make_batch(make_world(1), ForwardMode.EXTEND, (1, 3), (9, 2), (9, 5))
    with pytest.raises(ValueError, match=r"`extend_no_prefix` needs .* Got prefixes of \[0, 3, 0, 0\] tokens"):
        make_backend().init_forward_metadata(batch, extend_no_prefix=True)


@pytest.mark.parametrize("layer", [WINDOWED, LAYER], ids=["window", "full"])
@pytest.mark.parametrize(
    ("mode", "lengths"),
    [(ForwardMode.DECODE, DECODE), (ForwardMode.EXTEND, EXTEND), (ForwardMode.TARGET_VERIFY, VERIFY)],
    ids=["decode", "extend", "verify"],
)
def test_two_wrappers_serve_layers_with_a_window_and_without(mode, lengths, layer):
    backend = make_backend(4, sliding_window_size=WINDOW)
    assert backend.dispatch_reason is WrapperDispatch.SLIDING_WINDOW
    check(backend, make_world(4), layer, mode, **lengths)


def test_single_wrapper_serves_a_layer_with_a_window():
    check(make_backend(4), make_world(4), WINDOWED, ForwardMode.MIXED, **EXTEND)


@pytest.mark.parametrize("layer", [CROSS, LAYER], ids=["cross", "own"])
@pytest.mark.parametrize(
    ("mode", "lengths"), [(ForwardMode.DECODE, DECODE), (ForwardMode.EXTEND, EXTEND)], ids=["decode", "extend"]
)
def test_cross_attention_sees_each_requests_encoder(mode, lengths, layer):
    backend = make_backend(4, is_encoder_decoder=True)
    assert backend.dispatch_reason is WrapperDispatch.CROSS_ATTENTION
    check(backend, make_world(4), layer, mode, **lengths, encoder_lens=(7, 0, 12))


def test_cross_attention_saves_the_encoders_keys():
    backend, world = make_backend(4, is_encoder_decoder=True), make_world(4)
    slots = world.slots(2, 0, 5)
    batch = make_batch(world, ForwardMode.EXTEND, (2,), (3,), (3,), encoder_lens=(5,))
    batch = dataclasses.replace(batch, encoder_out_cache_loc=jnp.asarray(slots, jnp.int32))
    q, k, v = random(1, 24, 4, 16), random(2, 5, 2, 16), random(3, 5, 2, 16)
    out, pool = step(backend, (), CROSS, batch, q, k, v, jax.tree.map(jnp.copy, world.pool))
    expected = written(world, CROSS, slots, k, v)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, pool), expected)
    lengths = {"q_lens": (3,), "kv_lens": (3,), "requests": (2,), "encoder_lens": (5,)}
    np.testing.assert_allclose(out[:3], oracle(world, CROSS, batch, q, expected, **lengths)[:3], **TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "lengths", "options"),
    [(ForwardMode.DECODE, DECODE, {}), (ForwardMode.EXTEND, EXTEND, {"use_ragged": False})],
    ids=["decode", "extend"],
)
def test_fp8_keys_are_stored_and_read_by_the_layers_scales(mode, lengths, options):
    dtype = "float8_e4m3fn"
    check(make_backend(16, kv_cache_dtype=dtype), make_world(16, dtype=dtype), SCALED, mode, **lengths, **options)


def test_verify_of_trees_takes_their_mask_and_positions():
    world, backend = make_world(4), make_backend(4, sliding_window_size=WINDOW)
    requests, kv_lens = (2, 0, 3), (1, 70, 18)
    within = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)  # a root and two children
    mask = np.concatenate([np.concatenate([np.ones((3, n), bool), within], axis=1).reshape(-1) for n in kv_lens])
    positions = np.concatenate([n + np.array([0, 1, 1]) for n in (*kv_lens, 0)]).astype(np.int32)
    info = EagleVerifyInput(
        custom_mask=jnp.asarray(np.append(mask, np.zeros(50, bool))), positions=jnp.asarray(positions)
    )
    batch = make_batch(world, ForwardMode.TARGET_VERIFY, requests, (3, 3, 3), kv_lens, spec_info=info)
    q, k, v = q_k_v(batch)
    out, _ = step(backend, (), WINDOWED, batch, q, k, v, jax.tree.map(jnp.copy, world.pool))
    expected = written(world, WINDOWED, batch.out_cache_loc[0], k, v)
    lengths = {"q_lens": (3, 3, 3), "kv_lens": kv_lens, "requests": requests}
    tree = {"custom_mask": mask, "q_positions": positions[:9]}
    exact = oracle(world, WINDOWED, batch, q, expected, **lengths, **tree)
    np.testing.assert_allclose(out[:9], exact[:9], **TOLERANCE)
    np.testing.assert_array_equal(out[9:], 0)


def test_batches_with_page_tables_need_no_token_slots():
    world, backend = make_world(16), make_backend(16)
    batch = make_batch(world, ForwardMode.DECODE, (2, 0, 3), (1, 1, 1), (5, 9, 20))
    tables = (jnp.asarray(np.concatenate([world.page_table[[2, 0, 3]], np.zeros((1, 8), np.int32)])),)
    given = dataclasses.replace(batch, page_tables=tables, req_pool_indices=None, req_to_token_pool=None)
    q, k, v = q_k_v(batch)
    results = [step(backend, (), LAYER, each, q, k, v, jax.tree.map(jnp.copy, world.pool)) for each in (batch, given)]
    chex.assert_trees_all_equal(*results)


def random_rows(rng, bs):
    rows = int(rng.integers(1, bs + 1))
    return padded_to(rng.permutation(REQUESTS)[:rows], rows, 0), padded_to(rng.integers(0, 90, rows), rows, 0)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window_size": WINDOW}, {"is_encoder_decoder": True}], ids=["one", "windows", "cross"]
)
def test_replay_has_the_tree_and_avals_of_the_capture(mode, options):
    backend, world, rng = make_backend(4, num_draft_tokens=3, **options), make_world(4), np.random.default_rng(0)
    rows = 3 if mode.is_target_verify() else 1
    replay = jax.jit(backend.init_forward_metadata_replay_cuda_graph, static_argnums=(0, 3, 4, 5))
    for bs in (1, 4):
        encoder = {"encoder_lens": jnp.zeros(bs, jnp.int32)} if options.get("is_encoder_decoder") else {}
        ones = jnp.ones(bs, jnp.int32)
        arguments = (bs, bs * rows, 0 * ones, ones, mode, world.req_to_token)
        captured = backend.init_forward_metadata_capture_cuda_graph(*arguments, **encoder)
        for _ in range(4):
            requests, lens = random_rows(rng, bs)
            encoder = {name: jnp.zeros_like(lens) for name in encoder}
            metadata = replay(bs, requests, lens, None, mode, None, world.req_to_token, **encoder)
            chex.assert_trees_all_equal_structs(metadata, captured)
            chex.assert_trees_all_equal_shapes_and_dtypes(metadata, captured)


def test_replayed_decode_pads_with_rows_that_read_page_0():
    backend, world = make_backend(16), make_world(16)
    arguments = (jnp.array([3, 1], jnp.int32), jnp.array([20, 33], jnp.int32), 53, ForwardMode.DECODE, None)
    metadata = backend.init_forward_metadata_replay_cuda_graph(4, *arguments, world.req_to_token)
    (plan,) = metadata.decode_wrappers
    assert plan.seq_lens.tolist() == [20, 33, backend.get_cuda_graph_seq_len_fill_value(), 1]
    np.testing.assert_array_equal(plan.page_table[:2], world.page_table[[3, 1]])
    np.testing.assert_array_equal(plan.page_table[2:], 0)


def test_replayed_verify_adds_the_drafted_tokens_to_real_rows_only():
    backend, world = make_backend(16, num_draft_tokens=5), make_world(16)
    arguments = (jnp.array([3, 1], jnp.int32), jnp.array([20, 0], jnp.int32), 20, ForwardMode.TARGET_VERIFY, None)
    metadata = backend.init_forward_metadata_replay_cuda_graph(3, *arguments, world.req_to_token)
    (plan,) = metadata.prefill_wrappers
    assert plan.seq_lens.tolist() == [25, 0, 0]
    assert plan.cu_q_lens.tolist() == [0, 5, 10, 15]


def whole_step(backend, mode):
    """Metadata, write and attention of two layers, the pool donated."""
    forward = backend.forward_decode if mode.is_decode_or_idle() else backend.forward_extend

    def run(pool, q, k, v, slots, requests, lens, req_to_token):
        metadata = backend.init_forward_metadata_replay_cuda_graph(4, requests, lens, None, mode, None, req_to_token)
        tokens = jnp.zeros(q.shape[0], jnp.int32)
        starts = jnp.zeros(5, jnp.int32)
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=tokens,
            positions=tokens,
            seq_lens=lens,
            cu_q_lens=starts,
            out_cache_loc=(slots,),
        )
        out, pool = forward(q, k, v, dataclasses.replace(LAYER, layer_id=0), batch, metadata, pool)
        return forward(q + out, k + out[:, :2], v + out[:, :2], WINDOWED, batch, metadata, pool)

    return jax.jit(run, donate_argnums=0)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_whole_step_does_not_copy_the_donated_pool(mode):
    backend = make_backend(4, sliding_window_size=WINDOW, num_draft_tokens=3)
    tokens = 12 if mode.is_target_verify() else 4
    pages = jax.ShapeDtypeStruct((2, 8192, 4, 2, 16), jnp.float32)
    pool = KVPool((KVGroup(k=pages, v=pages, name="x", page_layout="NHD"),))
    q, k = (jax.ShapeDtypeStruct((tokens, heads, 16), jnp.float32) for heads in (4, 2))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens,), (4,), (4,), (REQUESTS, CONTEXT))]
    memory = whole_step(backend, mode).lower(pool, q, k, k, *ints).compile().memory_analysis()
    pages_bytes = pages.size * pages.dtype.itemsize
    assert memory.alias_size_in_bytes == 2 * pages_bytes
    assert memory.temp_size_in_bytes < pages_bytes / 8


def test_whole_step_replays_random_batches_without_compiling():
    backend, world = make_backend(4, sliding_window_size=WINDOW), make_world(4)
    rng = np.random.default_rng(1)
    run, pool, k_pages = whole_step(backend, ForwardMode.DECODE), world.pool, None
    batches = []
    for seed in range(500):
        rows = int(rng.integers(1, 5))
        requests, lens = rng.permutation(REQUESTS)[:rows].astype(np.int32), rng.integers(1, 90, rows).astype(np.int32)
        slots = [world.slots(request, n - 1, n)[0] for request, n in zip(requests, lens, strict=True)]
        padding = (0, 4 - rows)
        arrays = (
            np.array([*slots, *[NOWHERE] * padding[1]], np.int32),
            np.pad(requests, padding),
            np.pad(lens, padding),
        )
        batches.append((*(random(3 * seed + i, 4, heads, 16) for i, heads in enumerate((4, 2, 2))),
                        *map(jnp.asarray, arrays), world.req_to_token))  # fmt: skip
    out, pool = run(jax.tree.map(jnp.copy, pool), *batches[0])
    with compilations() as compiled:
        for batch in batches[1:]:
            k_pages = pool.groups[0].k
            out, pool = run(pool, *batch)
    assert not compiled
    assert k_pages.is_deleted()
    q, _, _, _, requests, lens, _ = batches[-1]
    rows = int((np.asarray(lens) > 0).sum())
    lengths = {"q_lens": (1,) * rows, "kv_lens": lens[:rows].tolist(), "requests": requests[:rows].tolist()}
    batch = make_batch(world, ForwardMode.DECODE, requests[:rows].tolist(), (1,) * rows, lens[:rows].tolist())
    first = dataclasses.replace(LAYER, layer_id=0)
    pool = jax.tree.map(np.asarray, pool)
    middle = oracle(world, first, batch, q, pool, **lengths)
    exact = oracle(world, WINDOWED, batch, np.asarray(q) + middle, pool, **lengths)
    np.testing.assert_allclose(out[:rows], exact[:rows], **TOLERANCE)


@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (4, "HND")])
def test_buffers_are_read_and_written_by_slot(page_size, layout):
    world = make_world(page_size, layout)
    buffers = KVBuffers(world.pool, v_scale=jnp.float32(2.0))
    k, v = random(1, 3, 2, 16), random(2, 3, 2, 16)
    slots = jnp.array([9, NOWHERE, 2], jnp.int32)
    before = buffers.get_kv_buffer(1)
    after = jax.jit(KVBuffers.set_kv_buffer)(buffers, 1, slots, k, v).get_kv_buffer(1)
    for old, new, rows in zip(before, after, (k, v / 2), strict=True):
        chex.assert_shape(new, (world.pool.groups[0].num_slots, 2, 16))
        np.testing.assert_array_equal(new, old.at[jnp.array([9, 2])].set(rows[jnp.array([0, 2])]))


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "wanted"),
    [("float8_e4m3fn", 2, 2, True), ("float8_e5m2", 8, 8, True), ("bfloat16", 8, 2, True), ("float16", 6, 2, False),
     ("float16", 8, 2, True), ("float32", 8, 1, False), ("bfloat16", 2, 2, False)],
)  # fmt: skip
def test_tensor_cores_are_for_fp8_and_for_groups_of_four(dtype, heads, kv_heads, wanted):
    assert should_use_tensor_core(dtype, heads, kv_heads) is wanted
    backend = FlashInferAttnBackend(heads, kv_heads, 16, dtype, "bfloat16", 8, (1, 8), None, 1)
    assert backend.decode_use_tensor_cores is wanted


def test_backend_is_static_and_keeps_shapes_of_arrays():
    given = FlashInferAttnBackend(
        4, 2, 16, jnp.float32, jnp.float32, CONTEXT, np.zeros((REQUESTS, CONTEXT), np.int32), None, 8,
        kv_indptr_buf=jnp.zeros(6, jnp.int32), kv_last_page_len_buf=jax.ShapeDtypeStruct((7,), jnp.int32),
    )  # fmt: skip
    assert given.req_to_token == (REQUESTS, CONTEXT)
    assert given.max_bs == 5
    assert isinstance(given, AttentionBackend)
    assert hash(make_backend()) == hash(make_backend())
    assert given.init_cuda_graph_state(5, 9) == CudaGraphState(max_bs=5, max_num_tokens=9, max_pages=CONTEXT)


def capture(backend, bs=2, num_tokens=2, mode=ForwardMode.DECODE, width=CONTEXT, **options):
    ones = jnp.ones(bs, jnp.int32)
    table = jnp.zeros((REQUESTS, width), jnp.int32)
    return backend.init_forward_metadata_capture_cuda_graph(bs, num_tokens, ones, ones, mode, table, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_backend(0), "`page_size` must be at least 1. Got page_size=0"),
        (lambda: make_backend(num_heads=3), "must be a multiple of `num_kv_heads`"),
        (lambda: make_backend(req_to_token=(1, 8)), "at least max_context_len=128"),
        (lambda: make_backend(sliding_window_size=3, is_encoder_decoder=True), "`sliding_window_size` must be None"),
        (lambda: make_backend(sliding_window_size=3, kv_indptr_buf=(9,)), "must be None where there are two wrappers"),
        (lambda: make_backend().init_cuda_graph_state(9, 9), r"`max_bs` must be in 1 .. 8 .* Got max_bs=9"),
        (lambda: make_backend().init_cuda_graph_state(2, 1), "Got max_bs=2, max_num_tokens=1"),
        (lambda: make_backend().init_cuda_graph_state(2, 2, jnp.zeros(9)), "`kv_indices_buf` must have .* = 256"),
        (lambda: capture(make_backend(), num_tokens=3), "`num_tokens` must be 1 for each of bs=2 rows"),
        (lambda: capture(make_backend(), 9, 9), r"`bs` must be in 1 .. 8. Got bs=9"),
        (lambda: capture(make_backend(), mode=ForwardMode.EXTEND), "must be DECODE, IDLE or TARGET_VERIFY"),
        (lambda: capture(make_backend(), mode=ForwardMode.TARGET_VERIFY), "`num_draft_tokens` must be given"),
        (lambda: capture(make_backend(), width=9), r"Got req_to_token.shape=\(4, 9\)"),
        (lambda: capture(make_backend(is_encoder_decoder=True)), "`encoder_lens` must be given"),
        (lambda: capture(make_backend(skip_prefill=True, num_draft_tokens=1), mode=ForwardMode.TARGET_VERIFY),
         "`skip_prefill` backends do decode only"),
    ],
)  # fmt: skip
def test_backend_refuses_what_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("layer", "given", "message"),
    [
        (dataclasses.replace(LAYER, sliding_window_size=3), "kv", "must have the backend's window of 9 or none"),
        (CROSS, "kv", "may have cross attention only with `is_encoder_decoder`"),
        (LAYER, "k", "`k` and `v` must be given together or both be None"),
        (LAYER, "", "`k` and `v` must be given with `use_ragged`"),
    ],
)
def test_layers_and_keys_that_contradict_the_metadata_are_refused(layer, given, message):
    backend, world = make_backend(sliding_window_size=WINDOW), make_world(1)
    batch = make_batch(world, ForwardMode.EXTEND, (1,), (3,), (5,), encoder_out_cache_loc=jnp.zeros(24, jnp.int32))
    q, k, v = q_k_v(batch)
    k, v = (x if name in given else None for name, x in (("k", k), ("v", v)))
    with pytest.raises(ValueError, match=message):
        backend.forward_extend(q, k, v, layer, batch, backend.init_forward_metadata(batch), world.pool)


def test_backend_says_what_a_batch_lacks():
    world = make_world(1)
    batch = make_batch(world, ForwardMode.DECODE, (1,), (1,), (5,))
    with pytest.raises(ValueError, match="`forward_batch` must have page tables, or requests and their token slots"):
        make_backend().init_forward_metadata(dataclasses.replace(batch, req_to_token_pool=None))
    encoders = make_backend(is_encoder_decoder=True)
    with pytest.raises(ValueError, match="`encoder_lens` must be given"):
        encoders.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="`encoder_page_table` and `encoder_lens` must be given beside `page_tables`"):
        encoders.init_forward_metadata(dataclasses.replace(batch, page_tables=(world.req_to_token,)))
