"""Layers that model families share; each device holds its share of heads, hidden units and vocabulary."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jattn.matmul import (
    FP8,
    INT4,
    QuantizedKernel,
    QuantizedRows,
    Splits,
    Ungated,
    added,
    matmul,
    matmul_splits,
    with_bias,
)
from jattn.norm import NormedRows, Unnormed, add_rms_norm, rms_norm
from jattn.parallel import ONE_DEVICE, Parallel

_INITIAL_DEVIATION = 0.02  # of random weights; GPT-2's
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _gate(activation: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda gate, up: activation(gate) * up


GATES = {name: _gate(activation) for name, activation in ACTIVATIONS.items()}


def random_weights(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> nnx.Param:
    """Weights to start a training from, normal and small."""
    return nnx.Param(nnx.initializers.normal(_INITIAL_DEVIATION)(rngs.params(), shape, dtype))


class OfLayer(NamedTuple):
    """A layer's weights, read from the stack of all layers' where they are used.

    Attributes:
        stack: [L, ...].
        number: Of the layer.
    """

    stack: Array
    number: Int[Array, ""]


class Stream(NamedTuple):
    """The residual stream between layers.

    Attributes:
        rows: As far as they are added up.
        addition: What the layer before adds to them, for the next norm to add, of several devices each one's part; None
            if nothing is left.
    """

    rows: Float[Array, "T D"]
    addition: Float[Array, "T D"] | Splits | None = None

    def summed(self, parallel: Parallel) -> Float[Array, "T D"]:
        """The rows with what is left."""
        return self.rows if self.addition is None else self.rows + parallel.all_reduce(added(self.addition))


class ReadInPlace(nnx.Param):
    """A layer's weights; in a loop over layers an `OfLayer` of all layers', of which no copy is made."""

    @property
    def stack_and_layer(self) -> tuple[Array, Int[Array, ""] | None]:
        """The stack of all layers' weights and the number of this one; the weights alone and None outside a loop."""
        value = self.get_value()
        return (value.stack, value.number) if isinstance(value, OfLayer) else (value, None)

    @property
    def of_layer(self) -> Array:
        """This layer's weights by themselves, for XLA, which reads them in place where it reads them once."""
        stack, number = self.stack_and_layer
        return stack if number is None else jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


class Linear(nnx.Module):
    """A projection, without bias unless asked for; its kernel is [inputs, outputs], [outputs, inputs] in few bits.

    Args:
        summed_over: Devices that share the inputs, and sum what each returns: the bias is in the part of one.

    Attributes:
        scales: Of a kernel in fp8, [outputs, 1], or int4, [outputs, groups of inputs]; None of others.
        zero_points: Of a kernel in int4, [outputs, groups of inputs]; None where there are none.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        summed_over: Parallel = ONE_DEVICE,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.summed_over = summed_over
        self.kernel = ReadInPlace(random_weights(rngs, (inputs, outputs), dtype)[...])
        self.scales: ReadInPlace | None = None
        self.zero_points: ReadInPlace | None = None
        self.bias = ReadInPlace(jnp.zeros(outputs, dtype)) if bias else None

    def hold_in_fp8(self) -> None:
        """Makes place for weights in fp8 in place of its own; of shapes alone, as `nnx.eval_shape` gives them."""
        self._hold(FP8, jnp.float32, self.inputs)

    def hold_in_int4(self, group_size: int, *, scales_dtype: Any = jnp.bfloat16, zero_points: bool = False) -> None:
        """Likewise in int4.

        Args:
            group_size: Inputs that share a scale; divides them.
            zero_points: Whether there are some.
        """
        self._hold(INT4, scales_dtype, group_size)
        if zero_points:
            assert self.scales is not None
            shape = self.scales.get_value().shape
            self.zero_points = nnx.data(ReadInPlace(jax.ShapeDtypeStruct(shape, jnp.int8)))

    def _hold(self, dtype: Any, scales_dtype: Any, group_size: int) -> None:
        *layers, inputs, outputs = self.kernel.get_value().shape
        of_scales = (outputs, inputs // group_size)[:: -1 if dtype == INT4 else 1]
        shapes = {dtype: (*layers, outputs, inputs), scales_dtype: (*layers, *of_scales)}
        values, scales = (ReadInPlace(jax.ShapeDtypeStruct(shape, dtype)) for dtype, shape in shapes.items())
        self.kernel, self.scales = values, nnx.data(scales)

    @property
    def inputs(self) -> int:
        """Numbers of a row that it takes."""
        return self.kernel.get_value().shape[-2 if self.scales is None else -1]

    def reorder_outputs(self, order: Int[Array, " F"]) -> None:
        """Takes the outputs of the given numbers, in this order, of all layers of a stack."""
        of_kernel = -1 if self.scales is None else -2
        of_scales = -1 if self.kernel.get_value().dtype == INT4 else -2
        in_few_bits = ((leaf, of_scales) for leaf in (self.scales, self.zero_points))
        for leaf, axis in ((self.kernel, of_kernel), *in_few_bits, (self.bias, -1)):
            if leaf is not None:
                leaf[...] = jnp.take(leaf[...], order, axis=axis)

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded to fp8 before they are multiplied, each by one scale."""
        weights, _ = self._weights()
        return isinstance(weights, QuantizedKernel) and weights.scales_kind == "channel"

    def __call__(
        self, x: Float[Array, "*batch D"] | Ungated | QuantizedRows, *, out_dtype: Any = None
    ) -> Float[Array, "*batch F"]:
        weights, layer = self._weights()
        y = matmul(x, weights, layer_index=layer, out_dtype=out_dtype)
        return y if self.bias is None else with_bias(y, self.summed_over.once(self.bias.of_layer))

    def splits(self, x: NormedRows | Unnormed | Ungated) -> Float[Array, "T F"] | Splits:
        """The same, for who adds it up; of rows that may not be normed yet."""
        weights, layer = self._weights()
        bias = None if self.bias is None else self.summed_over.once(self.bias.stack_and_layer[0])
        return matmul_splits(x, weights, bias=bias, layer_index=layer)

    def _weights(self) -> tuple[Array | QuantizedKernel, Int[Array, ""] | None]:
        """The kernel, with its scales if it has some, and the number of the layer if it is of all layers'."""
        kernel, layer = self.kernel.stack_and_layer
        if self.scales is None:
            return kernel, layer
        zero_points = None if self.zero_points is None else self.zero_points.stack_and_layer[0]
        return QuantizedKernel(values=kernel, scales=self.scales.stack_and_layer[0], zero_points=zero_points), layer


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

    def later(self, x: Float[Array, "T D"]) -> Float[Array, "T D"] | Unnormed:
        """The same, for one product to take it as it reads x."""
        if self.scale is None:
            return self(x)
        stack, number = self.scale.stack_and_layer
        return Unnormed(rows=x, scale=stack, layer_index=number, eps=self.eps, offset=self.offset)

    def of_sum(
        self,
        x: Float[Array, "T D"],
        addition: Float[Array, "T D"] | Splits,
        *,
        parallel: Parallel = ONE_DEVICE,
        rounded: bool,
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
    """The norm of all heads of a projection together; over several devices by `of_all`.

    Args:
        size: Numbers of this device's heads.
    """

    def __init__(self, size: int, *, eps: float, dtype: Any):
        super().__init__(size, eps=eps, dtype=dtype)

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


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up side by side in one kernel."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
        parallel: Parallel,
        units_name: str = "`intermediate_size`",
    ):
        self.activation = activation
        units = parallel.share(intermediate_size, units_name)
        self.gate_up_proj = Linear(hidden_size, 2 * units, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(units, hidden_size, bias=bias, summed_over=parallel, dtype=dtype, rngs=rngs)

    def __call__(self, x: NormedRows) -> Float[Array, "T D"]:
        """What this device's hidden units add to the result."""
        return self.down_proj(self._activated(x))

    def splits(self, x: NormedRows) -> Float[Array, "T D"] | Splits:
        """The same, for who adds it up."""
        return self.down_proj.splits(self._activated(x))

    def _activated(self, x: NormedRows) -> Ungated:
        return Ungated(rows=self.gate_up_proj.splits(x), activation=GATES[self.activation])

    @property
    def rounds_rows(self) -> bool:
        """Whether it rounds what it is given to fp8 first."""
        return self.gate_up_proj.rounds_rows

    @property
    def in_few_bits(self) -> bool:
        """Whether its last projection is, whose kernels leave sums to be added up."""
        return self.down_proj.scales is not None


class PlainMLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
        parallel: Parallel,
    ):
        self.activation = activation
        units = parallel.share(intermediate_size, "`intermediate_size`")
        self.up_proj = Linear(hidden_size, units, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(units, hidden_size, bias=bias, summed_over=parallel, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """What this device's hidden units add to the result."""
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))


class Vocabulary(nnx.Module):
    """The embedding of tokens and, unless it is tied, the projection back to logits; split by token over devices."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied: bool, dtype: Any, rngs: nnx.Rngs, parallel: Parallel
    ):
        self.share = parallel.share(vocab_size, "`vocab_size`")
        self.embedding = random_weights(rngs, (self.share, hidden_size), dtype)
        self.lm_head = None if tied else Linear(hidden_size, self.share, dtype=dtype, rngs=rngs)

    def embed(self, input_ids: Int[Array, " T"], parallel: Parallel) -> Float[Array, "T D"]:
        if parallel.axis is None:
            return self.embedding[...][input_ids]
        row = input_ids - parallel.first_of(self.share)
        mine = (row >= 0) & (row < self.share)
        rows = self.embedding[...][jnp.where(mine, row, 0)]
        return parallel.all_reduce(jnp.where(mine[:, None], rows, jnp.zeros_like(rows)))

    def logits(self, hidden: Float[Array, "B D"]) -> Float32[Array, "B V_local"]:
        """Of this device's tokens; float32 whatever the dtype of the weights: close logits stay apart."""
        if self.lm_head is None:  # the kernels take no transposed weights but as a copy
            return matmul(hidden, self.embedding[...].T, out_dtype=jnp.float32, implementation="xla")
        return self.lm_head(hidden, out_dtype=jnp.float32)
