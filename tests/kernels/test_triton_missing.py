"""What Triton's kernels need of a machine's packages, and the sentence where they are missing or too old."""

import importlib.metadata

import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.call import AttentionCall, Device
from jattn_kernels.dispatch import choose
from jattn_kernels.triton import implementation
from jattn_kernels.triton.implementation import missing

CALL = AttentionCall(
    operation="paged_decode",
    spec=AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128),
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=16,
    device=Device("gpu", (8, 0)),
)
ADVICE = ": install `jax-triton>=0.4.1`, as the extras `cuda12` and `cuda13` do."


@pytest.fixture
def install(monkeypatch):
    """Makes a machine that has these versions of packages and no others."""

    def having(versions):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        missing.cache_clear()

    yield having
    missing.cache_clear()


@pytest.mark.parametrize(
    "versions",
    [
        {"triton": "3.9.0", "jax-triton": "0.4.1"},
        {"triton": "3.6", "jax-triton": "0.5"},
        {"triton": "3.6.0+git1234", "jax-triton": "0.4.10"},
        {"triton": "3.10.0", "jax-triton": "1.0.0"},
        {"triton": "4", "jax-triton": "1"},
    ],
    ids=str,
)
def test_missing_says_nothing_where_all_is_there(install, versions):
    install(versions)
    assert missing() is None


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({}, "`triton` needs triton, which is not installed"),
        ({"triton": "3.9.0"}, "`triton` needs jax-triton, which is not installed"),
        ({"jax-triton": "0.4.1"}, "`triton` needs triton, which is not installed"),
        ({"triton": "3.5.1", "jax-triton": "0.4.1"}, "`triton` needs triton 3.6 or newer, not 3.5.1"),
        ({"triton": "3", "jax-triton": "0.4.1"}, "`triton` needs triton 3.6 or newer, not 3"),
        ({"triton": "3.9.0", "jax-triton": "0.4.0"}, "`triton` needs jax-triton 0.4.1 or newer, not 0.4.0"),
        ({"triton": "3.9.0", "jax-triton": "0.3.10"}, "`triton` needs jax-triton 0.4.1 or newer, not 0.3.10"),
    ],
    ids=str,
)
def test_missing_says_what_to_install(install, versions, sentence):
    install(versions)
    assert missing() == sentence + ADVICE


def test_a_gpu_without_triton_is_told_what_to_install(install, monkeypatch):
    install({})
    monkeypatch.setattr(implementation, "default_device", lambda: Device("gpu", (9, 0)))
    with pytest.raises(NotImplementedError, match=r"^`triton` needs triton, which is not installed"):
        choose(CALL, "triton")


def test_a_machine_without_a_gpu_is_not_asked_for_its_packages(install):
    install({})
    assert choose(CALL, "triton").implementation.name == "triton"
