"""What min-p, top-k and top-p keep, in jnp: a search digit by digit, which sorts nothing."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from jattn_kernels.call import Device, FiltersCall
from jattn_kernels.lowering.amounts import half_bits, unit
from jattn_kernels.operands import FiltersOperands
from jattn_kernels.temperature import over_temperature

_FEW_KEYS = 2**22  # which a GPU's cache holds

Search = Callable[[], Bool[Array, "B V"]]


def kept_tokens(call: FiltersCall, operands: FiltersOperands) -> Bool[Array, "B V"]:
    """Which tokens are kept; in a batch that asks for no filter nothing is searched for."""
    logits = jnp.where(jnp.isnan(operands.logits), -jnp.inf, operands.logits)
    scaled = over_temperature(logits, operands.temperature)
    is_drawn = operands.temperature > 0
    is_filtered = (operands.top_k > 0) | (operands.top_p < 1) | (operands.min_p > 0)
    kept = _where_any(
        is_drawn & is_filtered, call.device, lambda: _kept(call.device, logits, scaled, operands), logits.shape
    )
    return kept | ~is_drawn[:, None]


def _kept(
    device: Device, logits: Float[Array, "B V"], scaled: Float[Array, "B V"], operands: FiltersOperands
) -> Bool[Array, "B V"]:
    """The tokens that min-p, then top-k and then top-p leave; at least one in a row that is not all -inf."""
    vocab_size = logits.shape[1]
    keys = _sortable(logits)
    in_min_p = scaled >= jnp.log(operands.min_p)[:, None]  # `scaled` is log(p / p_max)
    k = jnp.where(operands.top_k > 0, jnp.minimum(operands.top_k, vocab_size), vocab_size).astype(jnp.float32)
    in_top_k = in_min_p & _where_any(  # nobody asks for it, mostly
        operands.top_k > 0, device, lambda: _likeliest(device, keys, jnp.ones_like(keys), k), keys.shape
    )
    weights = jnp.where(in_top_k, jnp.round(jnp.exp(scaled) * unit(vocab_size)), 0.0).astype(jnp.uint32)
    in_top_p = _likeliest(device, keys, weights, jnp.maximum(operands.top_p * _total(weights), 1.0))
    return in_top_k & (in_top_p | (operands.top_p >= 1)[:, None])


def _where_any(asks: Bool[Array, " B"], device: Device, search: Search, shape: tuple[int, ...]) -> Bool[Array, "B V"]:
    """What a search finds, or all tokens where no row asks for it.

    A GPU's host waits to know whether one does, and launches nothing meanwhile: of few keys it searches at once.
    """
    if device.platform == "gpu" and shape[0] * shape[1] <= _FEW_KEYS:
        return search()
    return lax.cond(jnp.any(asks), search, lambda: jnp.ones(shape, jnp.bool_))


def _likeliest(
    device: Device, keys: UInt32[Array, "B V"], amounts: UInt32[Array, "B V"], least: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The fewest tokens, greatest keys first and then lowest ids, whose amounts sum to `least` or more.

    Found digit by digit: no sort, and as fast in a vocabulary of 100,000.
    """

    def is_enough(tokens):
        return _total(jnp.where(tokens, amounts, 0)) >= least

    digit_bits = _digit_bits(device, keys.size)
    smallest = _greatest(lambda key: is_enough(keys >= key[:, None]), least.shape, bits=32, digit_bits=digit_bits)[
        :, None
    ]
    above, tied = keys > smallest, keys == smallest
    vocab_size = keys.shape[1]
    from_end = jnp.arange(vocab_size, dtype=jnp.uint32)[None, ::-1]
    last = _greatest(
        lambda end: is_enough(above | (tied & (from_end >= end[:, None]))),
        least.shape,
        bits=vocab_size.bit_length(),
        digit_bits=digit_bits,
    )
    return above | (tied & (from_end >= last[:, None]))


def _digit_bits(device: Device, num_keys: int) -> int:
    """Bits that a turn of the search finds, of which 32 are a multiple; the result is the same with any.

    A GPU launches a few kernels a turn, which read the keys once from its cache if that holds them: fewer turns are
    less to launch, and trying more values is only reading the cache. A CPU has to work for each value.
    """
    if device.platform != "gpu":
        return 1
    return 4 if num_keys <= _FEW_KEYS else 2


def _greatest(
    holds: Callable[[UInt32[Array, " B"]], Bool[Array, " B"]], shape: tuple[int, ...], *, bits: int, digit_bits: int
) -> UInt32[Array, " B"]:
    """The greatest number of `bits` bits for which `holds`, which holds for 0 and never again once it does not.

    Each turn finds a digit, by trying all of its values at once: a turn is a few kernels, however many it tries.
    """
    digits = jnp.arange(1, 2**digit_bits, dtype=jnp.uint32)
    turns = -(-bits // digit_bits)
    above = jnp.uint32(2**bits - 1)

    def turn(i, number):
        shift = jnp.uint32(digit_bits) * (turns - 1 - i).astype(jnp.uint32)
        larger = number[:, None] | jnp.left_shift(digits, shift)[None]
        right = jax.vmap(holds, in_axes=1, out_axes=1)(larger) & (larger <= above)
        return number | jnp.left_shift(jnp.sum(right, axis=1, dtype=jnp.uint32), shift)

    return lax.fori_loop(0, turns, turn, jnp.zeros(shape, jnp.uint32))


def _total(amounts: UInt32[Array, "B V"]) -> Float[Array, " B"]:
    """The sum of each row, exact but for its last rounding.

    Integers, because XLA chooses the order of a float sum by the number of rows, and with the order the last bit.
    """
    half = half_bits(amounts.shape[1])
    low = jnp.sum(amounts & jnp.uint32(2**half - 1), axis=-1, dtype=jnp.uint32)
    high = jnp.sum(amounts >> half, axis=-1, dtype=jnp.uint32) + (low >> half)
    low = low & jnp.uint32(2**half - 1)
    return high.astype(jnp.float32) * float(2**half) + low.astype(jnp.float32)


def _sortable(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Numbers in the order of `x`."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 is 0
    sign = jnp.uint32(2**31)
    return jnp.where(bits & sign, ~bits, bits | sign)
