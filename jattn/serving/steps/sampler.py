"""The sampler: one token a row from its logits, on the device, as each row's request asks."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jattn.pytree import pytree
from jattn_kernels.call import default_device


@pytree(kw_only=True)
class SamplingState:
    """How each row's token is chosen.

    Attributes:
        temperature: 0 is greedy, whatever the other fields say.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Then keep the smallest set of the likeliest tokens that holds this share of what is left; 1 is off.
        min_p: Before both, drop the tokens less likely than this share of the likeliest one's probability; 0 is off.
        seed: Of the row's request; together with the token's position it fixes the row's randomness.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, " B"]


def sample(
    logits: Float[Array, "B V"], params: SamplingState, positions: Int[Array, " B"], *, greedy_only: bool
) -> Int[Array, " B"]:
    """Chooses a token for each row: temperature, then min-p, top-k and top-p, then a draw.

    The draw is keyed on fold_in(seed, position), so a row's token depends on no other row, nor on the row's place or
    the number of rows. Among equal logits the lower token id counts as the likelier one: top-k keeps exactly k
    tokens, and top-k of 1 is greedy. A NaN logit counts as -inf; a row of nothing else gives token 0.

    Args:
        params: A row that is padding may hold anything; zeros are cheapest.
        positions: Of the token to be chosen, in its sequence.
        greedy_only: Every row has temperature 0; the step is an argmax and reads neither `params` nor `positions`.
    """
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if greedy_only:
        return greedy
    noise = jax.vmap(functools.partial(_gumbel, vocab_size=logits.shape[1]))(params.seed, positions)
    drawn = jnp.argmax(drawn_logits(logits, params) + noise, axis=-1).astype(jnp.int32)
    return jnp.where(params.temperature > 0, drawn, greedy)


def drawn_logits(logits: Float[Array, "B V"], params: SamplingState) -> Float[Array, "B V"]:
    """The logits that a token is drawn from: over temperature, and -inf for what min-p, top-k and top-p drop.

    Args:
        logits: No NaN.
        params: A row of temperature 0 gives nothing of use.
    """
    scaled = _scale(logits, params.temperature)
    is_filtered = (params.temperature > 0) & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    kept = lax.cond(
        jnp.any(is_filtered),
        lambda: _kept_tokens(logits, scaled, params),
        lambda: jnp.ones_like(logits, bool),
    )
    return jnp.where(kept, scaled, -jnp.inf)


def _scale(logits: Float[Array, "B V"], temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Logits over temperature, the greatest moved to 0 first, so that no temperature overflows."""
    info = jnp.finfo(logits.dtype)
    logits = jnp.minimum(logits, info.max)
    # A row of -inf alone stays -inf: its greatest is not subtracted from itself, which would be NaN.
    greatest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), info.min)
    return (logits - greatest) / jnp.maximum(temperature, info.tiny)[:, None]


def _kept_tokens(logits: Float[Array, "B V"], scaled: Float[Array, "B V"], params: SamplingState) -> Bool[Array, "B V"]:
    """The tokens that min-p, then top-k and then top-p leave; at least one in a row that is not all -inf."""
    vocab_size = logits.shape[1]
    keys = _sortable(logits)
    in_min_p = scaled >= jnp.log(params.min_p)[:, None]  # `scaled` is log(p / p_max)
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab_size), vocab_size)
    in_top_k = in_min_p & lax.cond(  # nobody asks for it, mostly
        jnp.any(params.top_k > 0),
        lambda: _likeliest(keys, jnp.ones_like(keys), k.astype(jnp.float32)),
        lambda: jnp.ones_like(in_min_p),
    )
    weights = jnp.where(in_top_k, jnp.round(jnp.exp(scaled) * _UNIT), 0.0).astype(jnp.uint32)
    in_top_p = _likeliest(keys, weights, jnp.maximum(params.top_p * _total(weights), 1.0))
    return in_top_k & (in_top_p | (params.top_p >= 1)[:, None])


def _likeliest(
    keys: UInt32[Array, "B V"], amounts: UInt32[Array, "B V"], least: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The fewest tokens, greatest keys first and then lowest ids, whose amounts sum to `least` or more.

    Found digit by digit: no sort, and as fast in a vocabulary of 100,000.
    """

    def is_enough(tokens):
        return _total(jnp.where(tokens, amounts, 0)) >= least

    digit_bits = _digit_bits(keys.size)
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


def _digit_bits(num_keys: int) -> int:
    """Bits that a turn of the search finds, of which 32 are a multiple; the result is the same with any.

    A GPU launches a few kernels a turn, which read the keys once from its cache if that holds them: fewer turns are
    less to launch, and trying more values is only reading the cache. A CPU has to work for each value.
    """
    if default_device().platform != "gpu":
        return 1
    return 4 if num_keys <= 2**22 else 2


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


# The likeliest token's amount. Two halves of 14 bits each sum without overflow over 2**18 tokens.
_UNIT = float(2**28 - 1)
_HALF = 14


def _total(amounts: UInt32[Array, "B V"]) -> Float[Array, " B"]:
    """The sum of each row, exact but for its last rounding.

    Integers, because XLA chooses the order of a float sum by the number of rows, and with the order the last bit.
    """
    low = jnp.sum(amounts & jnp.uint32(2**_HALF - 1), axis=-1, dtype=jnp.uint32)
    high = jnp.sum(amounts >> _HALF, axis=-1, dtype=jnp.uint32) + (low >> _HALF)
    low = low & jnp.uint32(2**_HALF - 1)
    return high.astype(jnp.float32) * float(2**_HALF) + low.astype(jnp.float32)


def _sortable(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Numbers in the order of `x`."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 is 0
    sign = jnp.uint32(2**31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _gumbel(seed: UInt32[Array, ""], position: Int[Array, ""], *, vocab_size: int) -> Float[Array, " V"]:
    """Noise whose argmax over `scaled + noise` draws from softmax(scaled)."""
    # Threefry by name: under vmap the other generators mix the rows.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    # "high": 23 random bits give ties among 100,000 tokens, and argmax would favour the lower ids.
    return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")
