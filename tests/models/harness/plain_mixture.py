"""A mixture in float64, a token and an expert at a time, by its own reading of what papers and peers say."""

import numpy as np
from flax import nnx

_OF_EXPERTS = ("gate_up_proj.", "down_proj.")


def plain_mixture(made, x, weights_of):
    """What a mixture returns for some tokens, and the sizes of the terms that it is the sum of.

    Args:
        made: A MixtureOfExperts with all of its weights.
        weights_of: Of a token's logits, the weights of its experts by their numbers.
    """
    leaves = {
        ".".join(map(str, path)): np.asarray(variable.get_value(), np.float64)
        for path, variable in nnx.to_flat_state(nnx.state(made))
    }
    facts, x = made.experts, np.asarray(x, np.float64)
    out, sizes = np.zeros(x.shape), np.zeros(x.shape)
    for row, token in enumerate(x):
        parts = []
        for number, weight in weights_of(token @ leaves["router.kernel"] + leaves.get("router.bias", 0)).items():
            own = {
                name: leaf[number] for name, leaf in leaves.items() if name.startswith(("gate_up_proj", "down_proj"))
            }
            given, weight = (token * weight, 1.0) if facts.weighs_inputs else (token, weight)
            parts.append((weight, *_gated_mlp(given, own, facts.activation)))
        for number in range(facts.routing.num_experts, len(leaves["down_proj.kernel"])):
            own = {name: leaf[number] for name, leaf in leaves.items() if name.startswith(_OF_EXPERTS)}
            parts.append((1.0, *_gated_mlp(token, own, None)))
        if any(name.startswith("shared.") for name in leaves):
            own = {name.removeprefix("shared."): leaf for name, leaf in leaves.items() if name.startswith("shared.")}
            weight = sigmoid(token @ leaves["shared_gate.kernel"]) if facts.shared_gated else 1.0
            parts.append((weight, *_gated_mlp(token, own, None)))
        out[row] = sum(weight * returned for weight, returned, _ in parts)
        sizes[row] = sum(weight * size for weight, _, size in parts)
    return out, sizes


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gated_mlp(token, leaves, clamped):
    gate, up = np.split(token @ leaves["gate_up_proj.kernel"] + leaves.get("gate_up_proj.bias", 0), 2)
    if clamped is None:
        hidden = gate * sigmoid(gate) * up
    else:
        gate, up = np.minimum(gate, clamped.limit), np.clip(up, -clamped.limit, clamped.limit)
        hidden = (up + 1) * gate * sigmoid(clamped.alpha * gate)
    down, bias = leaves["down_proj.kernel"], leaves.get("down_proj.bias", 0)
    return hidden @ down + bias, np.abs(hidden) @ np.abs(down) + np.abs(bias)
