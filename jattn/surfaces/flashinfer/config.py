"""What pymllm's FlashInfer backend is constructed with."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.arguments import check_whole, in_words, instance, shown, whole_number
from jattn.attention.backend import BackendOptions
from jattn.attention.layer import AttentionLayer
from jattn.attention.specs import LayerKind
from jattn.dtype_names import named_dtype
from jattn.kv_cache_dtype import cache_dtype, stored_dtype
from jattn.surfaces.flashinfer.metadata import WrapperDispatch, should_use_tensor_core
from jattn.surfaces.places import check_slots
from jattn_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class FlashInferConfig:
    """What a backend is made for; static and hashable.

    Args:
        num_heads, num_kv_heads, head_dim: Of the layers, on this device.
        kv_cache_dtype, q_dtype: Of the pool and of the queries.
        max_context_len: Longest sequence, in tokens.
        req_to_token: The table of token slots, [max_reqs, max_context_len], or its shape. Of NumPy's, which an engine
            writes in place, replays may leave it out; any other comes with each batch.
        device: Accepted and not used: arrays are where JAX puts them.
        max_req_pool_size: Most sequences of a batch.
        sliding_window_size: Keys to the left, own one not counted, in the layers that have a window; with it there are
            two wrappers, and None is one.
        skip_prefill: Decode only.
        kv_indptr_buf, kv_last_page_len_buf: Only their shapes count, [sequences + 1] and [sequences]; they bound a
            batch in place of `max_req_pool_size`.
        init_new_workspace: Accepted and not used: there is no workspace.
        page_size: Tokens a page of the pool; pymllm's pools have 1.
        is_encoder_decoder: Some layers see an encoder's keys; there are two wrappers.
        num_draft_tokens: Drafted tokens a sequence, for the capture of target verify.
        implementation: Which kernels to use; None lets dispatch choose.

    Raises:
        ValueError: A size contradicts its rule, or both windows and an encoder would need a second wrapper.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_cache_dtype: Any
    q_dtype: Any
    max_context_len: int
    req_to_token: Any
    device: Any
    max_req_pool_size: int
    sliding_window_size: int | None = None
    skip_prefill: bool = False
    kv_indptr_buf: Any = None
    kv_last_page_len_buf: Any = None
    init_new_workspace: bool = False
    _: dataclasses.KW_ONLY
    page_size: int = 1
    is_encoder_decoder: bool = False
    num_draft_tokens: int | None = None
    implementation: str | None = None

    def __post_init__(self):
        q_dtype = named_dtype("q_dtype", self.q_dtype)
        object.__setattr__(self, "q_dtype", q_dtype)
        object.__setattr__(self, "kv_cache_dtype", cache_dtype(self.kv_cache_dtype) or q_dtype)
        if isinstance(self.sliding_window_size, int) and self.sliding_window_size == -1:  # how engines say: none
            object.__setattr__(self, "sliding_window_size", None)
        check_whole(self, "sliding_window_size", least=0, optional=True)
        check_whole(self, "num_draft_tokens", optional=True)
        check_whole(self, "num_heads", "num_kv_heads", "head_dim", "max_context_len", "max_req_pool_size", "page_size")
        table: Any = self.req_to_token
        object.__setattr__(self, "_table", table if isinstance(table, np.ndarray) else None)
        for name, axes in (("req_to_token", 2), ("kv_indptr_buf", 1), ("kv_last_page_len_buf", 1)):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else _shape(name, value, axes))
        if self.req_to_token is None:
            raise ValueError("`req_to_token` must be the table of token slots, or its shape. Got None.")
        check_slots("req_to_token", self.req_to_token, self.max_context_len)
        if self.sliding_window_size is not None and self.is_encoder_decoder:
            raise ValueError("`sliding_window_size` must be None with `is_encoder_decoder`: there are two wrappers.")
        if self.dispatch_reason is not None and (self.kv_indptr_buf or self.kv_last_page_len_buf):
            raise ValueError("`kv_indptr_buf` and `kv_last_page_len_buf` must be None where there are two wrappers.")
        if self.implementation is not None:
            instance("implementation", self.implementation, str)
        with in_words(num_q_heads="num_heads"):
            _ = self.spec  # heads and head_dim contradict each other here or nowhere

    @classmethod
    @in_words(max_req_pool_size="max_num_seqs", q_dtype="dtype")
    def for_model(cls, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> "FlashInferConfig":
        """The backend of a model's layers, one given of each kind.

        Raises:
            NotImplementedError: Layers differ in their heads or windows, attend within chunks, or read latent rows;
                drafted tokens, or results that are to be batch-invariant.
        """
        if options.batch_invariant:
            raise NotImplementedError("`flashinfer` does not promise `batch_invariant`: use `paged`.")
        if options.speculative_num_draft_tokens > 1:
            raise NotImplementedError(
                "`speculative` must be None with `backend` flashinfer, whose verification takes a tree's mask: use "
                f"paged. Got {options.speculative_num_draft_tokens - 1} drafted tokens a step."
            )
        for layer in layers:
            refuse_unserved(layer)
        shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim) for layer in layers}
        windows = {layer.sliding_window_size for layer in layers} - {-1}
        if len(shapes) != 1 or len(windows) > 1:
            raise NotImplementedError(
                "The layers of a FlashInfer backend must have the same heads, and one window or none: use "
                f"`paged`. Got heads and widths {sorted(shapes)}, windows {sorted(windows)}."
            )
        ((num_heads, num_kv_heads, head_dim),) = shapes
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_cache_dtype=stored_dtype(options.kv_cache_dtype, options.dtype),
            q_dtype=options.dtype,
            max_context_len=options.max_context_len,
            req_to_token=(options.max_num_seqs, options.max_context_len),
            device=None,
            max_req_pool_size=options.max_num_seqs,
            sliding_window_size=next(iter(windows), None),
            page_size=options.page_size,
            is_encoder_decoder=any(layer.is_cross_attention for layer in layers),
            implementation=options.implementation,
        )

    @property
    def dispatch_reason(self) -> WrapperDispatch | None:
        """Why there are two wrappers; None if there is one."""
        if self.is_encoder_decoder:
            return WrapperDispatch.CROSS_ATTENTION
        return None if self.sliding_window_size is None else WrapperDispatch.SLIDING_WINDOW

    @property
    def decode_use_tensor_cores(self) -> bool:
        """What FlashInfer would do; see `should_use_tensor_core`."""
        return should_use_tensor_core(self.kv_cache_dtype, self.num_heads, self.num_kv_heads)

    @property
    def max_bs(self) -> int:
        """Most sequences of a captured batch."""
        bounds = [self.max_req_pool_size]
        if self.kv_indptr_buf is not None:
            bounds.append(self.kv_indptr_buf[0] - 1)
        if self.kv_last_page_len_buf is not None:
            bounds.append(self.kv_last_page_len_buf[0])
        return min(bounds)

    @property
    def spec(self) -> AttentionSpec:
        """The facts that all layers share."""
        return AttentionSpec(num_q_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def kinds(self, *, causal: bool = True) -> tuple[LayerKind, ...]:
        """Of the layers that each wrapper serves, in order.

        Args:
            causal: Of a decoder's own keys.
        """
        own = dataclasses.replace(self.spec, causal=causal)
        kinds = [LayerKind(own, latent=False, is_cross=False)]
        if self.is_encoder_decoder:
            kinds.append(LayerKind(dataclasses.replace(own, causal=False), latent=False, is_cross=True))
        if self.sliding_window_size is not None:
            windowed = dataclasses.replace(own, window_left=self.sliding_window_size)
            kinds.insert(0, LayerKind(windowed, latent=False, is_cross=False))
        return tuple(kinds)

    def check_prefill(self) -> None:
        """Refuses what a backend for decode alone does not do."""
        if self.skip_prefill:
            raise ValueError("`skip_prefill` backends do decode only.")

    def host_table(self, rows: Any) -> Any:
        """The constructor's table as it is now.

        Args:
            rows: What is read beside it.

        Raises:
            ValueError: It was none of NumPy's, or would become a constant of what is being compiled.
        """
        table: np.ndarray | None = getattr(self, "_table", None)
        if table is None or isinstance(rows, Tracer):
            raise ValueError(
                "`req_to_token` must be given inside jit, and where the backend's is not a table of NumPy. Got None."
            )
        return jnp.array(table)  # a copy: the engine goes on writing into its own


def _shape(name: str, value: Any, axes: int) -> tuple[int, ...]:
    """The shape of an array, or the one that is given in its place."""
    shape = getattr(value, "shape", value)
    rule = f"`{name}` must be an array of {axes} {'axis' if axes == 1 else 'axes'}, or its shape."
    if not isinstance(shape, tuple | list) or len(shape) != axes:
        raise ValueError(f"{rule} Got {shown(name, value)}.")
    return tuple(whole_number(size, rule, 0) for size in shape)


def refuse_unserved(layer: AttentionLayer) -> None:
    """Refuses a layer that attends within chunks, reads latent rows, or has sinks.

    Raises:
        NotImplementedError: It does.
    """
    if layer.chunk_size is not None:
        raise NotImplementedError(
            "`chunk_size` must be None in layers of a FlashInfer backend: use `paged`. "
            f"Got layer.chunk_size={layer.chunk_size}."
        )
    if layer.kv != "heads":
        raise NotImplementedError(
            "`kv` must be 'heads' in layers of a FlashInfer backend: use `paged` or `flash_attention`. "
            f"Got layer.kv={layer.kv!r}."
        )
    if layer.sinks is not None:
        raise NotImplementedError(
            "`sinks` must be None in layers of a FlashInfer backend: use `paged` or `flash_attention`. "
            f"Got {layer.sinks.shape[-1]} sinks."
        )
