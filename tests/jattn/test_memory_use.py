"""What an engine says of the device's memory adds up."""

import types

import jax
import pytest

from jattn.serving.executor import memory
from tests.jattn.harness.tiny import tiny_engine


def test_parts_and_rest_make_up_the_limit(monkeypatch):
    executor = tiny_engine().executor
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 3 * 2**30})
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])
    use = executor.memory_use()
    assert use.pool == sum(leaf.nbytes for leaf in jax.tree.leaves(executor.pool)) > 0
    assert use.temporaries == executor.compiled_steps.temporary_bytes > 0
    assert use.weights + use.pool + use.state + use.temporaries + use.rest == 3 * 2**30
    assert str(use).endswith(" = 3.00 GiB")
    assert use.pool_tokens == (16 * 4,)


@pytest.mark.parametrize(("limit", "told"), [(None, " = 10.0 MiB"), (20 * 2**20, "rest 10.0 MiB = 20.0 MiB")])
def test_sum_is_told_in_words(limit, told):
    mib = 2**20
    use = memory.MemoryUse(weights=mib, pool=2 * mib, state=3 * mib, temporaries=4 * mib, limit=limit)
    assert str(use).startswith("weights 1.0 MiB + pool 2.0 MiB + loop state 3.0 MiB + temporaries of steps 4.0 MiB")
    assert str(use).endswith(told)


def test_tokens_are_told_of_each_page_list():
    use = memory.MemoryUse(weights=0, pool=2**20, state=0, temporaries=0, limit=None, pool_tokens=(12_000, 1_500))
    assert " + pool 1.0 MiB (12,000 tokens, 1,500 in a window) + loop state " in str(use)
