"""One token's MLP with the products around it on Hopper: what is served, and the kernel's operands."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import MatmulCall, MlpCall
from jattn_kernels.mlp_operands import MlpOperands as HostOperands
from jattn_kernels.mlp_operands import rows_of_room
from jattn_kernels.mosaic.sm90.common.phases import in_one
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST
from jattn_kernels.mosaic.sm90.common.tiles import WARPS
from jattn_kernels.mosaic.sm90.mlp.kernel import PHASES, Mlp
from jattn_kernels.mosaic.sm90.mlp.operands import Made, MlpOperands, Scale, Weights
from jattn_kernels.mosaic.sm90.mlp.sizes import fits
from jattn_kernels.mosaic.sm90.mlp.units import DEPTH, SIDE, RowProduct
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.splits import Splits

_DTYPES = ("bfloat16", "float16")
_GROUP_SIZES = (32, 64, 128)


def refuses(call: MlpCall) -> str | None:
    """Why it cannot be served in one kernel, or None."""
    products, norm = [call.output, call.gate_up, call.down, *([call.next] if call.next else [])], call.norm
    sizes = {product.group_size for product in products}
    if any(product.kernel_dtype != "int4" or not product.interleaved for product in products):
        return "`mosaic` takes an MLP of a sum in one kernel with interleaved int4 weights alone."
    if len({product.zero_points for product in products}) > 1:
        return "`mosaic` takes an MLP of a sum in one kernel if all of its weights have zero points, or none."
    if sizes - {*_GROUP_SIZES} or len(sizes) > 1 or call.scales_dtype not in _DTYPES:
        return (
            f"`mosaic` takes an MLP of a sum with scales in 16 bits, all of groups of {_GROUP_SIZES[0]}, 64 or 128 "
            f"inputs, not of {', '.join(map(str, sorted(sizes, key=str)))} in {call.scales_dtype}."
        )
    if norm.num_rows != 1 or norm.dtype not in _DTYPES or call.gate_up.gate is None or call.gate_up.biased:
        return "`mosaic` takes an MLP of a sum of one row in 16 bits, without a bias before its activation."
    depths = {product.depth for product in products}
    if any(depth < LEAST or depth % DEPTH for depth in depths) or any(p.columns % SIDE for p in products):
        return (
            f"`mosaic` takes an MLP of a sum with products of at least {LEAST:,} inputs, a multiple of {DEPTH}, and of "
            f"multiples of {SIDE} columns, not of {', '.join(map(str, sorted(depths)))} inputs."
        )
    if call.left[1] < rows_of_room(call.norm.columns, call.down.depth) or not _fits(call):
        return "`mosaic` has no room for this MLP of a sum in one kernel."
    return None


def _products(call: MlpCall) -> tuple[RowProduct, RowProduct, RowProduct, RowProduct | None]:
    def product(call: MatmulCall) -> RowProduct:
        return RowProduct.of(call.depth, call.columns)

    gated = RowProduct(call.gate_up.depth, call.gate_up.columns, is_gated=True)
    return product(call.output), gated, product(call.down), None if call.next is None else product(call.next)


def _fits(call: MlpCall) -> bool:
    assert call.down.group_size is not None
    longest = max(call.output.depth, call.down.depth)
    return fits(longest, call.norm.columns, call.down.group_size, zero_points=call.down.zero_points)


def mlp_of_sum(call: MlpCall, operands: HostOperands) -> tuple[Splits, Float[Array, "1 D"], Splits | None]:
    """What the MLP adds, in splits; the sum with the product before; and the next product."""
    output, gated, down, following = _products(call)
    norms = call.norm, call.norm if call.next_norm is None else call.next_norm
    assert call.gate_up.gate is not None
    assert call.down.group_size is not None
    kernel = Mlp(
        output=output,
        gated=gated,
        down=down,
        next=following,
        activation=call.gate_up.gate,
        dtype=jnp.dtype(call.norm.dtype),
        group_size=call.down.group_size,
        eps=(norms[0].eps, norms[1].eps),
        offset=(norms[0].offset, norms[1].offset),
        rows_left=rows_of_room(call.norm.columns, call.down.depth),
        phases=PHASES if following is not None else PHASES[:-1],
    )
    norm = operands.norm
    given = MlpOperands(
        attended=operands.output.x,
        x=norm.x,
        left=norm.additions[0].parts,
        norm=Scale(norm.scale, norm.layer_index.reshape(1)),
        output=_weights(operands.output),
        gate_up=_weights(operands.gate_up),
        down=_weights(operands.down),
    )
    if operands.next is not None and operands.next_scale is not None:
        scale = Scale(operands.next_scale, operands.next_scale_layer.reshape(1))
        given = given._replace(next=_weights(operands.next), next_norm=scale)
    made = in_one(kernel, given, Made(), ("next",))
    dtype = jnp.dtype(call.norm.dtype)
    following_parts = None if made.next is None else Splits(parts=made.next, num_rows=1, dtype=dtype)
    return Splits(parts=made.parts, num_rows=1, dtype=dtype), made.total, following_parts


def _weights(operands: MatmulOperands) -> Weights:
    assert operands.scales is not None
    bias = None if operands.bias is None else operands.bias.reshape(math.prod(operands.bias.shape))
    return Weights(operands.kernel, operands.scales, operands.zero_points, bias, operands.layer_index.reshape(1))


assert WARPS == 4  # rows of a product's splits, as who reads them next takes them
