"""vLLM v1's attention utilities: batches that put decodes first, the builders' base, and what layers must share."""

import abc
import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Int

from jattn import local_attention
from jattn.arguments import check_fields, check_whole, host_integers, in_words, instance, whole, whole_number
from jattn.pytree import pytree, static

__all__ = [
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "InputBatch",
    "PerLayerParameters",
    "SchedulerOutput",
    "VllmConfig",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "make_local_attention_virtual_batches",
    "reorder_batch_to_split_decodes_and_prefills",
    "split_decodes_and_prefills",
]


@pytree(kw_only=True)
class CommonAttentionMetadata:
    """Lengths and places of a batch, which all layers and builders share.

    The fields of the host, `*_cpu`, are NumPy outside jit; leave them None in what a compiled step takes. Counts are a
    bucket's sizes, static. Padded rows come last, with length 0; padded tokens have slot -1.

    Attributes:
        query_start_loc: Where each request's tokens begin; the last entry counts the real ones.
        query_start_loc_cpu: The same on the host.
        seq_lens: Keys of each request, computed tokens and this pass's.
        seq_lens_cpu: The same on the host.
        num_computed_tokens_cpu: Keys of each request from before this pass.
        num_reqs: Rows.
        num_actual_tokens: Tokens.
        max_query_len: Bound on a request's tokens.
        block_table_tensor: Pages of each request.
        slot_mapping: Where each token's key and value go.
    """

    query_start_loc: Int[Array, " B+1"]
    query_start_loc_cpu: Int[np.ndarray, " B+1"] | None = None
    seq_lens: Int[Array, " B"]
    seq_lens_cpu: Int[np.ndarray, " B"] | None = None
    num_computed_tokens_cpu: Int[np.ndarray, " B"] | None = None
    num_reqs: int = static()
    num_actual_tokens: int = static()
    max_query_len: int = static()
    block_table_tensor: Int[Array, "B max_pages"]
    slot_mapping: Int[Array, " T"]


@dataclasses.dataclass(frozen=True)
class PerLayerParameters:
    """What a plan for all layers takes from one of them.

    Attributes:
        window_left: Keys to the left, own one not counted; -1 is off.
        logits_soft_cap: Soft cap; None is off.
        sm_scale: Factor on q.k.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """What the utilities read of vLLM's configuration.

    Attributes:
        attention_layers: By name, the implementation of each attention layer.
        attention_chunk_size: Of layers that attend within chunks; None if there are none.
        dtype: Of the layers' queries; None makes no schedules ahead.

    Raises:
        ValueError: `attention_layers` is no mapping, or `attention_chunk_size` below 1.
    """

    attention_layers: Mapping[str, Any]
    attention_chunk_size: int | None = None
    dtype: Any = None

    def __post_init__(self):
        instance("attention_layers", self.attention_layers, Mapping)
        check_whole(self, "attention_chunk_size", optional=True)


@dataclasses.dataclass(frozen=True)
class InputBatch:
    """The requests of a batch by name, in the order of its rows."""

    req_ids: list[str]


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
    """How many tokens each request, by name, gets in this pass."""

    num_scheduled_tokens: dict[str, int]

    def __post_init__(self):
        instance("num_scheduled_tokens", self.num_scheduled_tokens, Mapping)


Reordered = tuple[Int[np.ndarray, " B"], bool]


class AttentionMetadataBuilder[M](abc.ABC):
    """Makes a backend's metadata of a batch; subclasses say which."""

    @abc.abstractmethod
    def __init__(self, kv_cache_spec: Any, vllm_config: VllmConfig, device: Any):
        """Keeps the first two; `device` is accepted for vLLM's sake and ignored."""
        self.kv_cache_spec = kv_cache_spec
        self.vllm_config = vllm_config

    @abc.abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """Metadata of a batch, once for all layers; jit-able.

        Args:
            common_prefix_len: Tokens that all requests begin with.
            fast_build: Few layers will read it: prefer building fast to attending fast.
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Example metadata to compile a step with, of the tree and avals of every batch of the bucket."""
        return self.build(0, common_attn_metadata)

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether a batch may run in a compiled step; none may unless a builder says so."""
        return False

    def reorder_batch(self, input_batch: InputBatch, scheduler_output: SchedulerOutput) -> Reordered:
        """The order in which the backend wants the rows, and whether that is another one; by default it is not.

        Returns:
            For each new row the old one, and whether any moves.
        """
        check_fields("input_batch", input_batch, "req_ids")
        return np.arange(len(input_batch.req_ids), dtype=np.int32), False


def get_per_layer_parameters(vllm_config: VllmConfig, cls_: type) -> dict[str, PerLayerParameters]:
    """The parameters of each attention layer, whose implementations must be of class `cls_`.

    Raises:
        ValueError: One is of another class.
    """
    check_fields("vllm_config", vllm_config, "attention_layers")
    instance("cls_", cls_, type)
    parameters = {}
    for name, impl in vllm_config.attention_layers.items():
        if not isinstance(impl, cls_):
            raise ValueError(f"Layer {name!r} must have a {cls_.__name__}. Got {type(impl).__name__}.")
        check_fields(f"attention_layers[{name!r}]", impl, "sliding_window", "logits_soft_cap", "scale")
        window_left, _ = impl.sliding_window
        parameters[name] = PerLayerParameters(window_left, impl.logits_soft_cap or None, impl.scale)
    return parameters


def infer_global_hyperparameters(per_layer_params: dict[str, PerLayerParameters]) -> PerLayerParameters:
    """The parameters that all layers share.

    Raises:
        ValueError: There is no layer, or two differ; the message names them.
    """
    instance("per_layer_params", per_layer_params, dict)
    if not per_layer_params:
        raise ValueError("`per_layer_params` must have at least one layer. Got none.")
    (first, shared), *others = per_layer_params.items()
    for name, parameters in others:
        if parameters != shared:
            raise ValueError(
                "All layers must share window_left, logits_soft_cap and sm_scale. "
                f"Got {shared} in layer {first!r}, {parameters} in layer {name!r}."
            )
    return shared


@functools.cache
def get_kv_cache_layout() -> Literal["NHD", "HND"]:
    """Axes of a page: what the environment variable VLLM_KV_CACHE_LAYOUT says at the first call, else NHD.

    Raises:
        ValueError: It says something else than NHD or HND.
    """
    layout = os.environ.get("VLLM_KV_CACHE_LAYOUT", "NHD")
    if layout == "NHD" or layout == "HND":
        return layout
    raise ValueError(f"`VLLM_KV_CACHE_LAYOUT` must be NHD or HND. Got {layout!r}.")


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: Int[np.ndarray, " B_plus_1"],
    seq_lens_np: Int[np.ndarray, " B"],
    block_table: Int[Any, "B max_pages"],
    block_size: int = 0,
) -> tuple[Int[np.ndarray, " V"], Int[np.ndarray, " V_plus_1"], Int[np.ndarray, " V"], Int[Any, "V pages_a_chunk"]]:
    """Query lengths, query offsets, key lengths and block tables of chunks as requests of their own.

    `jattn.local_attention` has the rules, and a twin for jit.

    Raises:
        ValueError: `attn_chunk_size` is no positive multiple of a positive `block_size`.
    """
    whole_number(block_size, "`block_size` must be given, a whole number of at least 1.", 1)
    with in_words(page_size="block_size"):
        return local_attention.make_local_attention_virtual_batches(
            attn_chunk_size, query_start_loc_np, seq_lens_np, block_table, block_size
        )


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: InputBatch, scheduler_output: SchedulerOutput, decode_threshold: int = 1
) -> Reordered:
    """The order that puts requests of at most `decode_threshold` tokens first; only the partition is promised.

    Returns:
        For each new row the old one, and whether any moves; as few do as can.

    Raises:
        ValueError: A request has no number of tokens, or an argument is of another type.
    """
    check_fields("input_batch", input_batch, "req_ids")
    check_fields("scheduler_output", scheduler_output, "num_scheduled_tokens")
    scheduled = scheduler_output.num_scheduled_tokens
    if missing := [name for name in input_batch.req_ids if name not in scheduled]:
        raise ValueError(f"`scheduler_output` must have tokens for every request. Got none for {missing}.")
    counts = host_integers("num_scheduled_tokens", [scheduled[name] for name in input_batch.req_ids], "requests")
    is_decode = counts <= whole("decode_threshold", decode_threshold, 0)
    front = np.arange(len(counts)) < is_decode.sum()
    early_prefills, late_decodes = np.flatnonzero(front & ~is_decode), np.flatnonzero(~front & is_decode)
    permutation = np.arange(len(counts), dtype=np.int32)
    permutation[early_prefills], permutation[late_decodes] = late_decodes, early_prefills
    return permutation, len(early_prefills) > 0


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int]:
    """How a batch of decodes first divides, on the host.

    Rows without tokens at its end are not counted, but for those of a batch of decodes alone: they are padded ones.

    Args:
        decode_threshold: Most tokens of a decode.

    Returns:
        num_decodes, num_prefills, num_decode_tokens and num_prefill_tokens.

    Raises:
        ValueError: The host's offsets are missing, or a decode comes after a prefill.
    """
    instance("common_attn_metadata", common_attn_metadata, CommonAttentionMetadata)
    offsets = common_attn_metadata.query_start_loc_cpu
    if offsets is None:
        raise ValueError("`query_start_loc_cpu` must be given to divide a batch on the host. Got None.")
    offsets = host_integers("query_start_loc_cpu", offsets, "batch_size + 1")
    lens = np.diff(offsets)
    is_decode = lens <= whole("decode_threshold", decode_threshold, 0)
    if is_decode.all():  # padding as well
        return common_attn_metadata.num_reqs, 0, common_attn_metadata.num_actual_tokens, 0
    num_decodes, num_rows = int(np.argmin(is_decode)), int(np.flatnonzero(lens)[-1]) + 1
    if is_decode[num_decodes:num_rows].any():
        raise ValueError(f"Decodes must come before prefills. Got query lengths {lens[:num_rows].tolist()}.")
    num_decode_tokens, num_tokens = int(offsets[num_decodes]), int(offsets[num_rows])
    return num_decodes, num_rows - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens
