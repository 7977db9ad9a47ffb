"""The oracle's filters: which tokens of a row min-p, top-k and top-p leave."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

_UNIT = 2**28 - 16  # the likeliest token's amount


def kept_tokens(
    logits: Float[Any, "B V"],
    *,
    temperature: Float[Any, " B"],
    top_k: Int[Any, " B"],
    top_p: Float[Any, " B"],
    min_p: Float[Any, " B"],
) -> Bool[np.ndarray, "B V"]:
    """Of each row the tokens that may be drawn; NaN is -inf, and a row of temperature 0 keeps all above that."""
    rows = zip(np.asarray(logits, np.float64), *map(np.asarray, (temperature, top_k, top_p, min_p)), strict=True)
    return np.array([_kept_of_one(*row) for row in rows], bool).reshape(np.shape(logits))


def _kept_of_one(logits: np.ndarray, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> np.ndarray:
    logits = np.where(np.isnan(logits), -np.inf, logits)
    kept = logits > -np.inf
    if temperature <= 0 or not kept.any():
        return kept
    order = likeliest_first(logits)
    chances = log_chances(logits, float(temperature))
    if min_p > 0:
        kept &= chances >= np.log(float(min_p))
    if top_k > 0:
        kept[order[top_k:]] = False
    if top_p < 1:
        amounts = np.where(kept, np.rint(np.exp(chances) * _UNIT), 0).astype(np.int64)[order]
        enough = max(float(top_p) * int(amounts.sum()), 1)
        kept[order[1 + int(np.argmax(np.cumsum(amounts) >= enough)) :]] = False
    return kept


def likeliest_first(logits: Float[Any, " V"]) -> np.ndarray:
    """Token ids; of equal logits the lower one first."""
    return np.argsort(-np.asarray(logits, np.float64), kind="stable")


def log_chances(logits: Float[Any, " V"], temperature: float) -> np.ndarray:
    """Logarithms of probabilities over the likeliest token's; some logit is above -inf and none is NaN."""
    logits = np.minimum(np.asarray(logits, np.float64), np.finfo(np.float32).max)
    return (logits - logits.max()) / max(temperature, float(np.finfo(np.float32).tiny))
