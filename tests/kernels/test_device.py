"""What kernels are laid out by comes from the device that they run on."""

from types import SimpleNamespace

import jax
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.schedule import choose_extend_tiles

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=78), 78),
        (SimpleNamespace(platform="gpu", compute_capability="9.0"), 132),
        (SimpleNamespace(platform="cpu"), 132),
    ],
)
def test_extend_has_as_many_blocks_as_the_device_has_sms(monkeypatch, device, expected):
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert choose_extend_tiles(SPEC, ExtendDtypes.widest(2, SPEC)).blocks == expected
