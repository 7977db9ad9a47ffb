"""What the kernel of one token's MLP reads and stores, and what its blocks keep in shared memory."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Float32, Int, Int4, Int8


class Weights(NamedTuple):
    """Those of a product, of all layers, and which of these.

    Attributes:
        kernel: Interleaved.
        scales: Of groups of inputs.
        zero_points: Likewise; None where there are none.
        bias: Of all layers, one after the other.
    """

    kernel: Int4[Array, "L F D"]
    scales: Float[Array, "L G F"]
    zero_points: Int8[Array, "L G F"] | None
    bias: Float[Array, " LF"] | None
    layer: Int[Array, "1"]

    @property
    def of_groups(self) -> list[Any]:
        """What columns have of each group: scales, and zero points if there are some."""
        return [self.scales] if self.zero_points is None else [self.scales, self.zero_points]


class Scale(NamedTuple):
    """Of a norm, of all layers, and which of these."""

    scale: Float[Array, "L D"]
    layer: Int[Array, "1"]


class MlpOperands(NamedTuple):
    """What the kernel reads.

    Attributes:
        attended: The row of the first product.
        x: The row that its result is added to.
        left: What is added before it, in splits, in rows past whose first blocks leave each other what they wait for:
            these are 0.
        norm, next_norm: Of the sums; the second is that of `next`.
        output, gate_up, down, next: Products, the last of the next layer, or None.
        sums, total, hidden, parts: What phases leave to later ones, if another launch has done them.
    """

    attended: Float[Array, "1 A"]
    x: Float[Array, "1 D"]
    left: Float32[Array, "S R D"]
    norm: Scale
    output: Weights
    gate_up: Weights
    down: Weights
    next_norm: Scale | None = None
    next: Weights | None = None
    sums: Float32[Array, "S D"] | None = None
    total: Float[Array, "1 D"] | None = None
    hidden: Float[Array, " F"] | None = None
    parts: Float32[Array, "S R D"] | None = None


class Made(NamedTuple):
    """What phases store; None of those that another launch has.

    Attributes:
        sums, hidden: For later phases.
        total: The sum with the first product.
        parts: The MLP's result in splits, then rows of 0.
        next: Splits of the product that follows, four rows each.
    """

    sums: Any = None
    total: Any = None
    hidden: Any = None
    parts: Any = None
    next: Any = None


class Scratch(NamedTuple):
    """In shared memory."""

    kernel: Any  # (stages, 64, 256): two shares of a step's depth of 32 columns
    of_groups: tuple[Any, ...]  # (stages, 2, groups or more, 16): scales, and zero points if there are some
    rows: Any  # two CompactRows, used in turn
    total: Any  # (D,)
    sums: Any  # (buffers, consumers, 128): of each warp, its columns
    full: Any
    empty: Any
    row_full: Any
    summed: Any
    free: Any
    met: Any  # (2, warps of consumers): for rows in turn
    there: Any
