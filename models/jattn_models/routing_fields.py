"""A router's facts as configurations state them."""

from collections.abc import Mapping
from typing import Any

from jattn.routing import Routing
from jattn_models.config_fields import positive

_THEIR_NAMES = {"per_token": "num_experts_per_tok", "num_groups": "n_group", "groups_per_token": "topk_group"}


def read_routing(fields: Mapping[str, Any], num_experts: str, **facts: Any) -> Routing:
    """The routing to `num_experts_per_tok` experts.

    Args:
        num_experts: What the field is called that counts them.
        facts: What else the architecture says or reads.

    Raises:
        ValueError: A field is missing or out of range, or they do not fit each other.
    """
    counts = {
        "num_experts": positive(fields, num_experts, int),
        "per_token": positive(fields, "num_experts_per_tok", int),
    }
    try:
        return Routing(**counts, **facts)
    except ValueError as error:
        sentence = str(error)
    for ours, theirs in (_THEIR_NAMES | {"num_experts": num_experts}).items():
        sentence = sentence.replace(f"`{ours}`", f"`{theirs}`")
    raise ValueError(sentence)
