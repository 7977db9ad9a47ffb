"""Schedules of a batch for the layers that will read it, made once for all of them."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from jattn.attention.metadata import QueriesOverPages
from jattn.attention.paged_call import schedule_of_call
from jattn.dtype_names import named_dtype
from jattn.kv_cache_dtype import cache_dtype
from jattn.pytree import pytree, static
from jattn_kernels.spec import AttentionSpec, PageLayout


class _Kind(NamedTuple):
    spec: AttentionSpec
    kv_dtype: str
    features: tuple[str, ...]


@pytree()
class Schedules:
    """The schedules of some kinds of layer; those of other kinds are made in their calls.

    Attributes:
        kinds: The kinds; static.
        dtype: Name of the queries' dtype.
        page_size: Tokens a page.
        made: The schedule of each kind for one batch; None where its kernels need none.
    """

    kinds: tuple[_Kind, ...] = static()
    dtype: str = static()
    page_size: int = static()
    made: tuple[Any, ...] = ()

    def over(self, read: QueriesOverPages, num_tokens: int) -> "Schedules":
        """The same of another batch of that many queries."""
        facts = {"num_tokens": num_tokens, "dtype": self.dtype, "page_size": self.page_size}
        return dataclasses.replace(
            self, made=tuple(schedule_of_call(read, **facts, **kind._asdict()) for kind in self.kinds)
        )

    def of(self, spec: AttentionSpec) -> Any:
        """The schedule of layers with these facts; None if there is none."""
        return next((made for kind, made in zip(self.kinds, self.made, strict=False) if kind.spec == spec), None)


def schedules_of(
    impls: Iterable[Any], dtype: Any, chunk_size: int | None, page_size: int, page_layout: PageLayout = "NHD"
) -> Schedules | None:
    """The kinds of layer that are to have schedules, none made yet; None if the queries' dtype is not known."""
    if dtype is None:
        return None
    dtype, kinds = named_dtype("dtype", dtype), {}
    for impl in impls:
        if impl.attn_type != "decoder":
            continue  # it reads other keys, or none in pages
        spec = impl.spec(chunk_size if impl.use_irope else None, page_layout)
        stored = cache_dtype(impl.kv_cache_dtype)
        features = ("k_scale", "v_scale") if stored is not None and stored.itemsize == 1 else ()
        features += () if impl.alibi_slopes is None else ("alibi_slopes",)
        kinds[_Kind(spec, (stored or dtype).name, features)] = None
    return Schedules(tuple(kinds), dtype.name, page_size)
