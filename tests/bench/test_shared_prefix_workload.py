"""A shared prefix is read once, and gives what plain decode over the same keys gives."""

import jax
import jax.numpy as jnp
import numpy as np

from bench import attention, shared_prefix
from bench.attention import measured
from bench.shared_prefix import SharedPrefixWorkload
from bench.workloads import AttentionWorkload

SHAPE = {"batch": 3, "ctx": 40, "hq": 4, "hkv": 2, "d": 16, "page": 8}
PLAIN, SHARED = AttentionWorkload(**SHAPE), SharedPrefixWorkload(**SHAPE, prefix=24)


def test_gives_what_decode_over_the_same_keys_gives():
    arrays = SHARED.arrays(2, "xla")
    assert arrays.page_table.shape == (4, 3)
    assert arrays.k_pages.shape[:2] == (2, 1 + 3 + 3 * 2)
    prefix, own = arrays.page_table[0], arrays.page_table[1:, :2]
    whole = arrays._replace(
        page_table=jnp.concatenate([jnp.broadcast_to(prefix, (3, 3)), own], axis=1),
        schedule=PLAIN.arrays(1, "xla").schedule,
    )
    shared = SHARED.call(arrays, jnp.int32(1), "xla")
    plain = PLAIN.call(whole, jnp.int32(1), "xla")
    np.testing.assert_allclose(shared.astype(jnp.float32), plain.astype(jnp.float32), atol=0.1, rtol=0.02)


def test_the_prefix_is_counted_once():
    assert SHARED.kv_bytes == PLAIN.kv_bytes // 120 * (24 + 3 * 16)
    assert SHARED.fields().items() >= {"shared_prefix": 24, "batch": 3, "ctx": 40}.items()
    assert SHARED.name == f"{PLAIN.name}_prefix24"


def test_its_row_is_timed(monkeypatch):
    monkeypatch.setattr(attention, "num_calls", lambda workload: 2)
    row = measured(SHARED, "xla", repeats=1, seconds=0.001).row
    assert row["shared_prefix"] == 24


def test_both_passes_get_their_work_lists(monkeypatch):
    given = []

    def decode(q, *args, schedule, **kwargs):
        given.append(schedule)
        return q

    monkeypatch.setattr(shared_prefix, "shared_prefix_decode", decode)
    arrays = SHARED.arrays(1, "xla")._replace(schedule=("of the prefix", "of the rest"))
    SHARED.call(arrays, jnp.int32(0), "xla")
    assert given == [("of the prefix", "of the rest")]
    assert len(jax.eval_shape(lambda: SHARED.arrays(1, "xla")).schedule) == 2
