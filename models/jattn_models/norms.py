"""Norms of rows; each device has its share of heads that are normed together."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from jattn.matmul import Splits, Unmultiplied
from jattn.norm import NormedRows, Unnormed, add_rms_norm, rms_norm
from jattn.parallel import Parallel
from jattn_models.layers import OfLayer, ReadInPlace


class NormScale(ReadInPlace):
    """The scale of a norm: [D]."""


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32; the result has the input's dtype.

    Args:
        offset: What the factor is above the scale: 1 where a checkpoint stores by how much it differs from 1.
        scaled: Whether there is a factor at all.
    """

    def __init__(self, size: int, *, eps: float, offset: float = 0.0, scaled: bool = True, dtype: Any):
        self.eps = eps
        self.offset = offset
        self.scale = NormScale(jnp.full(size, 1.0 - offset, dtype)) if scaled else None

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        if self.scale is None:
            wide = x.astype(jnp.float32)
            return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)).astype(x.dtype)
        stack, number = self.scale.stack_and_layer
        return rms_norm(x, stack, eps=self.eps, offset=self.offset, layer_index=number)

    def later(self, x: Float[Array, "T D"], *additions: Float[Array, "T D"] | Splits | Unmultiplied) -> Unnormed:
        """The same of x and what is added to it, for one product to take it as it reads x."""
        assert self.scale is not None
        stack, number = self.scale.stack_and_layer
        facts: dict[str, Any] = {"layer_index": number, "eps": self.eps, "offset": self.offset}
        return Unnormed(rows=x, additions=additions, scale=stack, **facts)

    def of_sum(
        self, x: Float[Array, "T D"], addition: Float[Array, "T D"] | Splits, *, parallel: Parallel, rounded: bool
    ) -> tuple[Float[Array, "T D"], NormedRows]:
        """x and what is added to it, and the norm of that, which may be rounded to fp8 if asked.

        Args:
            addition: Of several devices, this one's part.
        """
        assert self.scale is not None
        stack, number = self.scale.stack_and_layer
        options: dict[str, Any] = {"eps": self.eps, "offset": self.offset, "layer_index": number}
        if parallel.axis is not None:
            return parallel.add_and_norm(x, addition, stack, **options)
        return add_rms_norm(x, addition, stack, rounded=rounded, **options)


class ProjectionNorm(RMSNorm):
    """The norm of all heads of a projection together, of which each device has some: by `of_all`."""

    @classmethod
    def of_all(
        cls, *normed: tuple["ProjectionNorm", Float[Array, "T N H"]], parallel: Parallel
    ) -> list[Float[Array, "T N H"]]:
        """Each projection by its norm; one sum over devices for all, as two might overlap."""
        rows = [x.reshape(x.shape[0], -1) for _, x in normed]
        if parallel.axis is None:
            results = [norm(x) for (norm, _), x in zip(normed, rows, strict=True)]
        else:
            squares = [jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) for x in rows]
            squares = jnp.split(parallel.all_reduce(jnp.concatenate(squares, axis=-1)), len(rows), axis=-1)
            shares = zip(normed, rows, squares, strict=True)
            results = [norm._of_share(*each, devices=parallel.size) for (norm, _), *each in shares]
        return [result.reshape(x.shape) for result, (_, x) in zip(results, normed, strict=True)]

    def _of_share(self, x: Float[Array, "T D"], squares: Float32[Array, "T 1"], *, devices: int) -> Float[Array, "T D"]:
        """The norm of this device's part of rows, given the sums of squares of all parts."""
        assert self.scale is not None
        scale, wide = self.scale.get_value(), x.astype(jnp.float32)
        if isinstance(scale, OfLayer):
            scale = scale.stack[scale.number]
        wide *= jax.lax.rsqrt(squares / (devices * x.shape[-1]) + self.eps)
        return (wide * scale.astype(jnp.float32)[None]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Norm over the last axis by its mean and deviation, in float32; the result has the input's dtype."""

    def __init__(self, size: int, *, eps: float, dtype: Any):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale, bias = (jnp.broadcast_to(part[...].astype(jnp.float32), x.shape) for part in (self.scale, self.bias))
        return (wide * scale + bias).astype(x.dtype)
