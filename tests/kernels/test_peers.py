"""The kernels by which GPUs of a host exchange numbers, in Triton's interpreter: a process in each GPU's place."""

import pytest

from tests.kernels.harness.peer_processes import run_on_all


@pytest.mark.parametrize(
    "devices", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_peers_get_sums_norms_and_gathers_of_all_devices_bit_for_bit(devices, tmp_path):
    run_on_all(devices, tmp_path)
