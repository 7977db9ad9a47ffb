"""Rows of logits and what filters they ask for, and whether what is kept of them is right."""

import jax.numpy as jnp
import numpy as np

from jattn_kernels.reference import kept_tokens as exactly_kept
from jattn_kernels.reference.filters import likeliest_first, log_chances

# A logit's distance from the greatest, over temperature, is rounded twice, and an exponential: of distances up to 20.
_ROUNDING = 40 * float(np.finfo(np.float32).eps)


def filters(batch, *, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0):
    """What each row asks for: one number for all, or a list with one for each."""
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return {
        name: jnp.asarray(np.broadcast_to(np.asarray(value, np.int32 if name == "top_k" else np.float32), (batch,)))
        for name, value in asked.items()
    }


def normal_logits(shape, *, seed=0, scale=2.0, step=None):
    """Random ones; multiples of `step`, so that many are equal."""
    logits = np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)
    return jnp.asarray(logits if step is None else np.round(logits / np.float32(step)) * np.float32(step))


def mixed_filters(batch, seed=1):
    """Rows of all kinds side by side."""
    random = np.random.default_rng(seed)
    return filters(
        batch,
        temperature=random.choice([0.0, 0.3, 0.8, 1.0, 5.0], batch),
        top_k=random.choice([0, 0, 1, 7, 50, 400], batch),
        top_p=random.choice([1.0, 1.0, 0.0, 0.2, 0.9, 0.9999], batch),
        min_p=random.choice([0.0, 0.0, 0.0, 0.02, 0.3, 1.0], batch),
    )


def odd_logits(vocab_size):
    """Rows that few models give: none finite, equal ones, both zeros, infinities, the ends of float32, and NaN."""
    rows = np.array(normal_logits((14, vocab_size), seed=3))
    rows[0] = np.nan
    rows[1] = -np.inf
    rows[2] = 1.5
    rows[3, ::2], rows[3, 1::2] = -0.0, 0.0
    rows[4, vocab_size // 2 :] = np.nan
    rows[5, vocab_size // 3 :] = -np.inf
    rows[6, :] = -np.inf
    rows[6, vocab_size // 2] = -3e38
    rows[7, vocab_size // 2] = np.inf
    rows[8, ::3] = np.inf
    rows[9] = np.where(rows[9] > 0, np.float32(1.5e38), np.float32(-1.5e38))
    rows[10] *= np.float32(1e-20)
    rows[11] = np.sign(rows[11]) * np.finfo(np.float32).tiny  # what is smaller a CPU may take for 0
    rows[12] = np.sort(rows[12])
    rows[13] *= np.float32(1e6)
    return jnp.asarray(rows)


def assert_kept(kept, logits, asked):
    """What is kept is what the oracle keeps; top-p may end at another token where the share is next to it."""
    logits = np.asarray(logits, np.float32)
    expected = exactly_kept(logits, **asked)
    kept = np.asarray(kept)
    assert kept.dtype == bool
    rows = np.flatnonzero(np.any(kept != expected, axis=1))
    if rows.size == 0:
        return
    before_top_p = exactly_kept(logits, **asked | {"top_p": np.ones(len(logits), np.float32)})
    for row in rows:
        top_p = float(asked["top_p"][row])
        assert top_p < 1, (row, np.flatnonzero(kept[row] != expected[row]))
        clean = np.where(np.isnan(logits[row]), -np.inf, logits[row])
        order = likeliest_first(clean)
        order = order[before_top_p[row][order]]
        count = int(kept[row].sum())
        assert set(np.flatnonzero(kept[row])) == set(order[:count]), row
        shares = np.cumsum(np.exp(log_chances(clean, float(asked["temperature"][row])))[order])
        shares /= shares[-1]
        assert shares[count - 1] >= top_p - _ROUNDING, (row, shares[count - 1], top_p)
        assert count == 1 or shares[count - 2] < top_p + _ROUNDING, (row, shares[count - 2], top_p)
