"""KVPool: the paged memory of keys and values, as a frozen pytree that a step takes and returns."""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn.arguments import array, in_words, instance, integers, scale_arrays, whole, whole_number
from jattn.dtype_names import named_dtype
from jattn.kv_group_spec import KVGroupSpec
from jattn.matmul import Splits
from jattn.norm import HeadNorms
from jattn.page_lists import ALL_KEYS, AttentionSpan, WindowList
from jattn.pytree import pytree, static
from jattn.rotary import Angles
from jattn_kernels import (
    RawLatents,
    RawQueries,
    absorb_and_write,
    mla_write,
    rotate_and_write,
    write_latent_pages,
    write_pages,
)
from jattn_kernels.packed_latents import DTYPE as PACKED
from jattn_kernels.packed_latents import is_packed, unpacked_width
from jattn_kernels.shapes.arrays import check_layer_index
from jattn_kernels.spec import PageLayout


@pytree(kw_only=True)
class KVGroup:
    """Pages of a group of layers, all layers stacked on the first axis.

    Attributes:
        k, v: Pages, in the axes of `page_layout`. Rows that no request owns may hold anything, NaN included. Latent
            rows are `k`, without an axis of heads, and `v` is None; packed ones are bytes.
        name, page_layout: Static; see KVGroupSpec.
        page_list: Which of the pool's page lists its pages are of, from 0 on; static.
        span: How far back that list keeps pages; static.
    """

    k: Float[Array, "L P page K H"] | Shaped[Array, "L P page W"]
    v: Float[Array, "L P page K Hv"] | None
    name: str = static()
    page_layout: PageLayout = static()
    page_list: int = static(default=0)
    span: AttentionSpan = static(default=ALL_KEYS)

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


@typing.runtime_checkable
class PoolLayer(Protocol):
    """What says where a layer's keys are; an AttentionLayer does."""

    @property
    def layer_id(self) -> Int[Array, ""] | int: ...
    @property
    def group(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


@pytree()
class KVPool:
    """The groups of pages of one model. Donate it to a step and keep what the step returns."""

    groups: tuple[KVGroup, ...]

    def group(self, number: int) -> KVGroup:
        """The group of that number.

        Raises:
            ValueError: There is none.
        """
        rule = f"`group` must be one of the pool's {len(self.groups)} groups, from 0 on."
        return self.groups[whole_number(number, rule, 0, len(self.groups))]

    @in_words(k_pages="pool", v_pages="pool")
    def write(
        self,
        group: int,
        layer_index: Int[Array, ""] | int,
        slots: Int[Array, " T"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K Hv"],
        k_scale: Float[Array, "..."] | None = None,
        v_scale: Float[Array, "..."] | None = None,
    ) -> "KVPool":
        """The pool with one layer's new keys and values at `slots`; rows with a slot out of range go nowhere.

        Args:
            k_scale, v_scale: What is stored is row / scale: for all heads, or for each; None is 1.

        Raises:
            ValueError: There is no such group, or a shape or dtype is wrong.
        """
        slots = integers("slots", slots, "tokens")
        k, v = array("k", k, "tokens", "heads", "width"), array("v", v, "tokens", "heads", "width")
        self.group(group)
        return self._heads_written(group, layer_index, slots, k, v, **scale_arrays(k_scale=k_scale, v_scale=v_scale))

    def written(
        self,
        layer: PoolLayer,
        slots: Int[Array, " T"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K Hv"] | None,
        k_scale: Float[Array, "..."] | None = None,
        v_scale: Float[Array, "..."] | None = None,
    ) -> "KVPool":
        """The pool with a layer's new rows at `slots`, of arrays that are known to fit; see `set_kv_buffer`."""
        old = self.groups[layer.group]
        if old.v is not None:
            return self._heads_written(layer.group, layer.layer_id, slots, k, v, k_scale=k_scale, v_scale=v_scale)
        c_kv, k_pe = jnp.split(k[:, 0], (layer.v_head_dim,), axis=-1)
        pages = write_latent_pages(old.k, c_kv, k_pe, slots, layer_index=layer.layer_id, kv_scale=k_scale)
        return self.with_pages(layer.group, pages, None)

    def _heads_written(self, group: int, layer_index, slots, k, v, **scales) -> "KVPool":
        old = self.groups[group]
        pages = write_pages(old.k, old.v, k, v, slots, layout=old.page_layout, layer_index=layer_index, **scales)
        return self.with_pages(group, *pages)

    def get_key_buffer(
        self, layer_id: Int[Array, ""] | int, group: int = 0
    ) -> Float[Array, "slots K H"] | Shaped[Array, "slots 1 W"]:
        """A layer's keys by slot; latent rows as of one head, packed ones as bytes. Outside jit this copies them."""
        return self._by_slot(self.group(group).k, layer_id, group)

    def get_kv_buffer(
        self, layer_id: Int[Array, ""] | int, group: int = 0
    ) -> tuple[Float[Array, "slots K H"], Float[Array, "slots K Hv"]]:
        """A layer's keys and values by slot. Outside jit this copies them.

        Raises:
            ValueError: The group holds latent rows, of which `get_key_buffer` gives the whole.
        """
        values = self.group(group).v
        if values is None:
            raise ValueError(f"`get_kv_buffer` needs values. Got the latent group {self.groups[group].name!r}.")
        return self.get_key_buffer(layer_id, group), self._by_slot(values, layer_id, group)

    @in_words(k="cache_k", v="cache_v", slots="loc", layer_index="layer.layer_id", group="layer.group")
    def set_kv_buffer(
        self,
        layer: PoolLayer,
        loc: Int[Array, " T"],
        cache_k: Float[Array, "T K H"],
        cache_v: Float[Array, "T K Hv"],
        k_scale: Float[Array, "..."] | None = None,
        v_scale: Float[Array, "..."] | None = None,
    ) -> "KVPool":
        """The pool with a layer's new keys and values at slots `loc`; SGLang's arguments over `write`.

        In a latent group `cache_k` has the whole rows, of one head, and `cache_v` and `v_scale` are not read.
        """
        instance("layer", layer, PoolLayer)
        old = self.group(layer.group)
        if old.v is not None:
            return self.write(layer.group, layer.layer_id, loc, cache_k, cache_v, k_scale, v_scale)
        cache_k, width = array("cache_k", cache_k, "tokens", "1", "width"), old.k.shape[-1]
        if is_packed(old.k.dtype):
            width = unpacked_width(width, layer.v_head_dim)
        if cache_k.shape[1:] != (1, width):
            raise ValueError(
                f"`cache_k` must be [tokens, 1, {width}], the latent rows. Got cache_k.shape={cache_k.shape}."
            )
        return self.written(layer, loc, cache_k, None, k_scale)

    def _by_slot(self, pages: Array, layer_id: Int[Array, ""] | int, group: int) -> Array:
        with in_words(layer_index="layer_id"):
            check_layer_index(layer_id, pages.shape[0])
        pages = pages[layer_id]
        if self.groups[group].v is None:
            pages = pages[:, :, None]
        if self.groups[group].page_layout == "HND":
            pages = pages.swapaxes(1, 2)
        return pages.reshape(-1, *pages.shape[2:])

    def rotate_and_write(
        self,
        group: int,
        layer_index: Int[Array, ""] | int,
        slots: Int[Array, " T"],
        qkv: Float[Array, "T heads H"] | Splits,
        angles: Angles,
        *,
        norms: HeadNorms | None = None,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T N H"], "KVPool"]:
        """Queries turned by their angles, and the pool with the turned keys and the values, as `write`.

        Args:
            qkv: A token's query heads, then its key heads, then as many value heads.
            norms: Of query and key heads before they turn.
            implementation: Of the kernel; None lets dispatch choose.
        """
        old = self.groups[group]
        assert old.v is not None, "latent rows turn in part only: their model turns them"
        q, k_pages, v_pages = rotate_and_write(
            qkv,
            *angles,
            old.k,
            old.v,
            slots,
            num_kv_heads=old.k.shape[3 if old.page_layout == "NHD" else 2],
            layout=old.page_layout,
            layer_index=layer_index,
            norms=norms,
            implementation=implementation,
        )
        return q, self.with_pages(group, k_pages, v_pages)

    def latents_written(
        self,
        group: int,
        layer_index: Int[Array, ""] | int,
        slots: Int[Array, " T"],
        latents: RawLatents,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T W"], "KVPool"]:
        """Latent rows that are made, and the pool with them.

        Args:
            implementation: Of the kernel; None lets dispatch choose.
        """
        pages = self.groups[group].k
        rows, pages = mla_write(latents, pages, slots, layer_index=layer_index, implementation=implementation)
        return rows, self.with_pages(group, pages, None)

    def absorbed_and_written(
        self,
        group: int,
        layer_index: Int[Array, ""] | int,
        slots: Int[Array, " T"],
        queries: RawQueries,
        latents: RawLatents,
        *,
        implementation: str | None = None,
    ) -> tuple[tuple[Float[Array, "T N C"], Float[Array, "T N R"]], "KVPool"]:
        """Absorbed queries and what turns of them, and the pool with latent rows that are made, by one kernel."""
        pages = self.groups[group].k
        absorbed, turned, _, pages = absorb_and_write(
            queries, latents, pages, slots, layer_index=layer_index, implementation=implementation
        )
        return (absorbed, turned), self.with_pages(group, pages, None)

    def with_pages(self, group: int, k_pages: Array, v_pages: Array | None) -> "KVPool":
        """The pool with what a kernel has written in place of a group's pages."""
        new = dataclasses.replace(self.groups[group], k=k_pages, v=v_pages)
        return KVPool((*self.groups[:group], new, *self.groups[group + 1 :]))


def make_pool(
    specs: tuple[KVGroupSpec, ...], *, num_pages: int, page_size: int, dtype, windows: Sequence[WindowList] = ()
) -> KVPool:
    """A zeroed pool of `num_pages` pages of `page_size` tokens in each group, the allocator's reserved page 0 included.

    Args:
        windows: Page lists beside the first one; groups of such a span have the list's number of pages.

    Raises:
        ValueError: No page would be left to allocate, `page_size` is below 1, or `dtype` none that is taken; or it is
            that of packed latents, and a group has keys and values of heads.
    """
    if not isinstance(specs, tuple | list) or not all(isinstance(spec, KVGroupSpec) for spec in specs):
        raise ValueError(f"`specs` must be a tuple of KVGroupSpec. Got {specs!r}.")
    for pages in (num_pages, *(window.num_pages for window in windows)):
        whole_number(pages, "`num_pages` must be a whole number of at least 2, as page 0 is reserved.", 2)
    whole("page_size", page_size)
    is_of_bytes = not isinstance(dtype, str) and is_packed(dtype)
    dtype = jnp.dtype(PACKED) if is_of_bytes else named_dtype("dtype", dtype)
    for spec in specs:
        spec.check_dtype(dtype)

    def group(spec: KVGroupSpec) -> KVGroup:
        page_list, window = list_of(spec, num_pages, windows)

        def pages(head_dim):
            return jnp.zeros((spec.num_layers, window.num_pages, *spec.page_shape(page_size, head_dim)), dtype)

        return KVGroup(
            k=pages(spec.latent_width(dtype) if spec.latent else spec.head_dim),
            v=None if spec.latent else pages(spec.v_head_dim or spec.head_dim),
            name=spec.name,
            page_layout=spec.page_layout,
            page_list=page_list,
            span=window.span,
        )

    return KVPool(tuple(group(spec) for spec in specs))


def list_of(spec: KVGroupSpec, num_pages: int, windows: Sequence[WindowList]) -> tuple[int, WindowList]:
    """The number of a group's page list, and the list: the one that keeps all, unless there is one of its span."""
    lists = (WindowList(ALL_KEYS, num_pages), *windows)
    number = next((number for number, window in enumerate(lists) if window.span == spec.span), 0)
    return number, lists[number]


def pool_bytes(
    specs: Iterable[KVGroupSpec], *, num_pages: int, page_size: int, dtype, windows: Sequence[WindowList] = ()
) -> int:
    """Bytes that such a pool takes."""
    return sum(list_of(spec, num_pages, windows)[1].num_pages * spec.page_bytes(page_size, dtype) for spec in specs)
