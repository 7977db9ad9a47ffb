"""The kernels by which GPUs of a host exchange numbers, in Triton's interpreter: a process in each GPU's place."""

import jax.numpy as jnp
import pytest

from jattn_kernels import peers
from jattn_kernels.inbox import Inbox
from jattn_kernels.triton.peers import add_norm, all_reduce
from tests.kernels.harness.peer_processes import run_on_all
from tests.often import slow


@pytest.mark.parametrize("devices", [2, slow(4), slow(8)])
def test_peers_get_sums_norms_and_gathers_of_all_devices_bit_for_bit(devices, tmp_path):
    run_on_all(devices, tmp_path, calls=6 if devices == 2 else 12)


@pytest.mark.parametrize(
    ("devices", "num_bytes", "in_one"),
    [(2, 2**24, True), (4, 2**20, True), (4, 2**22, False), (8, 2**18, True), (8, 2**20, False)],
)
def test_many_devices_add_up_many_rows_in_two_shots_before_their_norm(devices, num_bytes, in_one, monkeypatch):
    called = []
    monkeypatch.setattr(add_norm, "add_norm", lambda *args: called.append("in one") or (args[1].x, args[1].x))
    monkeypatch.setattr(all_reduce, "all_reduce", lambda x, *_: called.append("apart") or x)
    inbox, columns = Inbox.of(devices), 4096
    x = jnp.zeros((num_bytes // 2 // columns, columns), jnp.bfloat16)
    table = jnp.zeros(2 * devices + 2, jnp.uint32)
    peers.all_reduce_add_norm(x, x, jnp.ones(columns, jnp.bfloat16), table, inbox=inbox, eps=1e-5)
    assert called == ["in one" if in_one else "apart"]
