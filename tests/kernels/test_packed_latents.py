"""Latent rows in bytes: the oracle reads what was written, in range of its tile's scale, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import RawLatents, mla_decode, mla_write, read_latent_pages, write_latent_pages
from jattn_kernels.packed_latents import pack_latents, packed_width, unpack_latents, unpacked_width
from jattn_kernels.reference.packed_rows import unpacked
from jattn_kernels.spec import AttentionSpec

ROTATED = 8
SLOTS = np.array([9, -1, 3, 20], np.int32)  # of 20 places


def rows(compressed, num_tokens=4, size=1.0):
    rng = np.random.default_rng(0)
    sizes = size * 10.0 ** rng.integers(-3, 4, (num_tokens, 1))  # of each row, so that scales differ
    widths = (compressed, ROTATED)
    return [jnp.asarray(sizes * rng.standard_normal((num_tokens, width)), jnp.float32) for width in widths]


@pytest.mark.parametrize("compressed", [16, 128, 130, 512])
def test_packed_rows_are_read_as_the_oracle_reads_them(compressed):
    c_kv, k_pe = rows(compressed)
    in_bytes = pack_latents(c_kv, k_pe)
    assert in_bytes.shape == (4, packed_width(compressed, ROTATED))
    assert unpacked_width(in_bytes.shape[1], compressed) == compressed + ROTATED
    exact = unpacked(np.asarray(in_bytes), compressed)
    np.testing.assert_array_equal(unpack_latents(in_bytes, compressed), exact)
    for begin in range(0, compressed, 128):
        tile = np.asarray(c_kv[:, begin : begin + 128], np.float64)
        # A 16th of a number at most, or half of the least that fp8 has below the largest number of the tile.
        largest = np.abs(tile).max(axis=1, keepdims=True)
        error = np.abs(exact[:, begin : min(begin + 128, compressed)] - tile)
        assert (error <= np.maximum(np.abs(tile) / 16, 2 * largest / 448 * 2**-10)).all()
    np.testing.assert_array_equal(exact[:, compressed:], np.asarray(k_pe.astype(jnp.bfloat16), np.float64))


def test_numbers_are_those_of_bfloat16_as_scales_are_powers_of_two():
    in_bytes = pack_latents(*rows(256))
    read = unpack_latents(in_bytes, 256)
    np.testing.assert_array_equal(read, read.astype(jnp.bfloat16).astype(jnp.float32))
    scales = np.asarray(in_bytes[:, 256:264]).view(np.float32)
    np.testing.assert_array_equal(np.frexp(scales)[0], 0.5)
    assert len(np.unique(scales)) > 2


@pytest.mark.parametrize("largest", [448.0, 448.0 * 2**-9, 3.0, 3.4e38, np.inf])
def test_largest_number_of_a_tile_is_kept_in_range(largest):
    c_kv = jnp.zeros((1, 128)).at[0, 5].set(largest)
    read = np.asarray(unpack_latents(pack_latents(c_kv, jnp.zeros((1, 2))), 128))
    assert np.isfinite(read).all()
    assert read[0, 5] == pytest.approx(min(largest, 448 * 2.0**119), rel=1 / 16)
    assert np.count_nonzero(read) == 1


def test_row_of_zeros_is_one_again():
    assert not np.asarray(unpack_latents(pack_latents(jnp.zeros((2, 128)), jnp.zeros((2, 2))), 128)).any()


@pytest.mark.parametrize("layer_index", [None, 2])
def test_pages_hold_rows_in_range_and_nothing_else(layer_index):
    shape = (*(() if layer_index is None else (3,)), 5, 4, packed_width(16, ROTATED))
    pages = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    c_kv, k_pe = rows(16)
    index = None if layer_index is None else jnp.int32(layer_index)
    written = write_latent_pages(jnp.asarray(pages), c_kv, k_pe, jnp.asarray(SLOTS), layer_index=index)
    view = pages if layer_index is None else pages[layer_index]
    for slot, row in zip(SLOTS, np.asarray(pack_latents(c_kv, k_pe)), strict=True):
        if 0 <= slot < 20:
            view[slot // 4, slot % 4] = row
    np.testing.assert_array_equal(written, pages)
    read = read_latent_pages(written, jnp.asarray(SLOTS), layer_index=index, value_dim=16)
    expected = unpacked(np.asarray(pack_latents(c_kv, k_pe)), 16)
    expected[[1, 3]] = 0
    np.testing.assert_array_equal(read, expected)


def test_raw_rows_are_normed_turned_and_packed():
    c_kv, k_pe = rows(16)
    angles = np.random.default_rng(2).uniform(0, 6, (4, ROTATED // 2)).astype(np.float32)
    turns = {"cos": jnp.cos(angles), "sin": jnp.sin(angles)}
    latents = RawLatents(rows=jnp.concatenate([c_kv, k_pe], axis=1), scale=jnp.ones(16), eps=1e-6, **turns)
    made, pages = mla_write(latents, jnp.zeros((5, 4, packed_width(16, ROTATED)), jnp.uint8), jnp.asarray(SLOTS))
    np.testing.assert_array_equal(made, latents.made())
    np.testing.assert_array_equal(pages[2, 1], pack_latents(made[:1, :16], made[:1, 16:])[0])


def test_write_is_in_place():
    def write(pages, c_kv, k_pe, slots):
        return write_latent_pages(pages, c_kv, k_pe, slots, layer_index=1)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 16), (2, ROTATED))]
    pages = jax.ShapeDtypeStruct((3, 4096, 16, packed_width(16, ROTATED)), jnp.uint8)
    lowered = jax.jit(write, donate_argnums=0).lower(pages, *shapes, jax.ShapeDtypeStruct((2,), jnp.int32))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == pages.size
    assert memory.temp_size_in_bytes < 10_000


SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=16 + ROTATED, v_head_dim=16, sm_scale=0.3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"latent_pages": jnp.zeros((5, 4, 24), jnp.uint8)}, "`latent_pages` must have rows of 36 bytes"),
        ({"kv_scale": jnp.ones(())}, "`kv_scale` must be None over packed rows, whose tiles have scales of their own"),
        ({"q_nope": jnp.zeros((1, 1, 4, 16), jnp.float8_e4m3fn), "q_pe": jnp.zeros((1, 1, 4, 8), jnp.float8_e4m3fn)},
         "`q_nope` must be one of float32, bfloat16, float16 over packed rows"),
    ],
)  # fmt: skip
def test_call_over_packed_rows_says_what_is_wrong(change, sentence):
    given = {
        "q_nope": jnp.zeros((1, 1, 4, 16)),
        "q_pe": jnp.zeros((1, 1, 4, ROTATED)),
        "latent_pages": jnp.zeros((5, 4, 36), jnp.uint8),
        "page_table": jnp.zeros((1, 2), jnp.int32),
        "seq_lens": jnp.ones(1, jnp.int32),
    }
    with pytest.raises(ValueError, match=sentence):
        mla_decode(**(given | change), spec=SPEC)


def test_reads_and_writes_of_packed_rows_say_what_is_wrong():
    pages, slots = jnp.zeros((5, 4, 36), jnp.uint8), jnp.asarray(SLOTS)
    with pytest.raises(
        ValueError, match=r"`value_dim` must be how many numbers of packed rows are compressed. Got value"
    ):
        read_latent_pages(pages, slots)
    with pytest.raises(ValueError, match="with bytes of rows of C and R numbers = 36 as the pages are wide"):
        write_latent_pages(pages, *rows(17), slots)
