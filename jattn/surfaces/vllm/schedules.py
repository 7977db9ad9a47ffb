"""Schedules of a batch for the layers that will read it, made once for all of them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jattn.attention.metadata import QueriesOverPages
from jattn.attention.paged_call import PagedCall
from jattn.dtype_names import named_dtype
from jattn.kv_cache_dtype import cache_dtype
from jattn.pytree import pytree, static
from jattn_kernels.spec import AttentionSpec, PageLayout


@pytree()
class Schedules:
    """The schedules of some kinds of layer; those of other kinds are made in their calls.

    Attributes:
        calls: Of each kind; static.
        made: The schedule of each kind for one batch; None where its kernels need none.
    """

    calls: tuple[PagedCall, ...] = static()
    made: tuple[Any, ...] = ()

    def over(self, read: QueriesOverPages, num_tokens: int) -> "Schedules":
        """The same of another batch of that many queries."""
        return dataclasses.replace(self, made=tuple(call.schedule(read, num_tokens) for call in self.calls))

    def of(self, spec: AttentionSpec) -> Any:
        """The schedule of layers with these facts; None if there is none."""
        return next((made for call, made in zip(self.calls, self.made, strict=False) if call.spec == spec), None)


def schedules_of(
    impls: Iterable[Any], dtype: Any, chunk_size: int | None, page_size: int, page_layout: PageLayout = "NHD"
) -> Schedules | None:
    """The kinds of layer that are to have schedules, none made yet; None if the queries' dtype is not known."""
    if dtype is None:
        return None
    dtype, calls = named_dtype("dtype", dtype), {}
    for impl in impls:
        if impl.attn_type != "decoder":
            continue  # it reads other keys, or none in pages
        stored = cache_dtype(impl.kv_cache_dtype)
        features = ("k_scale", "v_scale") if stored is not None and stored.itemsize == 1 else ()
        call = PagedCall(
            spec=impl.spec(chunk_size if impl.use_irope else None, page_layout),
            dtype=dtype.name,
            kv_dtype=(stored or dtype).name,
            page_size=page_size,
            features=features if impl.alibi_slopes is None else (*features, "alibi_slopes"),
        )
        calls[call] = None
    return Schedules(tuple(calls))
