"""Calls over pages: their schedule, and attention itself, whether sequences have as many queries each or not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jattn.attention.metadata import QueriesOverPages
from jattn_kernels import make_schedule, mla_decode, mla_extend, paged_decode, paged_extend
from jattn_kernels.call import Operation
from jattn_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The static facts of calls over pages, which layers of one kind share.

    Attributes:
        spec: Of the layers.
        dtype, kv_dtype: Of queries and pages.
        page_size: Tokens a page.
        latent: Whether the pages hold latent rows.
        features: Names of the kernels' optional arguments that the calls are given beside those of what they read.
        implementation: Which kernels to use; None lets dispatch choose.
    """

    spec: AttentionSpec
    dtype: Any
    kv_dtype: Any
    page_size: int
    latent: bool = False
    features: tuple[str, ...] = ()
    implementation: str | None = None

    @property
    def decode(self) -> Operation:
        """The operation where sequences have as many queries each."""
        return "mla_decode" if self.latent else "paged_decode"

    @property
    def extend(self) -> Operation:
        """The operation where they have not."""
        return "mla_extend" if self.latent else "paged_extend"

    @property
    def facts(self) -> dict[str, Any]:
        """What is told of a call beside its operation."""
        return {name: value for name, value in vars(self).items() if name != "latent"}

    def schedule(self, read: QueriesOverPages, num_tokens: int) -> Any:
        """The schedule of a batch of that many queries, once for all layers; None where its kernels need none."""
        if read.q_start is not None and (self.spec.window_left is not None or self.spec.chunk_size is not None):
            return None  # a schedule's keys are those that the last queries of a sequence see
        of_read = [name for name in ("q_start", "q_positions", "custom_mask") if getattr(read, name) is not None]
        facts: dict[str, Any] = self.facts | {"features": (*of_read, *self.features)}
        return make_schedule(
            read.seq_lens,
            read.cu_q_lens,
            num_tokens=num_tokens if read.q_len is None else read.q_len,
            operation=self.extend if read.q_len is None else self.decode,
            max_seq_len=read.page_table.shape[1] * self.page_size,
            **facts,
        )


def attend_pages(
    q: Float[Array, "T N H"] | tuple[Float[Array, "T N C"], Float[Array, "T N R"]],
    k_pages: Shaped[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    read: QueriesOverPages,
    *,
    spec: AttentionSpec,
    latent: bool = False,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    sinks: Float[Array, "*L N"] | None = None,
    schedule: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Output of the queries, and their lse if asked for.

    Args:
        q: Over latent rows perhaps in two parts, the second turned.
        sinks: Of the layer's heads, or of all layers; None for none.
        k_pages: Latent rows too, or keys and values in one array; `v_pages` is then None.
        options: What else the kernels take and `read` has not.
    """
    decode, positions = read.q_len is not None, read.q_positions
    if decode:
        q = jax.tree.map(lambda part: part.reshape(-1, read.q_len, *part.shape[1:]), q)
        positions = None if positions is None else positions.reshape(-1, read.q_len)
    options |= {"spec": spec, "q_start": read.q_start, "q_positions": positions, "custom_mask": read.custom_mask}
    places = (read.page_table, read.seq_lens) if decode else (read.page_table, read.seq_lens, read.cu_q_lens)
    attend: Any
    if latent:
        attend = mla_decode if decode else mla_extend
        both = q if isinstance(q, tuple) else jnp.split(q, (spec.value_dim,), axis=-1)
        parts = (*both, k_pages)
        options |= {"kv_scale": k_scale, "schedule": schedule}
    else:
        attend = paged_decode if decode else paged_extend
        parts = (q, k_pages, v_pages)
        options |= {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "schedule": schedule}
    result = attend(*parts, *places, return_lse=return_lse, **options)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), result) if decode else result
