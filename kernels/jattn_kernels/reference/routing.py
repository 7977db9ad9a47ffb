"""The oracle's routing: which experts a token goes to, and with what weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jattn_kernels.routing_spec import Routing


def route(
    logits: Float[Any, "T E"], routing: Routing, *, bias: Float[Any, " E"] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The float64 weights and the numbers of each token's experts, best first behind shared ones; equals by number."""
    bias = np.zeros(routing.num_experts) if bias is None else np.asarray(bias, np.float64)
    rows = [_route_one(row, routing, bias) for row in np.asarray(logits, np.float64)]
    shared = [routing.num_experts + number for number in range(routing.shared)]
    weights = np.array([[1.0] * len(shared) + [*weights] for weights, _ in rows], np.float64)
    chosen = np.array([shared + chosen for _, chosen in rows], np.int32)
    weights, chosen = (array.reshape(-1, len(shared) + routing.per_token) for array in (weights, chosen))
    return weights, chosen


def _route_one(logits: np.ndarray, routing: Routing, bias: np.ndarray) -> tuple[np.ndarray, list[int]]:
    scores = {"softmax": _softmax, "sigmoid": _sigmoid, "softmax_of_chosen": np.copy}[routing.scoring](logits)
    merit = (scores + bias).tolist()
    size = routing.num_experts // routing.num_groups
    members = [range(group * size, (group + 1) * size) for group in range(routing.num_groups)]
    counted = {"best": 1, "two_best": 2}[routing.group_score]
    worth = [sum(sorted((merit[e] for e in group), reverse=True)[:counted]) for group in members]
    groups = _best(range(routing.num_groups), worth, routing.groups_per_token)
    chosen = _best([e for group in sorted(groups) for e in members[group]], merit, routing.per_token)
    weights = scores[chosen]
    if routing.scoring == "softmax_of_chosen":
        weights = _softmax(weights)
    if routing.normalised:
        weights = weights / weights.sum()
    return weights * routing.scaling_factor, chosen


def _best(numbers: Any, values: Sequence[float], count: int) -> list[int]:
    return sorted(numbers, key=lambda number: (-values[number], number))[:count]


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))
