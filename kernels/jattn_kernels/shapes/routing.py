"""What the operands of routing are checked for."""

from jattn_kernels.routing_spec import Routing
from jattn_kernels.shapes.arrays import brief, check_are_arrays, check_axes, check_float


def check_routing(logits, routing, bias, *, bias_name: str = "bias") -> None:
    """Checks that a router's logits and the bias of the choice fit its facts.

    Args:
        bias_name: What the face calls it.

    Raises:
        ValueError: One does not.
    """
    check_are_arrays(logits=logits)
    check_axes("logits", logits, ("T", "E"))
    check_float("logits", logits)
    if not isinstance(routing, Routing):
        raise ValueError(f"`routing` must be a Routing. Got {brief(routing)}.")
    if logits.shape[1] != routing.num_experts:
        raise ValueError(
            f"`logits` must have a column an expert, {routing.num_experts}. Got logits.shape={logits.shape}."
        )
    if bias is None:
        return
    check_are_arrays(**{bias_name: bias})
    check_float(bias_name, bias)
    if bias.shape != (routing.num_experts,):
        raise ValueError(
            f"`{bias_name}` must have a number an expert, [{routing.num_experts}]. Got {bias_name}.shape={bias.shape}."
        )
