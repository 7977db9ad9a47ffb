"""KVPool: the paged memory of keys and values, as a frozen pytree that a step takes and returns."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.rotary import Angles
from jattn_kernels import rotate_and_write, write_pages
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
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    page_layout: PageLayout = "NHD"

    def page_shape(self, page_size: int, head_dim: int) -> tuple[int, int, int]:
        if self.page_layout == "NHD":
            return page_size, self.num_kv_heads, head_dim
        return self.num_kv_heads, page_size, head_dim

    def page_bytes(self, page_size: int, dtype) -> int:
        """Bytes that one page takes over all layers, keys and values."""
        width = self.head_dim + (self.v_head_dim or self.head_dim)
        return self.num_layers * page_size * self.num_kv_heads * width * jnp.dtype(dtype).itemsize


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Pages of a group of layers, all layers stacked on the first axis.

    Attributes:
        k, v: Pages, in the axes of `page_layout`. Rows that no request owns may hold anything, NaN included.
        name, page_layout: Static; see KVGroupSpec.
    """

    k: Float[Array, "L P page K H"]
    v: Float[Array, "L P page K Hv"]
    name: str = dataclasses.field(metadata={"static": True})
    page_layout: PageLayout = dataclasses.field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[2 if self.page_layout == "NHD" else 3]

    @property
    def num_slots(self) -> int:
        """Token places; a slot of this value or more is written nowhere."""
        return self.num_pages * self.page_size


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class KVPool:
    """The groups of pages of one model. Donate it to a step and keep what the step returns."""

    groups: tuple[KVGroup, ...]

    def write(
        self,
        group: int,
        layer_index: Int[Array, ""] | int,
        slots: Int[Array, " T"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K Hv"],
    ) -> "KVPool":
        """The pool with one layer's new keys and values at `slots`; rows with a slot out of range go nowhere."""
        old = self.groups[group]
        k_pages, v_pages = write_pages(old.k, old.v, k, v, slots, layout=old.page_layout, layer_index=layer_index)
        return self._with(group, k_pages, v_pages)

    def rotate_and_write(
        self,
        group: int,
        layer_index: Int[Array, ""] | int,
        slots: Int[Array, " T"],
        qkv: Float[Array, "T heads H"],
        angles: Angles,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T N H"], "KVPool"]:
        """Queries turned by their angles, and the pool with the turned keys and the values, as `write`.

        Args:
            qkv: A token's query heads, then its key heads, then as many value heads.
            implementation: Of the kernel; None lets dispatch choose.
        """
        old = self.groups[group]
        q, k_pages, v_pages = rotate_and_write(
            qkv,
            *angles,
            old.k,
            old.v,
            slots,
            num_kv_heads=old.k.shape[3 if old.page_layout == "NHD" else 2],
            layout=old.page_layout,
            layer_index=layer_index,
            implementation=implementation,
        )
        return q, self._with(group, k_pages, v_pages)

    def _with(self, group: int, k_pages: Array, v_pages: Array | None) -> "KVPool":
        new = dataclasses.replace(self.groups[group], k=k_pages, v=v_pages)
        return KVPool((*self.groups[:group], new, *self.groups[group + 1 :]))


def make_pool(specs: tuple[KVGroupSpec, ...], *, num_pages: int, page_size: int, dtype) -> KVPool:
    """A zeroed pool of `num_pages` pages of `page_size` tokens in each group, the allocator's reserved page 0 included.

    Raises:
        ValueError: No page would be left to allocate, or `page_size` is below 1.
    """
    if num_pages < 2:
        raise ValueError(f"`num_pages` must be at least 2, as page 0 is reserved. Got {num_pages}.")
    if page_size < 1:
        raise ValueError(f"`page_size` must be at least 1. Got {page_size}.")

    def group(spec: KVGroupSpec) -> KVGroup:
        def pages(head_dim):
            return jnp.zeros((spec.num_layers, num_pages, *spec.page_shape(page_size, head_dim)), dtype)

        return KVGroup(
            k=pages(spec.head_dim),
            v=pages(spec.v_head_dim or spec.head_dim),
            name=spec.name,
            page_layout=spec.page_layout,
        )

    return KVPool(tuple(group(spec) for spec in specs))
