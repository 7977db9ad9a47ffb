"""The Triton kernel that makes and writes packed latent rows, by its interpreter."""

# isort: off
from tests.kernels.harness.triton_interpreter import interpreted
# isort: on

import dataclasses

import jax.numpy as jnp
import pytest

from jattn_kernels import mla_write
from tests.kernels.harness.latent_rows import LAYER, PACKED, arguments, assert_packs, packed_arguments
from tests.kernels.harness.splits import splits_of
from tests.often import often_together


@pytest.mark.parametrize(("compressed", "dtype"), often_together(PACKED, [(132, "float32")]))
def test_triton_packs_rows(compressed, dtype):
    with interpreted():
        assert_packs(packed_arguments(compressed, dtype=dtype), "triton")


def test_triton_packs_what_splits_add_up_to():
    given = packed_arguments()
    with interpreted():
        assert_packs(given, "triton", rows=splits_of(given[0].rows, 4))


def test_triton_packs_rows_behind_other_numbers():
    latents, *rest = packed_arguments()
    others = jnp.full((len(latents.cos), 12), jnp.nan, latents.dtype)
    behind = dataclasses.replace(latents, rows=jnp.concatenate([others, latents.rows], axis=1), begin=12)
    with interpreted():
        assert_packs((behind, *rest), "triton")


def test_triton_refuses_other_latents_than_packed_ones():
    latents, pages, slots = arguments()
    with (
        interpreted(),
        pytest.raises(NotImplementedError, match="`triton` writes packed latents alone, not those"),
    ):
        mla_write(latents, pages, slots, layer_index=LAYER, implementation="triton")
    latents, pages, slots = packed_arguments(130)
    with interpreted(), pytest.raises(NotImplementedError, match="some rows of a multiple of 4 numbers up to"):
        mla_write(latents, pages, slots, layer_index=LAYER, implementation="triton")
