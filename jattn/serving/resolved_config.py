"""ResolvedConfig: an EngineConfig once the model and the device have filled in what was left to them."""

import bisect
import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.backend import BackendOptions
from jattn.compiled_steps import power_of_two_buckets, token_buckets
from jattn.device_mesh import least_of_processes, memory_stats, spans_processes
from jattn.kv_cache_dtype import stored_dtype
from jattn.kv_pool import KVGroupSpec, pool_bytes
from jattn.matmul import MXFP4
from jattn.model import CausalLM
from jattn.page_lists import AttentionSpan, WindowList, narrower_spans
from jattn.parallel import ONE_DEVICE, Parallel
from jattn.serving.config import EngineConfig
from jattn.serving.steps.drafting import Drafter, check_drafter_fits
from jattn_kernels.call import default_device

_TEXT_OF_AN_END = 8  # pages of a text in the prefix cache for one of its window's at the end
_FEWEST_PAGES, _MOST_PAGES = 2, 2**40  # of any pool
_STOP_IDS = 8  # that a request may add to the model's
_POOL_BYTES_WITHOUT_STATS = 2**30  # where a device does not say how much memory it has: CPU
_ALIKE = 64  # pages to which a pool is rounded that is so large that it loses a hundredth at most
_FIRST_SHARE = 0.85  # of the device memory that the weights leave, until it is known what the steps need of it


@typing.no_type_check  # as EngineConfig
@dataclasses.dataclass(frozen=True, kw_only=True)
class _ConfigForModel(EngineConfig):
    """An EngineConfig, and what the model alone says.

    Attributes:
        windows: The spans of attention that have page lists of their own, beside the one that keeps all of a request's
            pages; `num_pages` are that one's.
    """

    windows: tuple[AttentionSpan, ...] = ()


class ResolvedConfig(_ConfigForModel):
    """An engine's sizes, none of them left open, and what follows from them."""

    num_pages: int
    max_context_len: int
    prefill_seqs: int
    max_stop_ids: int
    speculative: Drafter | None

    @property
    def pool_dtype(self) -> Any:
        """What the pool stores."""
        return stored_dtype(self.kv_cache_dtype, jnp.dtype(self.dtype), latents=True)

    @property
    def parallel(self) -> Parallel:
        """The devices that share the model."""
        return parallel_of(self)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a decode step verifies beside each row's own."""
        return self.speculative.num_draft_tokens if self.speculative else 0

    @property
    def most_keys(self) -> int:
        """Keys of the longest request, those of drafted tokens past its end included."""
        return self.max_context_len + self.num_draft_tokens

    @property
    def max_pages(self) -> int:
        """Width of a page table."""
        return -(-self.most_keys // self.page_size)

    @property
    def pages_a_step(self) -> int:
        """Pages that a decode step may open for a row."""
        return -(-(1 + self.num_draft_tokens) // self.page_size)

    @property
    def window_lists(self) -> tuple[WindowList, ...]:
        """The page lists of those spans."""
        return self.window_lists_beside(self.num_pages)

    @property
    def window_widths(self) -> tuple[int, ...]:
        """Pages of each of these lists that a part of a prompt reads or writes at most."""
        chunk = min(self.prefill_tokens, self.max_chunk_tokens or self.prefill_tokens)
        beside = 2 + chunk + self.num_draft_tokens  # a draft model's query before the first, the next token's place
        return tuple(min(self.max_pages, -(-(span.most_keys + beside) // self.page_size) + 1) for span in self.windows)

    @property
    def pages_of_lists(self) -> tuple[int, ...]:
        """Pages of each page list, the reserved ones included."""
        return (self.num_pages, *(window.num_pages for window in self.window_lists))

    def window_lists_beside(self, num_pages: int) -> tuple[WindowList, ...]:
        """Likewise, beside a list of so many pages that keeps all.

        They have what keeps all rows going; where the first list has not all that rows can use, half of its pages at
        most: more would pay where texts are hardly longer than a window. Or what finds the ends of cached texts again,
        if that is more.

        A row has what its next query sees, and the tokens of launches that are not read or being planned; beside all
        rows there is a launch's tokens of prompts. Each may lie across the edges of pages.
        """
        kept = num_pages // _TEXT_OF_AN_END if self.enable_prefix_caching else 0
        lists = []
        for span in self.windows:
            keys = span.most_keys + 1 + 3 * self.num_draft_tokens
            a_row = min(self.max_pages, -(-keys // self.page_size) + 2)
            beside_rows = 1 + -(-self.prefill_tokens // self.page_size)
            of_rows = beside_rows + self.max_num_seqs * a_row
            if num_pages <= self.max_num_seqs * self.max_pages:
                of_rows = min(of_rows, num_pages // 2)
            lists.append(WindowList(span, min(num_pages, max(of_rows, kept, beside_rows + a_row))))
        return tuple(lists)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        return power_of_two_buckets(self.max_num_seqs, self.smallest_decode_bucket)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        return token_buckets(self.prefill_tokens, self.smallest_prefill_bucket)

    @property
    def backend_options(self) -> BackendOptions:
        return BackendOptions(
            max_context_len=self.most_keys,
            page_size=self.page_size,
            max_num_seqs=self.max_num_seqs,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            implementation=self.implementation,
            speculative_num_draft_tokens=1 + self.num_draft_tokens,
            # XLA's own attention makes no such promise; of one size, on a CPU, it keeps it.
            batch_invariant=self.batch_invariant and default_device().platform == "gpu",
        )


def computing_dtype(config: EngineConfig) -> Any:
    """What the model computes in, on the device in use."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


def parallel_of(config: EngineConfig) -> Parallel:
    """The devices that share the model.

    Raises:
        ValueError: Experts are to be shared, and one device has them all.
    """
    if config.tensor_parallel == 1 and config.expert_parallel:
        raise ValueError(
            "`expert_parallel` must be False where one device has all experts: it shares them among the devices of "
            "`tensor_parallel`, which is 1. Got True."
        )
    if config.tensor_parallel == 1:
        return ONE_DEVICE
    return Parallel("tensor", config.tensor_parallel, by_expert=config.expert_parallel)


def resolved(
    config: EngineConfig, model: CausalLM, *, draft_model: CausalLM | None = None, num_eos_ids: int = 0
) -> ResolvedConfig:
    """The configuration for a model.

    Args:
        config: What was asked for.
        model: The model; shapes alone will do.
        draft_model: The one that a `DraftModel` drafts with.
        num_eos_ids: How many tokens end any request.

    Raises:
        ValueError: A size does not go with the model, or the pool not with the memory; or several processes share the
            model, and steps are to be compiled in the background.
        NotImplementedError: Of the model no results can be promised to be batch-invariant, which they are to be.
    """
    context = model.context_len if config.max_context_len is None else config.max_context_len
    if context > model.context_len:
        raise ValueError(f"`max_context_len` must not exceed the model's {model.context_len}. Got {context}.")
    if config.speculative:
        check_drafter_fits(config.speculative, context)
    parallel = parallel_of(config)
    if config.compile_in_background and spans_processes(parallel):
        raise ValueError(
            "`compile_in_background` must be False where several processes share the model, which must take the same "
            "steps at the same time. Got True."
        )
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {
        "dtype": computing_dtype(config).name,
        "max_context_len": context,
        "prefill_seqs": config.max_num_seqs if config.prefill_seqs is None else config.prefill_seqs,
        "max_stop_ids": num_eos_ids + _STOP_IDS if config.max_stop_ids is None else config.max_stop_ids,
        "compile_in_background": False if spans_processes(parallel) else config.compile_in_background,
    }
    if config.batch_invariant:
        _check_invariant(model)
        values |= {"mixed_steps": False, "enable_prefix_caching": False, "greedy_steps": False}
        values |= {"smallest_decode_bucket": config.max_num_seqs, "smallest_prefill_bucket": config.prefill_tokens}
    groups = (*model.kv_groups, *(draft_model.kv_groups if draft_model else ()))
    found = ResolvedConfig(**values)
    for group in groups:
        group.check_dtype(found.pool_dtype)
    found = dataclasses.replace(found, windows=narrower_spans((group.span for group in groups), found.most_keys))
    if config.num_pages is None:
        jax.block_until_ready(jax.tree.leaves(model))  # else what loading them still holds would count
        found = dataclasses.replace(found, num_pages=default_pages(found, groups))
    return found


def _check_invariant(model: CausalLM) -> None:
    """Raises NotImplementedError with what of a model depends on the batch around a request."""
    reasons = {
        "a prompt's chunk is attended to as its length asks": any(
            each.kv == "latent" for each in model.attention_layers
        ),
        "experts in mxfp4 add up as their rows ask": any(leaf.dtype == MXFP4 for leaf in jax.tree.leaves(model)),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise NotImplementedError(f"`batch_invariant` must be False for this model: {reason}.")


def bytes_of_pool(groups: Iterable[KVGroupSpec], config: ResolvedConfig, num_pages: int) -> int:
    """Bytes of a device's pool whose list of all pages has so many."""
    sizes = {"num_pages": num_pages, "page_size": config.page_size, "dtype": config.pool_dtype}
    return pool_bytes(groups, windows=config.window_lists_beside(num_pages), **sizes)


def default_pages(config: ResolvedConfig, groups: Sequence[KVGroupSpec], *, beside: int | None = None) -> int:
    """All the pages that requests can use, and the reserved one, or as many as the device holds beside the weights.

    Args:
        beside: Bytes that others need of what the weights leave; a part of it if None. Where several processes have the
            devices and it is None, it is the number for which all have room.

    Raises:
        ValueError: It holds no two.
    """
    stats = memory_stats()
    budget = _POOL_BYTES_WITHOUT_STATS
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        budget = _FIRST_SHARE * free if beside is None else free - beside
    too_many = bisect.bisect_right(range(_MOST_PAGES), budget, key=lambda pages: bytes_of_pool(groups, config, pages))
    fitting = least_of_processes(too_many - 1, config.parallel if beside is None else ONE_DEVICE)
    if fitting < _FEWEST_PAGES:
        raise ValueError(
            f"`page_size` must be so small that 2 pages fit the {max(int(budget), 0)} bytes left for the pool. "
            f"Got {config.page_size}."
        )
    # What else is in use differs a little from start to start; the same pool's steps are found on disk.
    fitting -= fitting % _ALIKE if fitting > 64 * _ALIKE else 0
    return min(config.max_num_seqs * config.max_pages + 1, fitting)
