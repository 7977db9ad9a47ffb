"""What Triton's attention kernel is compiled for."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jattn_kernels import AttentionSpec, paged_decode, paged_extend
from jattn_kernels.call import AttentionCall, Device
from jattn_kernels.triton import launch
from jattn_kernels.triton.attention.tile_sizes import choose_tiles
from tests.often import slow

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)


def configs(face, dtype="bfloat16", kv_dtype=None, spec=SPEC, capability=None):
    """Those of the kernels that a call launches; nothing is run."""
    found = []

    def record(kernel, operands, written, *, grid, config):
        found.append(config)

    tokens = (3, 1) if face is paged_decode else (40,)
    pages = jnp.zeros((9, 16, 2, 64), kv_dtype or dtype)
    places = [jnp.zeros((3, 2), jnp.int32), jnp.ones(3, jnp.int32)]
    offsets = [] if face is paged_decode else [jnp.arange(4, dtype=jnp.int32)]
    with launch.interpreted(record):
        jax.block_until_ready(
            face(
                jnp.zeros((*tokens, 8, 64), dtype), pages, pages, *places, *offsets, spec=spec, implementation="triton"
            )
        )
    return found


@pytest.mark.parametrize(
    ("dtype", "precision", "face"),
    [
        slow("float32", "ieee", paged_decode),
        ("float32", "ieee", paged_extend),
        ("bfloat16", "tf32", paged_decode),
        slow("bfloat16", "tf32", paged_extend),
    ],
)
def test_products_of_float32_are_not_rounded_to_tf32(face, dtype, precision):
    assert configs(face, dtype)[0].precision == precision


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_8_bit_keys_are_multiplied_in_float16_by_queries_of_16_bits(dtype):
    config = configs(paged_decode, dtype, "float8_e4m3fn")[0]
    assert config.compute_dtype == ("float32" if dtype == "float32" else "float16")
    assert config.v_pairs


@pytest.mark.parametrize(
    ("change", "late"), [({}, True), ({"logits_soft_cap": 30.0}, False), ({"sm_scale": -1.0}, False)], ids=str
)
def test_logits_are_scaled_after_their_maximum_where_that_keeps_their_order(change, late):
    config = configs(paged_decode, spec=dataclasses.replace(SPEC, **change))[0]
    assert (config.late_scale != 1.0) == late


def test_8_bit_keys_are_converted_by_instructions_from_ada_on(monkeypatch):
    assert not configs(paged_decode, kv_dtype="float8_e4m3fn")[0].native_fp8
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (8, 9)))
    assert configs(paged_decode, kv_dtype="float8_e4m3fn")[0].native_fp8


def test_pages_are_read_whole_where_their_rows_are_those_of_one_array():
    config = configs(paged_decode)[0]
    assert config.has_whole_pages
    assert not dataclasses.replace(config, page_size=1).has_whole_pages
    assert not dataclasses.replace(config, block_n=config.page_size // 2).has_whole_pages
    assert not configs(paged_decode, kv_dtype="float8_e4m3fn")[0].has_whole_pages
    by_head = dataclasses.replace(config.k, token=config.k.head, head=config.k.page // 2)
    assert not dataclasses.replace(config, k=by_head, v=by_head).has_whole_pages


def tiles_of_latents(heads, num_seqs, *, kv_dtype="bfloat16", capability=(9, 0), latent=512, **spec):
    facts = AttentionSpec(num_q_heads=heads, num_kv_heads=1, head_dim=latent + 64, v_head_dim=latent, **spec)
    device = Device("gpu", capability, 132)
    sizes = {"page_size": 16, "num_tokens": 1, "num_seqs": num_seqs, "device": device}
    return choose_tiles(
        AttentionCall(operation="mla_decode", spec=facts, q_dtype="bfloat16", kv_dtype=kv_dtype, **sizes)
    )


@pytest.mark.parametrize(("heads", "programs_of_an_sm"), [(8, 2), (16, 2), (32, 1), (64, 1)])
def test_many_sequences_of_latents_have_long_tiles_and_a_loop_of_whole_ones(heads, programs_of_an_sm):
    sizes = tiles_of_latents(heads, 64)
    assert (sizes.block_n, sizes.whole_tiles, sizes.asks_early) == (64, True, True)
    assert sizes.workers == 132 * programs_of_an_sm
    assert not tiles_of_latents(heads, 8).whole_tiles


def test_tiles_of_latents_that_are_batch_invariant_are_those_of_any_batch():
    one, many = (tiles_of_latents(16, num_seqs, batch_invariant=True) for num_seqs in (1, 64))
    assert one == many


@pytest.mark.parametrize(("latent", "early"), [(128, True), (64, False)])
def test_latents_of_one_warpgroup_are_not_asked_for_early(latent, early):
    """Triton 3.6 does not compile that."""
    assert tiles_of_latents(64, 64, latent=latent).asks_early == early
    assert tiles_of_latents(16, 64, latent=latent).asks_early


@pytest.mark.parametrize("change", [{"kv_dtype": "float8_e4m3fn"}, {"capability": (8, 0)}, {"capability": (12, 0)}])
def test_latents_are_asked_for_early_only_where_that_was_measured(change):
    assert not tiles_of_latents(16, 64, **change).asks_early
