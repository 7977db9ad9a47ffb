"""Mixtures of experts of the tests: what each is, the numbers made for it, and how close to the oracle is close."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jattn_kernels import Routing, reference
from jattn_kernels.reference.experts import silu_gate

LIMIT, ALPHA = 2.0, 1.702


def clamped_swiglu(gate: Any, up: Any) -> Any:
    """gpt-oss's activation with a limit that the cases' numbers reach; of NumPy as of JAX."""
    xp = np if isinstance(gate, np.ndarray) else jnp
    gate, up = xp.minimum(gate, LIMIT), xp.clip(up, -LIMIT, LIMIT)
    return (up + 1.0) * gate / (1.0 + xp.exp(-ALPHA * gate))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertCase:
    """One mixture, without its numbers.

    Attributes:
        experts, per_token, hidden, units: Sizes.
        choice: Who goes where: anywhere but to the last expert; all tokens to the same; every second token's choices,
            and some others', to no expert (such a token's row is NaN); each token's to one expert.
        layers: Layers of the stack, of which the last holds the only numbers; None is no stack.
        biases: Give both.
        clamped: Give an activation.
    """

    name: str
    tokens: int
    experts: int = 8
    per_token: int = 2
    hidden: int = 128
    units: int = 64
    dtype: str = "bfloat16"
    choice: Literal["any", "same", "strays", "twice"] = "any"
    layers: int | None = None
    biases: bool = False
    clamped: bool = False
    weighs_inputs: bool = False


class ExpertInputs(NamedTuple):
    """The arguments of `mixture_of_experts`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def build(case: ExpertCase, *, seed: int = 0) -> ExpertInputs:
    """The numbers of a case; layers that are not wanted are NaN."""
    rng = np.random.default_rng(seed)
    tokens, hidden, units, experts = case.tokens, case.hidden, case.units, case.experts
    chosen = choices(case, rng)
    x = rng.standard_normal((tokens, hidden))
    x[~((chosen >= 0) & (chosen < experts)).any(axis=1)] = np.nan
    arrays = {
        "gate_up": rng.standard_normal((experts, hidden, 2 * units)) / math.sqrt(hidden) * 2,
        "down": rng.standard_normal((experts, units, hidden)) / math.sqrt(units),
    }
    if case.biases:
        arrays |= {
            "gate_up_bias": rng.standard_normal((experts, 2 * units)),
            "down_bias": rng.standard_normal((experts, hidden)),
        }
    if case.layers is not None:
        arrays = {
            name: np.concatenate([np.full((case.layers - 1, *array.shape), np.nan), array[None]])
            for name, array in arrays.items()
        }
    given = {name: jnp.asarray(array, case.dtype) for name, array in arrays.items()}
    weights = jnp.asarray(rng.uniform(0.1, 1.0, (tokens, case.per_token)), jnp.float32)
    args = (
        jnp.asarray(x, case.dtype),
        weights,
        jnp.asarray(chosen, jnp.int32),
        given.pop("gate_up"),
        given.pop("down"),
    )
    kwargs: dict[str, Any] = {**given, "weighs_inputs": case.weighs_inputs}
    if case.layers is not None:
        kwargs["layer_index"] = jnp.int32(case.layers - 1)
    if case.clamped:
        kwargs["activation"] = clamped_swiglu
    return ExpertInputs(args, kwargs)


def route_choices(inputs: ExpertInputs, logits: Any, routing: Routing, bias: Any = None) -> ExpertInputs:
    """The inputs whose tokens go where the oracle routes them."""
    weights, chosen = reference.route(logits, routing, bias=bias)
    choice = jnp.asarray(weights, jnp.float32), jnp.asarray(chosen, jnp.int32)
    return inputs._replace(args=(inputs.args[0], *choice, *inputs.args[3:]))


def choices(case: ExpertCase, rng: np.random.Generator) -> np.ndarray:
    """Experts of each token."""
    experts, shape = case.experts, (case.tokens, case.per_token)
    chosen = np.stack([rng.permutation(experts - 1)[: case.per_token] for _ in range(case.tokens)])
    match case.choice:
        case "same":
            chosen = np.broadcast_to(np.arange(case.per_token) * 2 + 1, shape).copy()
        case "strays":
            chosen[::2] = np.where(rng.integers(2, size=chosen[::2].shape) == 0, -1, experts)
            chosen[1::4, 0] = experts
        case "twice":
            chosen[:] = chosen[:, :1]
    return chosen


def assert_mixture(case: ExpertCase, inputs: ExpertInputs, out: Any) -> None:
    """Asserts dtype, shape and values; tokens of no expert must be 0, and nothing NaN.

    Allowed is twice the largest error, relative to a token's size, of float32 maths that rounds where the faces say so,
    plus a floor for sums in another order and for one rounding of the output.
    """
    assert (out.shape, out.dtype) == (inputs.args[0].shape, jnp.dtype(case.dtype))
    out = np.asarray(out).astype(np.float64)
    exact = reference.mixture_of_experts(*inputs.args, **inputs.kwargs)
    rounded, size = _rounded(case, inputs)
    size = size[:, None]
    error = (np.abs(rounded - exact) / np.where(size == 0, 1.0, size)).max(initial=0.0)
    # An activation multiplies what may be as large as a row's few largest numbers.
    terms = math.sqrt(case.hidden + case.units) * 8
    floor = terms * float(np.finfo(np.float32).eps) + float(jnp.finfo(case.dtype).eps) / 2
    tolerance = (2 * error + floor) * size
    assert np.isfinite(out).all(), f"{case.name}: NaN or infinity"
    np.testing.assert_array_equal(out[size[:, 0] == 0], 0.0, f"{case.name}: tokens of no expert")
    safe = np.where(tolerance == 0, 1.0, tolerance)
    np.testing.assert_allclose(out / safe, exact / safe, rtol=0, atol=1, err_msg=f"{case.name}: in tolerances")


def _rounded(case: ExpertCase, inputs: ExpertInputs) -> tuple[np.ndarray, np.ndarray]:
    """The mixture with float32's roundings and the dtype's; and each token's largest sum of sizes of what it adds."""
    x, weights, chosen = (np.asarray(array) for array in inputs.args[:3])
    x = x.astype(np.float32)
    biases = {name: jnp.zeros((case.experts, 1)) for name in ("gate_up_bias", "down_bias")}
    given = {name: array for name, array in inputs.kwargs.items() if name in biases}
    stacked = {"gate_up": inputs.args[3], "down": inputs.args[4], **given}
    stacked = stacked if case.layers is None else {name: array[-1] for name, array in stacked.items()}
    own = {name: np.asarray(array).astype(np.float32) for name, array in {**biases, **stacked}.items()}
    activation = inputs.kwargs.get("activation", silu_gate)

    def narrow(values):
        return values.astype(case.dtype).astype(np.float32)

    out, size = np.zeros(x.shape, np.float32), np.zeros(x.shape, np.float32)
    for choice in range(case.per_token):
        for expert in range(case.experts):
            tokens = np.flatnonzero(chosen[:, choice] == expert)
            factor = weights[tokens, choice, None]
            rows = narrow(x[tokens] * factor) if case.weighs_inputs else x[tokens]
            gate, up = np.split(rows @ own["gate_up"][expert] + own["gate_up_bias"][expert], 2, axis=1)
            returned = narrow(narrow(activation(gate, up)) @ own["down"][expert] + own["down_bias"][expert])
            returned = returned if case.weighs_inputs else factor * returned
            out[tokens] += returned
            size[tokens] += np.abs(returned)
    return narrow(out).astype(np.float64), size.max(axis=1).astype(np.float64)
