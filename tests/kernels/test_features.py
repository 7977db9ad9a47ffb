"""The table of features against dispatch."""

import dataclasses
import re

import pytest

from jattn_kernels import features
from jattn_kernels.call import Device
from jattn_kernels.dispatch import choose, implementations
from jattn_kernels.features import DEVICES, FEATURES, feature_markdown, feature_table


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_feature_table_says_what_dispatch_does(device):
    rows = feature_table(device)
    assert [row.feature for row in rows] == list(FEATURES)
    for row in rows:
        assert list(row.refusals) == [entry.name for entry in implementations()]
        for name, refusal in row.refusals.items():
            calls = [dataclasses.replace(call, device=device) for call in FEATURES[row.feature]]
            entry = next(entry for entry in implementations() if entry.name == name)
            if refusal is None:
                assert all(choose(call, name).implementation.name == name for call in calls)
            else:
                refused = next(call for call in calls if entry.refuses(call))
                with pytest.raises(NotImplementedError, match=f"^{re.escape(refusal)}"):
                    choose(refused, name)


def test_mosaic_serves_something_on_hopper_and_nothing_elsewhere():
    assert any(row.refusals["mosaic"] is None for row in feature_table(DEVICES["Hopper"]))
    assert all("this is cpu" in row.refusals["mosaic"] for row in feature_table(Device("cpu")))


def test_xla_serves_all_but_batch_invariance():
    refused = [row.feature for row in feature_table(DEVICES["CPU"]) if row.refusals["xla"] is not None]
    assert refused == ["batch-invariant results"]


def test_markdown_names_the_devices_on_which_each_implementation_serves(monkeypatch):
    kept = {name: FEATURES[name] for name in ("decode", "float32", "batch-invariant results")}
    monkeypatch.setattr(features, "FEATURES", kept)
    assert feature_markdown().splitlines() == [
        "| feature | mosaic | triton | xla |",
        "| :-- | :-- | :-- | :-- |",
        "| decode | Hopper | Hopper, other NVIDIA | Hopper, other NVIDIA, CPU |",
        "| float32 | no | Hopper, other NVIDIA | Hopper, other NVIDIA, CPU |",
        "| batch-invariant results | Hopper | Hopper, other NVIDIA | no |",
    ]
