"""The record's key follows what is lowered, and not names, comments or the order of independent work."""

import dataclasses
import importlib.metadata

import pytest

from bench.record_key import RecordKey, current_key, difference, sources_sha


@pytest.fixture
def root(tmp_path):
    for name in ("attention.py", "mosaic/sm90/common/tiles.py", "reference/masks.py"):
        file = tmp_path / "kernels" / "jattn_kernels" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def key_of(root, **cases):
    version = importlib.metadata.version("jax")
    return RecordKey(kernels_sha="abc", sources_sha=sources_sha(root), jax=version, cases=cases)


def edit(root, name):
    (root / "kernels" / "jattn_kernels" / name).write_text("changed")


def never(root):
    raise AssertionError("nothing is lowered where no file has changed")


@pytest.mark.parametrize("name", ["attention.py", "mosaic/sm90/common/tiles.py", "new.py"])
def test_sources_follow_every_file_that_may_be_lowered(root, name):
    before = sources_sha(root)
    edit(root, name)
    assert sources_sha(root) != before


def test_sources_leave_out_the_oracle(root):
    before = sources_sha(root)
    edit(root, "reference/masks.py")
    assert sources_sha(root) == before


def test_difference_lowers_only_where_a_file_has_changed(root):
    key = key_of(root, decode="1", extend="2")
    assert difference(key, root, never) is None
    edit(root, "attention.py")
    assert difference(key, root, lambda _: {"decode": "1", "extend": "2", "new": "3"}) is None
    changed = difference(key, root, lambda _: {"decode": "1", "extend": "3"})
    assert changed is not None
    assert "1 of 2 cases" in changed
    assert changed.endswith("such as extend.")


def test_a_case_that_is_gone_is_a_difference(root):
    key = key_of(root, decode="1")
    edit(root, "attention.py")
    assert difference(key, root, lambda _: {}) is not None


def test_rows_of_an_edit_that_lowers_alike_keep_their_key(root, tmp_path):
    key_of(root, decode="1").write(tmp_path)
    edit(root, "attention.py")
    same = current_key(tmp_path, root, lambda _: {"decode": "1"})
    assert (same.kernels_sha, same.sources_sha) == ("abc", sources_sha(root))
    assert current_key(tmp_path, root, lambda _: {"decode": "2"}).kernels_sha != "abc"


def test_new_cases_join_a_record_whose_own_ones_lower_alike(root, tmp_path):
    key_of(root, decode="1").write(tmp_path)
    edit(root, "attention.py")
    joined = current_key(tmp_path, root, lambda _: {"decode": "1", "mixture": "1"})
    assert (joined.kernels_sha, joined.cases) == ("abc", {"decode": "1", "mixture": "1"})
    assert current_key(tmp_path, root, lambda _: {"decode": "2", "mixture": "1"}).kernels_sha != "abc"


PARTS = {"decode", "moe_layer", "decode_step_moe", "decode_step_latent", "decode_step_quantized", "latent"}


@pytest.mark.parametrize(
    ("case", "voided"),
    [
        ("routed_experts/few", {"moe_layer", "decode_step_moe", "decode_step_latent"}),
        ("mixture_of_experts/mxfp4_1", set()),
        ("matmul/few", {"decode_step_moe", "decode_step_latent", "decode_step_quantized"}),
        ("matmul_splits/few", {"decode_step_moe", "decode_step_latent", "decode_step_quantized"}),
        ("matmul/int4_1", {"decode_step_quantized"}),
        ("mosaic/mla_decode_heads_16", {"latent", "decode_step_latent"}),
        ("projected_decode/1_bfloat16", {"decode_step_moe", "decode_step_quantized"}),
        ("mla_write/bfloat16", {"latent", "decode_step_latent"}),
        ("decode", PARTS),
    ],
)
def test_other_code_voids_the_parts_that_run_it_and_no_others(root, tmp_path, case, voided):
    key_of(root, **{"extend": "1", case: "1"}).write(tmp_path)
    edit(root, "attention.py")
    lowered = {"extend": "1", case: "2", "joined": "1"}
    changed = current_key(tmp_path, root, lambda _: lowered)
    assert {part for part in PARTS if changed.sha_of(part) != "abc"} == voided
    assert changed.cases == lowered
    changed.write(tmp_path)
    edit(root, "norm.py")
    again = current_key(tmp_path, root, lambda _: lowered)
    assert again == dataclasses.replace(changed, sources_sha=sources_sha(root))


def test_another_jax_makes_another_key(root, tmp_path):
    dataclasses.replace(key_of(root, decode="1"), jax="0").write(tmp_path)
    assert current_key(tmp_path, root, lambda _: {"decode": "1"}).kernels_sha != "abc"
