"""The dtypes of an extend kernel: of what is stored, multiplied, and put out."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jattn_kernels.lowering.fp8_parts import num_parts
from jattn_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ExtendDtypes:
    """The dtypes of one kernel.

    Attributes:
        q: Of queries in their product with keys.
        q_parts: How many numbers stand for one of a query, which is their sum: they are columns of the same row, part
            after part.
        kv: Of keys and values in memory.
        product: Of values and probabilities in their product, and of keys that are rotated.
        out: Of the output.
        rotates: Whether keys are rotated by their positions.
    """

    q: Any
    q_parts: int
    kv: Any
    product: Any
    out: Any
    rotates: bool

    @classmethod
    def of(cls, q_dtype: Any, kv_dtype: Any, spec: AttentionSpec) -> "ExtendDtypes":
        """Those that serve queries and keys of some dtypes: fp8 keys are multiplied as they are unless rotated."""
        q, kv, rotates = jnp.dtype(q_dtype), jnp.dtype(kv_dtype), spec.rope_theta is not None
        if kv.itemsize > 1:
            return cls(q, 1, kv, kv, q, rotates)
        out, wide = jnp.dtype("bfloat16") if q.itemsize == 1 else q, jnp.dtype("float16")
        if rotates:
            return cls(wide, 1, kv, wide, out, rotates)
        return cls(kv, num_parts(q, kv), kv, wide, out, rotates)

    @classmethod
    def widest(cls, kv_itemsize: int, spec: AttentionSpec) -> "ExtendDtypes":
        """Those of keys of some size whose queries take the most memory."""
        if kv_itemsize > 1:
            return cls.of("bfloat16", "bfloat16", spec)
        return cls.of("float16", "float8_e5m2", spec)

    @property
    def dequantises(self) -> bool:
        """Whether values are dequantised before their product, and keys if they are rotated."""
        return self.kv != self.product

    @property
    def has_narrow_product(self) -> bool:
        """Whether queries and keys are multiplied as one product of 8 bits, at twice the rate of 16."""
        return self.q.itemsize == 1 and self.q_parts == 1

    @property
    def converts(self) -> bool:
        """Whether there is anything to be done with tiles between copy and product, besides clearing."""
        return self.dequantises or self.rotates

    @property
    def with_wide_queries(self) -> "ExtendDtypes":
        """Those of queries for keys that will be dequantised, whether they are rotated or not."""
        return dataclasses.replace(self, q=self.product, q_parts=1)

    @property
    def after_prepass(self) -> "ExtendDtypes":
        """Those of a kernel over keys and values that have been rotated and dequantised before it."""
        return dataclasses.replace(self, kv=self.product, rotates=False)

    def query_columns(self, head_dim: int) -> int:
        """Columns of a row of queries; of 8 bits with some without meaning, so that they are a multiple of 128."""
        columns = self.q_parts * head_dim
        return columns if self.q.itemsize > 1 else columns + -columns % 128

    def columns_at_once(self, head_dim: int) -> int:
        """Columns of q and k that a tile holds side by side: rotated keys are read by halves."""
        return head_dim // 2 if self.rotates else head_dim
