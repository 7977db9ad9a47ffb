"""Projections and the vocabulary, in a dtype or in few bits; each device holds its share of them."""

import dataclasses
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
    Unattended,
    UnattendedLatents,
    Ungated,
    Unmultiplied,
    adds_up,
    matmul,
    matmul_gated,
    matmul_gated_of_sum,
    matmul_splits,
    matmul_splits_of_sum,
    with_bias,
)
from jattn.norm import NormedRows, Unnormed
from jattn.parallel import ONE_DEVICE, Parallel

_INITIAL_DEVIATION = 0.02  # of random weights; GPT-2's


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
            self.hold_zero_points()

    def hold_zero_points(self) -> None:
        """Makes place for those of numbers in int4."""
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
        return self._stack.shape[-2 if self.scales is None else -1]

    @property
    def in_int4(self) -> bool:
        """Whether it is held so."""
        return self._stack.dtype == INT4

    @property
    def _stack(self) -> Any:
        """The kernel, or that of all layers; or its shape."""
        value = self.kernel.get_value()
        return value.stack if isinstance(value, OfLayer) else value

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
        weights, _ = self.weights()
        return isinstance(weights, QuantizedKernel) and weights.scales_kind == "channel"

    def __call__(
        self, x: Float[Array, "*batch D"] | Ungated | QuantizedRows, *, out_dtype: Any = None
    ) -> Float[Array, "*batch F"]:
        weights, layer = self.weights()
        y = matmul(x, weights, layer_index=layer, out_dtype=out_dtype)
        return y if self.bias is None else with_bias(y, self.summed_over.once(self.bias.of_layer))

    def splits(self, x: NormedRows | Unnormed | Ungated) -> Float[Array, "T F"] | Splits:
        """The same, for who adds it up; of rows that may not be normed yet."""
        weights, layer = self.weights()
        return matmul_splits(x, weights, bias=self.bias_stack, layer_index=layer)

    def gated(self, x: NormedRows, activation: Callable[[Array, Array], Array]) -> Float[Array, "T F"] | Ungated:
        """activation(gate, up) of what it returns, by its kernel or by who reads it."""
        weights, layer = self.weights()
        in_eight_bits = isinstance(weights, QuantizedKernel) and weights.dtype != INT4
        if self.bias is not None or in_eight_bits:
            return Ungated(rows=self.splits(x), activation=activation)
        return matmul_gated(x, weights, activation, layer_index=layer)

    def gated_of_sum(
        self, x: Unnormed, activation: Callable[[Array, Array], Array]
    ) -> tuple[Float[Array, "T F"] | Ungated, Float[Array, "T D"]]:
        """`gated` of rows that are added up, and their sum."""
        weights, layer = self.weights()
        if self.bias is None:
            gated, total, _ = matmul_gated_of_sum(x, weights, activation, layer_index=layer)
            return gated, total
        product, total, _ = matmul_splits_of_sum(x, weights, bias=self.bias_stack, layer_index=layer)
        return Ungated(rows=product, activation=activation), total

    def adds_up(self, x: Unnormed) -> bool:
        """Whether its kernel adds such rows up."""
        weights, layer = self.weights()
        return adds_up(x, weights, layer_index=layer)

    def later(
        self, x: Float[Array, "T D"] | Unattended | UnattendedLatents
    ) -> Float[Array, "T F"] | Splits | Unmultiplied:
        """The same, for a kernel that may take the product itself, unless weights are in fp8.

        With `plain_weights` of attention too.
        """
        weights, layer = self.weights()
        if isinstance(weights, QuantizedKernel):
            assert not isinstance(x, Unattended | UnattendedLatents)
            if weights.dtype != INT4:
                return self.splits(x)
        return Unmultiplied(rows=x, kernel=weights, layer_index=layer, bias=self.bias_stack)

    @property
    def plain_weights(self) -> tuple[Array, Int[Array, ""] | None] | None:
        """The kernel and the number of the layer, as of `ReadInPlace`, where it has no scales; a bias is beside it."""
        return self.kernel.stack_and_layer if self.scales is None else None

    @property
    def bias_stack(self) -> Float[Array, "*L F"] | None:
        """The bias, of all layers as the kernel is: of devices that sum what they return, in the part of one."""
        return None if self.bias is None else self.summed_over.once(self.bias.stack_and_layer[0])

    def weights(self) -> tuple[Array | QuantizedKernel, Int[Array, ""] | None]:
        """The kernel, with its scales if it has some, and the number of the layer if it is of all layers'.

        In int4 it is held interleaved, if it may be.
        """
        kernel, layer = self.kernel.stack_and_layer
        if self.scales is None:
            return kernel, layer
        zero_points = None if self.zero_points is None else self.zero_points.stack_and_layer[0]
        held = QuantizedKernel(values=kernel, scales=self.scales.stack_and_layer[0], zero_points=zero_points)
        return dataclasses.replace(held, interleaved=held.may_be_interleaved), layer


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
