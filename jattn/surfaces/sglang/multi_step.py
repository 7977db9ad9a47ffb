"""FlashAttentionMultiStepBackend: one backend for each step of drafting."""

import dataclasses
from typing import Any

from jattn.arguments import check_whole, instance
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.spec_info import EagleDraftInput
from jattn.surfaces.cuda_graph_state import CudaGraphState
from jattn.surfaces.sglang.backend import FlashAttentionBackend
from jattn.surfaces.sglang.config import FlashAttentionConfig
from jattn.surfaces.sglang.metadata import FlashAttentionMetadata


@dataclasses.dataclass(frozen=True)
class FlashAttentionMultiStepBackend:
    """The draft worker's backends; static and hashable as they are.

    The first of `speculative_num_steps` tokens comes from the pass before, so metadata is made for one step less.

    Attributes:
        config: As FlashAttentionBackend's.
        topk: Branches a drafted sequence has; 1 is a chain.
        speculative_num_steps: Draft steps.

    Raises:
        ValueError: There is no branch or no step.
    """

    config: FlashAttentionConfig
    topk: int
    speculative_num_steps: int

    def __post_init__(self):
        instance("config", self.config, FlashAttentionConfig)
        check_whole(self, "topk", "speculative_num_steps")

    @property
    def attn_backends(self) -> tuple[FlashAttentionBackend, ...]:
        """One for each step."""
        facts: dict[str, Any] = {"topk": self.topk, "speculative_num_steps": self.speculative_num_steps}
        steps = range(self.speculative_num_steps)
        return tuple(FlashAttentionBackend(self.config, speculative_step_id=step, **facts) for step in steps)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> tuple[FlashAttentionMetadata, ...]:
        """Metadata for each step but the last; jit-able."""
        _rows(forward_batch)  # a batch that is not one of drafting is refused
        return tuple(backend.init_forward_metadata(forward_batch) for backend in self.attn_backends[:-1])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int | None = None) -> tuple[CudaGraphState, ...]:
        """The static sizes for each step, with `max_bs` times `topk` tokens if `max_num_tokens` is None."""
        tokens = max_bs * self.topk if max_num_tokens is None else max_num_tokens
        return tuple(backend.init_cuda_graph_state(max_bs, tokens) for backend in self.attn_backends)

    def init_forward_metadata_capture_cuda_graph(
        self, forward_batch: ForwardBatch
    ) -> tuple[FlashAttentionMetadata, ...]:
        """Example metadata to compile each step but the last with.

        Raises:
            ValueError: The batch is not one of drafting, or does not say its requests.
        """
        rows, bs = _rows(forward_batch), forward_batch.batch_size
        return tuple(
            backend.init_forward_metadata_capture_cuda_graph(bs, bs * self.topk, **rows)
            for backend in self.attn_backends[:-1]
        )

    def init_forward_metadata_replay_cuda_graph(
        self, forward_batch: ForwardBatch, bs: int
    ) -> tuple[FlashAttentionMetadata, ...]:
        """Metadata of the same trees and avals as the captured ones, with `bs` rows; jit-able.

        Raises:
            ValueError: As the capture.
        """
        rows: dict[str, Any] = _rows(forward_batch) | {"seq_lens_sum": None, "seq_lens_cpu": None}
        slots = forward_batch.out_cache_loc[0] if forward_batch.out_cache_loc else None
        return tuple(
            backend.init_forward_metadata_replay_cuda_graph(bs, out_cache_loc=slots, **rows)
            for backend in self.attn_backends[:-1]
        )


def _rows(forward_batch: ForwardBatch) -> dict[str, Any]:
    """What a batch of drafting says of its requests, by the names of a capture."""
    instance("forward_batch", forward_batch, ForwardBatch)
    if not isinstance(forward_batch.spec_info, EagleDraftInput):
        raise ValueError(
            f"`spec_info` must be an EagleDraftInput in drafting. Got {type(forward_batch.spec_info).__name__}."
        )
    if forward_batch.req_pool_indices is None or forward_batch.req_to_token_pool is None:
        raise ValueError("`forward_batch` must have `req_pool_indices` and `req_to_token_pool` in drafting. Got None.")
    return {
        "req_pool_indices": forward_batch.req_pool_indices,
        "seq_lens": forward_batch.seq_lens,
        "encoder_lens": forward_batch.encoder_lens,
        "forward_mode": ForwardMode.DECODE,
        "spec_info": forward_batch.spec_info,
        "req_to_token": forward_batch.req_to_token_pool.req_to_token,
    }
