"""PyTorch's layer of experts, by `torch._grouped_mm` in a CUDA graph, on arrays of JAX's."""

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bench.attention import Measured
from bench.mixture_workload import HeldWeights, MixtureWorkload
from bench.moe_layer import mixture_row
from bench.timing import measure

_MOST_ERROR = 0.02  # of a result's length: hidden units and sums are rounded to bf16 in other places


def torch_on_gpu() -> Any:
    """The package, where it has a GPU.

    Raises:
        NotImplementedError: It is not installed, or has none.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise NotImplementedError("PyTorch is not installed.") from None
    if not torch.cuda.is_available():
        raise NotImplementedError("PyTorch has no GPU.")
    return torch


def implementation(torch: Any) -> str:
    """Name of the rows."""
    return f"torch-{'.'.join(torch.__version__.split('.')[:2])}-grouped_mm"


def layer(torch: Any, x: Any, logits: Any, gate_up: Any, down: Any, *, per_token: int, restored: bool) -> Any:
    """One layer: rows sorted by expert, two grouped products, and the weighted sum.

    Args:
        restored: Whether the rows are put back in order and summed a token at a time, and not added where they belong.
    """
    best, chosen = logits.topk(per_token)
    weights = best.softmax(-1)
    experts, order = chosen.flatten().sort()
    ends = torch.searchsorted(experts, torch.arange(logits.shape[1], device=x.device), right=True, out_int32=True)
    token = order // per_token
    gate, up = torch._grouped_mm(x[token], gate_up, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
    if restored:
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
        return torch.bmm(weights.to(x.dtype)[:, None], out[place].view(*chosen.shape, -1))[:, 0]
    weighed = out * weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add_(0, token, weighed)


class Replay:
    """Calls captured in one CUDA graph; called it starts them, and `jax.block_until_ready` waits for them.

    Attributes:
        first: The first call's result, once they have run.
    """

    def __init__(self, torch: Any, given: Sequence[Any], gate_up: Any, down: Any, **options: Any):
        def run() -> Any:
            outs = []
            for number, (x, logits) in enumerate(given):
                of_layer = number % gate_up.shape[0]
                outs.append(layer(torch, x, logits, gate_up[of_layer], down[of_layer], **options))
            return outs[0]

        self._torch, self._graph = torch, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self.first = run()

    def __call__(self) -> "Replay":
        self._graph.replay()
        return self

    def block_until_ready(self) -> "Replay":
        self._torch.cuda.synchronize()
        return self


def compiled(workload: MixtureWorkload, implementation: str) -> Any:
    """The first call by an implementation of ours, to compare with.

    Raises:
        NotImplementedError: The implementation refuses it.
    """
    return workload.compiled(implementation, calls=1)


def measured(workload: MixtureWorkload, held: HeldWeights, *, executable: Any, **options: Any) -> Measured:
    """Times the fastest of what PyTorch can do: weights as they are or inputs last, rows restored or added.

    Args:
        executable: As `compiled` gives it.
        options: As of `bench.timing.measure`.

    Raises:
        NotImplementedError: There is no PyTorch with a GPU.
        ArithmeticError: The results differ from ours by more than bf16 explains.
    """
    torch = torch_on_gpu()
    weights, logits = held(workload.shapes), workload.logits()
    given = workload.given(logits)
    (ours,) = executable(given[:1], weights)
    jax.block_until_ready((given, weights, ours))
    as_they_are = [torch.from_dlpack(array) for array in weights]
    inputs_last = [array.transpose(-1, -2).contiguous().transpose(-1, -2) for array in as_they_are]
    arrays = [tuple(map(torch.from_dlpack, each)) for each in given]
    timings = []
    for (gate_up, down), restored in itertools.product((as_they_are, inputs_last), (False, True)):
        replay = Replay(torch, arrays, gate_up, down, per_token=workload.shapes.per_token, restored=restored)
        jax.block_until_ready(replay())
        error = relative_error(replay.first.float().cpu().numpy(), np.asarray(ours, np.float32))
        if not error < _MOST_ERROR:
            raise ArithmeticError(f"{workload.name}: PyTorch's result must be ours. Got a relative error of {error}.")
        timings.append(measure(replay, calls=workload.calls, **options))
    timing = min(timings, key=lambda timing: timing.time_us)
    return Measured(mixture_row(workload, implementation(torch), timing, workload.met(logits)), [])


def relative_error(value: np.ndarray, expected: np.ndarray) -> float:
    """Length of the difference over that of the expected."""
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))
