"""What SGLang's backend reads from its model runner, as one static object."""

import dataclasses
import functools
from typing import Any

from jattn.arguments import check_whole, instance, whole
from jattn.attention.backend import BackendOptions
from jattn.attention.layer import AttentionLayer
from jattn.attention.paged import PagedAttentionBackend
from jattn.dtype_names import named_dtype
from jattn.kv_cache_dtype import is_fp8, stored_dtype


def cdiv(a: int, b: int) -> int:
    """Ceiling division.

    Raises:
        ValueError: `b` is no whole number of at least 1, or `a` none of at least 0.
    """
    return -(whole("a", a, 0) // -whole("b", b))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionConfig:
    """What SGLang's backend reads from its model runner; hashable.

    Attributes:
        max_context_len: Longest sequence, in tokens; bounds the page tables made from `req_to_token`. Drafted tokens
            come on top. The keys of a drafted tree take topk * speculative_num_steps places behind its sequence's:
            `req_to_token` must have columns for them, a row without is refused, and inside jit, where lengths are not
            known, is padding. Tokens that are verified beyond the columns there are have no key of their own.
        page_size: Tokens a page.
        layers: One of each kind of layer that the model has, without scales: their work lists are made once a batch. A
            layer of another kind makes its own.
        dtype: Name of the dtype of queries, keys and values; the work lists depend on it.
        implementation: Which kernels to use; None lets dispatch choose.
        kv_cache_dtype: What the pool stores; auto, a name of DTYPE_NAMES, or PACKED_LATENTS where layers read latent
            rows. Where it is not one of DTYPE_NAMES in fp8, the layers' scales are not used.
        quantize_queries: Cast queries to an fp8 pool's dtype too, in layers that have a `k_scale`, as SGLang does.
        attention_chunk_size: Tokens a chunk, for layers with `use_irope`; None is off.
        sliding_window_size: The model's window, own key not counted, told in the metadata; each layer has its own.
        is_encoder_decoder: Whether batches have encoder lengths.
        attention_arch: "MLA" for models of multi-head latent attention.
        disable_mla: Serve those by ordinary attention over whole keys and values.
        speculative_num_draft_tokens: Tokens a sequence in target verify.

    Raises:
        ValueError: A value contradicts its rule or another value.
    """

    max_context_len: int
    page_size: int
    layers: tuple[AttentionLayer, ...] = ()
    dtype: str = "float32"
    implementation: str | None = None
    kv_cache_dtype: str = "auto"
    quantize_queries: bool = False
    attention_chunk_size: int | None = None
    sliding_window_size: int | None = None
    is_encoder_decoder: bool = False
    attention_arch: str = "MHA"
    disable_mla: bool = False
    speculative_num_draft_tokens: int | None = None

    def __post_init__(self):
        check_whole(self, "max_context_len", "page_size")
        check_whole(self, "attention_chunk_size", "speculative_num_draft_tokens", optional=True)
        check_whole(self, "sliding_window_size", least=-1, optional=True)
        if self.sliding_window_size == -1:  # how engines say that there is none
            object.__setattr__(self, "sliding_window_size", None)
        instance("layers", self.layers, tuple, list)
        for layer in self.layers:
            instance("layers", layer, AttentionLayer)
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.implementation is not None:
            instance("implementation", self.implementation, str)
        object.__setattr__(self, "dtype", named_dtype("dtype", self.dtype).name)
        if self.attention_arch not in ("MHA", "MLA"):
            raise ValueError(f"`attention_arch` must be one of MHA, MLA. Got {self.attention_arch!r}.")
        _ = self.stored_dtype  # an unknown name is refused here
        if self.is_encoder_decoder and self.sliding_window_size is not None:
            raise ValueError(
                "`sliding_window_size` must be None in an encoder-decoder model: window and cross attention do not go "
                f"together. Got sliding_window_size={self.sliding_window_size}."
            )
        if self.attention_chunk_size is not None and self.attention_chunk_size % self.page_size:
            raise ValueError(
                "`attention_chunk_size` must be a multiple of `page_size`. "
                f"Got attention_chunk_size={self.attention_chunk_size}, page_size={self.page_size}."
            )

    @property
    def max_pages(self) -> int:
        """Width of a page table."""
        return cdiv(self.max_context_len, self.page_size)

    @property
    def use_mla(self) -> bool:
        """Whether layers read latent rows."""
        return self.attention_arch == "MLA" and not self.disable_mla

    @functools.cached_property
    def paged_backend(self) -> PagedAttentionBackend:
        """What attends for every backend of this configuration."""
        options = BackendOptions(
            max_context_len=self.max_context_len,
            page_size=self.page_size,
            max_num_seqs=1,  # bounds nothing
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            implementation=self.implementation,
        )
        return PagedAttentionBackend.for_model(tuple(map(self.paged_layer, self.layers)), options)

    def paged_layer(self, layer: AttentionLayer) -> AttentionLayer:
        """A layer whose own fields say what SGLang's backend says of it.

        Raises:
            ValueError: It has chunks of two sizes.
        """
        if layer.is_cross_attention:
            return layer
        chunk_size = layer.chunk_size
        if layer.use_irope and self.attention_chunk_size is not None:
            if chunk_size not in (None, self.attention_chunk_size):
                raise ValueError(
                    "`chunk_size` of a layer with `use_irope` must be None or the backend's `attention_chunk_size`. "
                    f"Got chunk_size={chunk_size}, attention_chunk_size={self.attention_chunk_size}."
                )
            chunk_size = self.attention_chunk_size
        return dataclasses.replace(layer, chunk_size=chunk_size, kv="latent" if self.use_mla else "heads")

    @property
    def is_fp8(self) -> bool:
        """Whether the pool is stored in fp8, and scales are used."""
        return is_fp8(self.kv_cache_dtype)

    @property
    def stored_dtype(self) -> Any:
        """The dtype of the pool."""
        return stored_dtype(self.kv_cache_dtype, self.dtype, latents=self.use_mla)
