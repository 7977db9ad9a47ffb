"""From the numbers of one request to its output: logits, what is done to them, and the softmax."""

import numpy as np

from jattn_kernels.reference.requests import Request
from jattn_kernels.spec import AttentionSpec


def attend_one(request: Request, spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one request: out [Q, N, Hv] and lse [Q, N]; 0 and -inf where a row sees no key.

    Its keys and values must be finite: a hidden key's weight is 0, and 0 times a value that is not finite is NaN.
    """
    q, k = request.q, request.k
    if spec.rope_theta is not None:
        q, k = (rotate(x, at, spec.rope_theta, spec.rope_scale) for x, at in ((q, request.p), (k, request.j)))
    k, v = (np.repeat(x, spec.group_size, axis=1) for x in (k, request.v))
    logits = soft_cap(spec.scale * np.einsum("qnh,snh->qns", q, k), spec.logits_soft_cap)
    if request.alibi_slopes is not None:
        logits = logits + alibi(request.alibi_slopes, request.p, request.j, causal=spec.causal)
    logits = np.where(request.visible[:, None, :], logits, -np.inf)
    top = logits.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(logits - shift[..., None])
    weighted, total = np.einsum("qns,snh->qnh", weights, v), weights.sum(axis=-1)
    out, lse = normalise(weighted, total, shift)
    if request.sinks is not None:
        out, _ = normalise(weighted, total + np.exp(request.sinks - shift), shift)
    return out, lse


def soft_cap(logits: np.ndarray, cap: float | None) -> np.ndarray:
    """cap * tanh(logits / cap)."""
    return logits if cap is None else cap * np.tanh(logits / cap)


def alibi(slopes: np.ndarray, p: np.ndarray, j: np.ndarray, *, causal: bool) -> np.ndarray:
    """The bias [Q, N, S] of keys at `j` for queries at `p`: slope times minus the distance, signed only if causal."""
    distance = (j[None, :] - p[:, None])[:, None, :]
    return slopes[None, :, None] * (distance if causal else -np.abs(distance))


def rotate(x: np.ndarray, position: np.ndarray, theta: float, scale: float) -> np.ndarray:
    """Rows [S, heads, H] as complex numbers x[i] + x[i + H/2] 1j, turned by (position / scale) * theta^(-2i / H)."""
    half = x.shape[-1] // 2
    angle = (position / scale)[:, None, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def normalise(out: np.ndarray, total: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted sums and the sums of their weights, both of logits less `shift`, as output and lse."""
    empty = total == 0
    total = np.where(empty, 1.0, total)
    return out / total[..., None], np.where(empty, -np.inf, shift + np.log(total))
