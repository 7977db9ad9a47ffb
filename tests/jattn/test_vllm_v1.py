"""vLLM v1's helpers: decodes first, shared hyperparameters, virtual batches, and the builders' base."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.vllm import v1

RNG = np.random.default_rng(0)


def common(*q_lens, on_host=True):
    offsets = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    lens = np.asarray(q_lens, np.int32)
    return v1.CommonAttentionMetadata(
        query_start_loc=jnp.asarray(offsets),
        query_start_loc_cpu=offsets if on_host else None,
        seq_lens=jnp.asarray(lens),
        num_reqs=len(q_lens),
        num_actual_tokens=int(offsets[-1]),
        max_query_len=8,
        block_table_tensor=jnp.zeros((len(q_lens), 1), jnp.int32),
        slot_mapping=jnp.zeros(int(offsets[-1]), jnp.int32),
    )


@pytest.mark.parametrize(
    ("q_lens", "threshold", "expected"),
    [
        ((1, 1, 5, 3), 1, (2, 2, 2, 8)),
        ((1, 2, 5), 2, (2, 1, 3, 5)),
        ((1, 1), 1, (2, 0, 2, 0)),
        ((4, 2), 1, (0, 2, 0, 6)),
        ((1, 5, 0, 0), 1, (1, 1, 1, 5)),
        ((0, 0), 1, (2, 0, 0, 0)),
    ],
)
def test_split_counts_requests_and_tokens(q_lens, threshold, expected):
    assert v1.split_decodes_and_prefills(common(*q_lens), threshold) == expected


def test_split_of_padded_decodes_counts_the_padding_as_vllm_does():
    padded = dataclasses.replace(common(1, 1, 0, 0), num_actual_tokens=4)
    assert v1.split_decodes_and_prefills(padded) == (4, 0, 4, 0)


def test_split_of_a_batch_that_is_not_partitioned_is_refused():
    with pytest.raises(ValueError, match=r"Decodes must come before prefills. Got query lengths \[5, 1\]"):
        v1.split_decodes_and_prefills(common(5, 1))
    with pytest.raises(ValueError, match="`query_start_loc_cpu` must be given"):
        v1.split_decodes_and_prefills(common(1, on_host=False))


@pytest.mark.parametrize("threshold", [1, 3])
def test_reorder_partitions_every_batch_and_moves_only_what_it_must(threshold):
    for _ in range(50):
        counts = RNG.integers(1, 6, RNG.integers(1, 9))
        names = [f"request {i}" for i in range(len(counts))]
        scheduled = dict(zip(names, counts.tolist(), strict=True))
        arguments = v1.InputBatch(names), v1.SchedulerOutput(scheduled), threshold
        permutation, moved = v1.reorder_batch_to_split_decodes_and_prefills(*arguments)
        assert sorted(permutation) == list(range(len(counts)))
        reordered = counts[permutation]
        v1.split_decodes_and_prefills(common(*reordered), threshold)
        in_place = (permutation == np.arange(len(counts))).all()
        assert moved == (not in_place)
        misplaced = (counts[: (counts <= threshold).sum()] > threshold).sum()
        assert (permutation != np.arange(len(counts))).sum() == 2 * misplaced


@dataclasses.dataclass(frozen=True)
class Impl:
    sliding_window: tuple[int, int] = (-1, -1)
    logits_soft_cap: float | None = None
    scale: float = 0.5


def test_hyperparameters_are_those_that_all_layers_share():
    config = v1.VllmConfig({"a": Impl((7, 0), 3.0), "b": Impl((7, 0), 3.0)})
    parameters = v1.get_per_layer_parameters(config, Impl)
    assert list(parameters) == ["a", "b"]
    assert v1.infer_global_hyperparameters(parameters) == v1.PerLayerParameters(7, 3.0, 0.5)


@pytest.mark.parametrize("other", [Impl((6, 0)), Impl(logits_soft_cap=1.0), Impl(scale=1.0)])
def test_hyperparameters_that_differ_are_refused_with_the_layers_names(other):
    parameters = v1.get_per_layer_parameters(v1.VllmConfig({"a": Impl(), "b": Impl(), "c": other}), Impl)
    with pytest.raises(ValueError, match=r"All layers must share .* in layer 'a', .* in layer 'c'"):
        v1.infer_global_hyperparameters(parameters)


def test_hyperparameters_of_no_or_other_layers_are_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        v1.infer_global_hyperparameters({})
    with pytest.raises(ValueError, match=r"Layer 'a' must have a str. Got Impl"):
        v1.get_per_layer_parameters(v1.VllmConfig({"a": Impl()}), str)


@pytest.fixture
def no_cached_layout():
    v1.get_kv_cache_layout.cache_clear()
    yield
    v1.get_kv_cache_layout.cache_clear()


@pytest.mark.parametrize(("setting", "layout"), [(None, "NHD"), ("NHD", "NHD"), ("HND", "HND")])
def test_layout_is_what_the_environment_says(no_cached_layout, monkeypatch, setting, layout):
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    if setting:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", setting)
    assert v1.get_kv_cache_layout() == layout


def test_layout_of_another_name_is_refused(no_cached_layout, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "DNH")
    with pytest.raises(ValueError, match=r"must be NHD or HND. Got 'DNH'"):
        v1.get_kv_cache_layout()


def test_virtual_batches_go_by_block_size():
    arguments = np.array([0, 4], np.int32), np.array([6], np.int32), np.arange(3, dtype=np.int32)[None]
    q_local, *_, pages = v1.make_local_attention_virtual_batches(4, *arguments, block_size=2)
    assert (q_local.tolist(), pages.tolist()) == ([2, 2], [[0, 1], [2, 2]])
    with pytest.raises(ValueError, match=r"`block_size` must be given, a whole number of at least 1. Got 0"):
        v1.make_local_attention_virtual_batches(4, *arguments)


class Builder(v1.AttentionMetadataBuilder[tuple]):
    def __init__(self, kv_cache_spec, vllm_config, device=None):
        super().__init__(kv_cache_spec, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_prefix_len, common_attn_metadata.num_reqs, fast_build


def test_builders_capture_by_building_and_leave_the_order():
    builder = Builder(None, v1.VllmConfig({}), None)
    assert builder.build_for_cudagraph_capture(common(1, 1)) == (0, 2, False)
    assert not builder.can_run_in_cudagraph(common(1, 3))
    permutation, moved = builder.reorder_batch(v1.InputBatch(["a", "b"]), v1.SchedulerOutput({"a": 5, "b": 1}))
    assert (permutation.tolist(), moved) == ([0, 1], False)
    with pytest.raises(TypeError, match="abstract"):
        v1.AttentionMetadataBuilder(None, v1.VllmConfig({}), None)
