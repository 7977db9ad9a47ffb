"""FlashAttentionImpl of vLLM v0: attention of one kind of layer, with a cache and without."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn.arguments import array, check_fields, check_whole, in_words, instance, number, scale_arrays, whole_number
from jattn.attention.metadata import QueriesOverPages
from jattn.attention.paged_call import attend_pages
from jattn.kv_cache_dtype import cache_dtype
from jattn.pytree import pytree
from jattn.surfaces.vllm.schedules import Schedules
from jattn.surfaces.vllm.v0_metadata import (
    AttentionType,
    FlashAttentionMetadata,
    _get_causal_option,
    _get_query_key_seq_metadata,
    checked_metadata,
)
from jattn.surfaces.vllm.words import CROSS_WORDS, WORDS
from jattn_kernels import AttentionSpec, ragged_extend, write_pages
from jattn_kernels.spec import PageLayout

HEAD_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)


@pytree()
class AttentionLayer:
    """What attention reads of the layer that calls it: factors of fp8 queries, keys and values; None is 1.

    Queries of 16 or 32 bits are taken as they are, undivided, and `_q_scale` is not applied to them.
    """

    _q_scale: Float[Array, ""] | None = None
    _k_scale: Float[Array, "..."] | None = None
    _v_scale: Float[Array, "..."] | None = None


@dataclasses.dataclass(frozen=True)
class FlashAttentionImpl:
    """Attention of one kind of layer; static and hashable.

    Attributes:
        num_heads, num_kv_heads: Heads on this device.
        head_size: Width of a head.
        scale: Factor on q.k.
        alibi_slopes: One a query head, or None.
        sliding_window: As given, keys with the own one; then vLLM's pair, keys to the left and to the right without the
            own one, -1 for all. To both sides in encoders.
        kv_cache_dtype: "auto" for that of keys and values, or a name of DTYPE_NAMES.
        blocksparse_params: Refused.
        logits_soft_cap: Soft cap; None or 0 is off.
        attn_type: An AttentionType.
        kv_sharing_target_layer_name: The layer whose cache this one is given, to read and not to write.
        use_irope: Attend within chunks of the metadata's `attention_chunk_size`; to all keys if it has none.

    Raises:
        ValueError: A value contradicts its rule.
        NotImplementedError: `blocksparse_params` are given, or a window in cross attention.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: list[float] | tuple[float, ...] | None
    sliding_window: int | tuple[int, int] | None
    kv_cache_dtype: str
    blocksparse_params: dict[str, Any] | None = None
    logits_soft_cap: float | None = None
    attn_type: str = AttentionType.DECODER
    kv_sharing_target_layer_name: str | None = None
    use_irope: bool = False

    def __post_init__(self):
        if self.blocksparse_params is not None:
            raise NotImplementedError(
                "`blocksparse_params` must be None: no implementation has block-sparse attention."
            )
        check_whole(self, "num_heads", "num_kv_heads", "head_size")
        if self.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise ValueError(f"`head_size` must be one of {sizes}. Got head_size={self.head_size}.")
        if self.attn_type not in tuple(AttentionType):
            raise ValueError(f"`attn_type` must be one of {', '.join(AttentionType)}. Got {self.attn_type!r}.")
        cache_dtype(self.kv_cache_dtype)
        object.__setattr__(self, "scale", number("scale", self.scale))
        if self.logits_soft_cap is not None:
            object.__setattr__(self, "logits_soft_cap", number("logits_soft_cap", self.logits_soft_cap))
        if self.alibi_slopes is not None:
            object.__setattr__(self, "alibi_slopes", self._checked_slopes(self.alibi_slopes))
        if self.kv_sharing_target_layer_name is not None:
            instance("kv_sharing_target_layer_name", self.kv_sharing_target_layer_name, str)
        object.__setattr__(self, "sliding_window", self._window())
        with in_words(num_q_heads="num_heads"):
            self.spec(None)  # refuses heads that do not fit now, not in the first step

    def _checked_slopes(self, slopes: Any) -> tuple[float, ...]:
        if np.ndim(slopes) != 1 or len(slopes) != self.num_heads:
            got = len(slopes) if np.ndim(slopes) else repr(slopes)
            raise ValueError(f"`alibi_slopes` must have one slope a query head, {self.num_heads}. Got {got}.")
        return tuple(number("alibi_slopes", slope) for slope in slopes)

    def _window(self) -> tuple[int, int]:
        window = self.sliding_window
        if window is None:
            return -1, -1
        rule = "`sliding_window` must be None, at least 1, which is the own key, or two sides of at least -1 (all)."
        if isinstance(window, tuple):
            if len(window) != 2:
                raise ValueError(f"{rule} Got sliding_window={window}.")
            left, right = (whole_number(side, rule, -1, 2**31) for side in window)
            return left, right
        window = whole_number(window, rule, 1, 2**31)
        if self.attn_type == AttentionType.ENCODER_DECODER:
            raise NotImplementedError(f"Cross attention has no window. Got sliding_window={window}.")
        return (window - 1, 0 if _get_causal_option(self.attn_type) else window - 1)

    @property
    def vllm_flash_attn_version(self) -> int:
        """3: fp8 queries and caches are taken, as by FlashAttention-3."""
        return 3

    def spec(self, chunk_size: int | None, page_layout: PageLayout = "NHD", *, paged: bool = True) -> AttentionSpec:
        """The layer's facts in the kernels' words."""
        causal = _get_causal_option(self.attn_type)
        assert isinstance(self.sliding_window, tuple)
        left, right = (None if side < 0 else side for side in self.sliding_window)
        return AttentionSpec(
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            sm_scale=self.scale,
            logits_soft_cap=self.logits_soft_cap or None,
            causal=causal,
            window_left=left,
            window_right=None if causal else right,
            chunk_size=chunk_size,
            page_layout=page_layout,
            combined_pool="kv_first" if paged else None,
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: Float[Array, "T N H"],
        key: Float[Array, "Tk K H"] | None,
        value: Float[Array, "Tk K H"] | None,
        kv_cache: Float[Array, "..."] | None,
        attn_metadata: Any,
        output: Float[Array, "T N H"] | None = None,
        output_scale: Float[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "T N H"], Float[Array, "..."] | None]:
        """Writes this pass's keys and values, then attends; prefills and decodes in one call. The cache may be donated.

        Args:
            query, key, value: In v1, rows past the metadata's `num_actual_tokens` are padding.
            key, value: This pass's; both None to read only what is cached. Of encoder tokens in cross attention.
            kv_cache: Of shape `get_kv_cache_shape`; None or empty to attend to `key` and `value` alone, as encoders do
                in any case.
            output: Accepted for vLLM's sake and ignored: the output is returned.
            output_scale: Refused.

        Returns:
            The output, 0 for padded tokens, and the cache.

        Raises:
            ValueError: Arguments do not belong together.
            NotImplementedError: `output_scale` is given.
        """
        check_fields("layer", layer, "_q_scale", "_k_scale", "_v_scale")
        metadata = self._checked_metadata(attn_metadata)
        query, key, value, kv_cache = self._checked(query, key, value, kv_cache)
        if output_scale is not None:
            raise NotImplementedError("`output_scale` must be None: the output is not quantised here.")
        with in_words(**self._words()):
            return self._served(layer, query, key, value, kv_cache, metadata)

    def _words(self) -> dict[str, str]:
        """What this surface calls arguments of the kernels."""
        return CROSS_WORDS if self.attn_type == AttentionType.ENCODER_DECODER else WORDS

    def _checked_metadata(self, attn_metadata: Any) -> Any:
        return checked_metadata(attn_metadata)

    def _served(
        self, layer: AttentionLayer, query: Array, key: Array | None, value: Array | None, kv_cache: Any, metadata: Any
    ) -> tuple[Float[Array, "T N H"], Float[Array, "..."] | None]:
        """What `forward` answers, of arguments that it has checked."""
        self._check_types_fields(query, metadata)
        cached = kv_cache is not None and kv_cache.size > 0
        if self.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_DECODER) or not cached:
            if key is None or value is None:
                raise ValueError("`key` and `value` must be given where no cache is read. Got None.")
            return self._attend_uncached(layer, query, key, value, metadata), kv_cache
        assert kv_cache is not None
        cross = self.attn_type == AttentionType.ENCODER_DECODER
        slots = metadata.cross_slot_mapping if cross else metadata.slot_mapping
        if slots is None:
            raise ValueError("`slot_mapping` must be given where a cache is read. Got None.")
        kv_cache = self.save(layer, key, value, kv_cache, slots)
        spec, outs = self.spec(self._chunk_size(metadata)), []
        for part, first, schedules in (
            (metadata.prefill_metadata, 0, metadata.prefill_schedules),
            (metadata.decode_metadata, metadata.num_prefill_tokens, metadata.decode_schedules),
        ):
            if part is not None:
                rows = query[first : first + part.num_prefill_tokens + part.num_decode_tokens]
                outs.append(self._attend(layer, rows, kv_cache, part.read(cross), spec, schedules))
        return jnp.concatenate(outs), kv_cache

    def _checked(self, query: Any, key: Any, value: Any, kv_cache: Any) -> tuple[Any, Any, Any, Any]:
        """Queries, keys, values and cache as JAX's arrays, or None; the cache too if it is empty."""
        axes = ("num_tokens", "num_heads", "head_size")
        query = array("query", query, *axes)
        if query.shape[1:] != (self.num_heads, self.head_size):
            raise ValueError(
                f"`query` must be [num_tokens, {self.num_heads}, {self.head_size}]. Got query.shape={query.shape}."
            )
        if (key is None) != (value is None):
            raise ValueError("`key` and `value` must be given together or both be None.")
        axes = ("num_tokens", "num_kv_heads", "head_size")
        key, value = (None if x is None else array(name, x, *axes) for name, x in (("key", key), ("value", value)))
        if kv_cache is not None and (kv_cache := array("kv_cache", kv_cache)).size:
            kv_cache = array("kv_cache", kv_cache, "2", "num_blocks", "block_size", "num_kv_heads", "head_size")
        return query, key, value, kv_cache

    def save(
        self, layer: AttentionLayer, key: Any, value: Any, kv_cache: Array, slots: Array, layout: PageLayout = "NHD"
    ) -> Array:
        """The cache with keys and values at their slots; as it was if there are none or another layer writes them."""
        expected = cache_dtype(self.kv_cache_dtype)
        if expected is not None and kv_cache.dtype != expected:
            raise ValueError(
                f"`kv_cache` must be {expected} for kv_cache_dtype={self.kv_cache_dtype!r}. "
                f"Got kv_cache.dtype={kv_cache.dtype}."
            )
        if key is None or value is None or self.kv_sharing_target_layer_name is not None:
            return kv_cache
        if key.shape[0] != slots.shape[0]:
            raise ValueError(f"`key` must have a row for each of {slots.shape[0]} slots. Got key.shape={key.shape}.")
        scales = scale_arrays(k_scale=layer._k_scale, v_scale=layer._v_scale)
        kv_cache, _ = write_pages(kv_cache, None, key, value, slots, layout=layout, combined_pool="kv_first", **scales)
        return kv_cache

    def _attend(
        self,
        layer: AttentionLayer,
        query: Array,
        kv_cache: Array,
        read: QueriesOverPages,
        spec: AttentionSpec,
        schedules: Schedules | None,
    ) -> Any:
        """Attention over the cache."""
        schedule = None if schedules is None else schedules.of(spec)
        return attend_pages(query, kv_cache, None, read, spec=spec, schedule=schedule, **self._options(layer, query))

    def _options(self, layer: AttentionLayer, query: Array) -> dict[str, Any]:
        """Scales and slopes, as the kernels take them.

        Queries not in fp8 come undivided, and vLLM's `_q_scale` is what it divides those by.
        """
        q_scale = layer._q_scale if query.dtype.itemsize == 1 else None
        slopes = None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes, jnp.float32)
        scales = scale_arrays(q_scale=q_scale, k_scale=layer._k_scale, v_scale=layer._v_scale)
        return {"alibi_slopes": slopes, **scales}

    def _attend_uncached(self, layer, query, key, value, metadata: FlashAttentionMetadata) -> Any:
        part = metadata.prefill_metadata
        if part is None or (metadata.num_decode_tokens and self.attn_type != AttentionType.ENCODER):
            raise ValueError(
                "A batch with decodes must be given a cache to read. "
                f"Got num_prefills={metadata.num_prefills}, num_decode_tokens={metadata.num_decode_tokens}."
            )
        reads_itself = self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
        tokens = metadata.num_prefill_tokens if reads_itself else metadata.num_encoder_tokens
        if key.shape[0] != tokens:
            raise ValueError(f"`key` must have a row for each of {tokens} tokens. Got key.shape={key.shape}.")
        query_start_loc, _, key_start_loc, _ = _get_query_key_seq_metadata(part, True, self.attn_type)
        if query_start_loc is None or key_start_loc is None:
            raise ValueError("`query_start_loc` and `seq_start_loc` must be given where no cache is read. Got None.")
        options: dict[str, Any] = self._options(layer, query) | {
            "k_scale": None,
            "v_scale": None,
        }
        spec = self.spec(self._chunk_size(metadata), paged=False)
        return ragged_extend(query, key, value, query_start_loc, key_start_loc, spec=spec, **options)

    def _chunk_size(self, metadata: FlashAttentionMetadata) -> int | None:
        return metadata.attention_chunk_size if self.use_irope else None

    def _check_types_fields(self, query: Array, metadata: FlashAttentionMetadata) -> None:
        """Checks that the metadata has what this type of attention reads, and as many tokens as there are queries."""
        encoder = self.attn_type == AttentionType.ENCODER
        if encoder and not metadata.is_all_encoder_attn_metadata_set:
            raise ValueError("The metadata must have all encoder fields for encoder attention.")
        if self.attn_type == AttentionType.ENCODER_DECODER and not metadata.is_all_cross_attn_metadata_set:
            raise ValueError("The metadata must have all encoder and cross fields for cross attention.")
        tokens = metadata.num_prefill_tokens + metadata.num_decode_tokens
        tokens = metadata.num_encoder_tokens if encoder else tokens
        if query.shape[0] != tokens:
            raise ValueError(f"`query` must have the metadata's {tokens} tokens. Got query.shape={query.shape}.")
