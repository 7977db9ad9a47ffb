"""The range of keys that a tile reads: exactly from the first to the last that a row sees."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.xla.tiles import extend_tiles
from jattn_kernels.xla.visibility import key_range, tile_keys, visible

Q_LENS, KV_LENS, KV_START = (20, 0, 3, 9), (50, 7, 40, 4), (0, 3, 21, 8)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"causal": False},
        {"window_left": 0},
        {"window_left": 9},
        {"causal": False, "window_left": 4, "window_right": 3},
        {"chunk_size": 7},
        {"chunk_size": 7, "window_left": 3},
        {"causal": False, "chunk_size": 16},
        {"causal": False, "window_right": 2**31 - 1},
        {"causal": False, "window_right": 2**31 - 9},
        {"causal": False, "window_left": 2**31 - 1, "window_right": 2},
        {"window_left": 2**31 - 1},
        {"chunk_size": 2**31 - 1},
        {"causal": False, "chunk_size": 2**31 - 1},
    ],
    ids=str,
)
def test_key_range_is_what_the_rows_of_a_tile_see(rules):
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, **rules)
    q_lens, kv_lens, kv_start = (jnp.array(x, jnp.int32) for x in (Q_LENS, KV_LENS, KV_START))
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    q = jnp.zeros((sum(Q_LENS) + 3, 1, 1))
    tiles, _ = extend_tiles(q, cu_q_lens, kv_start + kv_lens - q_lens, None)
    keys = tile_keys(tiles, q_lens, kv_lens, kv_start, None)
    first, end = key_range(tiles, keys, spec)
    key = jnp.broadcast_to(jnp.arange(max(KV_LENS), dtype=jnp.int32)[None], (len(first), max(KV_LENS)))
    seen = np.asarray(visible(tiles, keys, key, spec)).any(axis=1)
    assert seen.any(axis=1).sum() >= 6
    for tile, row in enumerate(seen):
        if row.any():
            assert (first[tile], end[tile]) == (row.argmax(), len(row) - row[::-1].argmax())
        else:
            assert end[tile] <= first[tile]
