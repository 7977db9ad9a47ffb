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


def test_other_experts_void_the_parts_that_run_them_and_no_others(root, tmp_path):
    recorded = key_of(root, decode="1", **{"routed_experts/few": "1"})
    recorded.write(tmp_path)
    edit(root, "attention.py")
    changed = current_key(tmp_path, root, lambda _: {"decode": "1", "routed_experts/few": "2"})
    assert changed.sha_of("decode") == recorded.sha_of("decode") == recorded.sha_of("moe_layer")
    assert changed.sha_of("moe_layer") == changed.sha_of("decode_step_moe") != recorded.sha_of("moe_layer")
    both = current_key(tmp_path, root, lambda _: {"decode": "2", "routed_experts/few": "2"})
    assert both.sha_of("decode") == both.sha_of("moe_layer") != "abc"


def test_other_products_void_the_steps_that_run_them_and_no_others(root, tmp_path):
    recorded = key_of(root, decode="1", **{"matmul/few": "1"})
    recorded.write(tmp_path)
    edit(root, "attention.py")
    changed = current_key(tmp_path, root, lambda _: {"decode": "1", "matmul/few": "2"})
    assert changed.sha_of("decode") == changed.sha_of("moe_layer") == "abc"
    assert changed.sha_of("decode_step_moe") == changed.sha_of("decode_step_quantized") != "abc"
    changed.write(tmp_path)
    edit(root, "norm.py")
    again = current_key(tmp_path, root, lambda _: {"decode": "1", "matmul/few": "2"})
    assert again.products_sha == changed.products_sha


def test_other_kernels_of_latents_void_their_part_and_no_other(root, tmp_path):
    recorded = key_of(root, decode="1", **{"mosaic/mla_decode_heads_16": "1"})
    recorded.write(tmp_path)
    edit(root, "attention.py")
    lowered = {"decode": "1", "mosaic/mla_decode_heads_16": "2", "mosaic/mla_extend_heads_16": "1"}
    again = current_key(tmp_path, root, lambda _: lowered)
    assert (again.kernels_sha, again.cases, again.sha_of("moe_layer")) == ("abc", lowered, "abc")
    assert again.sha_of("decode_step_moe") == recorded.sha_of("latent") == "abc"
    assert again.sha_of("latent") != "abc"


def test_another_jax_makes_another_key(root, tmp_path):
    dataclasses.replace(key_of(root, decode="1"), jax="0").write(tmp_path)
    assert current_key(tmp_path, root, lambda _: {"decode": "1"}).kernels_sha != "abc"
