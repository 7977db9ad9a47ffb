"""KVGroupSpec: what a model says about layers that share pages, before there is a pool."""

import dataclasses

import jax.numpy as jnp

from jattn.arguments import check_whole
from jattn.kv_cache_dtype import PACKED_LATENTS
from jattn.page_lists import ALL_KEYS, AttentionSpan
from jattn_kernels.packed_latents import is_packed, packed_width
from jattn_kernels.spec import PageLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGroupSpec:
    """What a model says about a group of layers that share pages; static and hashable.

    Attributes:
        name: Told in errors.
        num_layers: Layers whose keys and values live in this group.
        num_kv_heads: Heads on this device.
        head_dim: Width of a key head.
        v_head_dim: Width of a value head; `head_dim` if None.
        page_layout: Axes of a page, "NHD" [page_size, K, H] or "HND" [K, page_size, H].
        latent: The rows of absorbed MLA, [page_size, head_dim]: one a token is key and value of all heads, the value
            its first `v_head_dim` numbers.
        span: How far back the layers see keys.

    Raises:
        ValueError: A size is below 1, or `page_layout` unknown; latent rows have more than one head, another layout, or
            values as wide as the rows.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    page_layout: PageLayout = "NHD"
    latent: bool = False
    span: AttentionSpan = ALL_KEYS

    def __post_init__(self):
        check_whole(self, "num_layers", "num_kv_heads", "head_dim")
        check_whole(self, "v_head_dim", optional=True)
        if self.page_layout not in ("NHD", "HND"):
            raise ValueError(f"`page_layout` must be one of NHD, HND. Got {self.page_layout!r}.")
        if not self.latent:
            return
        if self.num_kv_heads != 1 or self.page_layout != "NHD" or not 0 < (self.v_head_dim or 0) < self.head_dim:
            raise ValueError(
                "`latent` needs num_kv_heads=1, page_layout='NHD' and a v_head_dim smaller than head_dim. "
                f"Got num_kv_heads={self.num_kv_heads}, page_layout={self.page_layout!r}, "
                f"v_head_dim={self.v_head_dim}, head_dim={self.head_dim}."
            )

    def check_dtype(self, dtype) -> None:
        """Checks that rows can be stored so.

        Raises:
            ValueError: It is that of packed latents, and the rows are keys and values of heads.
        """
        if is_packed(dtype) and not self.latent:
            raise ValueError(
                f"`kv_cache_dtype` may be {PACKED_LATENTS} only where all layers read latent rows, as those of "
                f"DeepSeek's models do. Got keys and values of heads in the group {self.name!r}."
            )

    def latent_width(self, dtype) -> int:
        """Numbers of a latent row, or bytes of one that is packed."""
        value_dim = self.v_head_dim or 0
        return packed_width(value_dim, self.head_dim - value_dim) if is_packed(dtype) else self.head_dim

    def page_shape(self, page_size: int, head_dim: int) -> tuple[int, ...]:
        if self.latent:
            return page_size, head_dim
        if self.page_layout == "NHD":
            return page_size, self.num_kv_heads, head_dim
        return self.num_kv_heads, page_size, head_dim

    def page_bytes(self, page_size: int, dtype) -> int:
        """Bytes that one page takes over all layers, keys and values."""
        width = self.latent_width(dtype) if self.latent else self.head_dim + (self.v_head_dim or self.head_dim)
        return self.num_layers * page_size * self.num_kv_heads * width * jnp.dtype(dtype).itemsize
