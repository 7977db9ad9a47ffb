"""The static facts of one call, that dispatch and implementations are asked with, and the schedule made for it."""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.core import Tracer

from jattn_kernels.operands import AttentionOptions as AttentionOptions
from jattn_kernels.quantized import ScalesKind
from jattn_kernels.routing_spec import Routing
from jattn_kernels.spec import AttentionSpec

Operation = Literal[
    "paged_decode",
    "projected_decode",
    "paged_extend",
    "ragged_extend",
    "mla_decode",
    "mla_extend",
    "mla_write",
    "rotate_and_write",
]


@dataclasses.dataclass(frozen=True)
class Device:
    """The kind of device that a call is compiled for.

    Attributes:
        platform: "cpu", "gpu", ...
        compute_capability: (major, minor) of an NVIDIA GPU, else None.
        num_sms: Streaming multiprocessors of a GPU, if JAX knows.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    num_sms: int | None = None

    @property
    def words(self) -> str:
        """What sentences call it: the compute capability of an NVIDIA GPU, else the platform."""
        if self.compute_capability is None:
            return self.platform
        return "compute capability {}.{}".format(*self.compute_capability)


def default_device() -> Device:
    """The kind of device that calls are traced for: JAX's default one now, or what `assume_device` says."""
    if _assumed is not None:
        return _assumed
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None:
        return Device(device.platform)
    major, minor = str(capability).split(".")
    return Device(device.platform, (int(major), int(minor)), getattr(device, "core_count", None))


def assume_device(device: Device | None) -> None:
    """From here on calls are traced in this process as for such a device, which need not be there; None ends it."""
    global _assumed
    _assumed = device


_assumed: Device | None = None


def modes_of(operands: Any = None) -> frozenset[str]:
    """The modes of JAX that kernels must be made for, and that a call is traced in.

    Args:
        operands: A pytree of the call's arrays.

    Returns:
        "jax_enable_x64" if it is on, and "check_vma" in a `shard_map` that tracks which operands vary over its mesh.
    """
    modes = {"jax_enable_x64": jax.config.jax_enable_x64, "check_vma": varying_axes(operands)}
    return frozenset(mode for mode, is_on in modes.items() if is_on)


def varying_axes(operands: Any) -> frozenset[str]:
    """The axes of a mesh over which some array varies, in a `shard_map` with check_vma=True; none outside."""
    leaves = (leaf for leaf in jax.tree.leaves(operands) if isinstance(leaf, Tracer))
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The static facts of one attention call; hashable.

    Attributes:
        operation: The face that was called.
        spec: The layer's facts.
        q_dtype: Name of the queries' dtype.
        kv_dtype: Name of the keys' and values' dtype.
        page_size: Tokens a page; None if keys and values are not paged.
        num_tokens: Query tokens, padded ones included: a sequence in decode, else in all; None if not known.
        num_seqs: Sequences, padded ones included; None if not known.
        features: Names of the optional arguments that were given.
        absorbed: Numbers of a query head that are absorbed beside the write of latent rows; None if none are.
        device: What the call runs on.
        modes: As `modes_of` has them.
    """

    operation: Operation
    spec: AttentionSpec
    q_dtype: str
    kv_dtype: str
    page_size: int | None
    num_tokens: int | None = None
    num_seqs: int | None = None
    features: frozenset[str] = frozenset()
    absorbed: int | None = None
    # Looked up when a call is made, so that one place decides for all of them.
    device: Device = dataclasses.field(default_factory=lambda: default_device())
    modes: frozenset[str] = dataclasses.field(default_factory=modes_of)

    def for_schedule(self) -> "AttentionCall":
        """The call without what the work of its sequences does not depend on: what schedules are made of."""
        return _for_schedule(self)


@functools.lru_cache(maxsize=4096)
def _for_schedule(call: AttentionCall) -> AttentionCall:
    spec = dataclasses.replace(call.spec, sm_scale=None, logits_soft_cap=None, page_layout="NHD", combined_pool=None)
    return dataclasses.replace(call, spec=spec, q_dtype=call.kv_dtype, features=frozenset(), modes=frozenset())


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormCall:
    """The static facts of one norm; hashable.

    Attributes:
        num_rows, columns: Of what is normed.
        dtype: Name of its dtype.
        scale_dtype: Name of the scale's.
        eps, offset: What is added to the mean of squares, and to the scale.
        of_sum: Whether splits are added to the rows first, and the sum is a result too.
        rounded: Whether the norm is rounded to fp8, a QuantizedRows.
        device, modes: As in AttentionCall.
    """

    num_rows: int
    columns: int
    dtype: str
    scale_dtype: str
    eps: float
    offset: float
    of_sum: bool = False
    rounded: bool = False
    device: Device = dataclasses.field(default_factory=lambda: default_device())
    modes: frozenset[str] = dataclasses.field(default_factory=modes_of)
    operation: Literal["rms_norm"] = "rms_norm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextCall:
    """The static facts of a product that follows a mixture, of the norm of what both layers add up to; hashable.

    Attributes:
        norm: Of the product's rows.
        columns: Of the product.
        biased: Whether these have a bias.
    """

    norm: NormCall
    columns: int
    biased: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterCall:
    """The static facts of what a mixture begins with where it takes the router's logits itself; hashable.

    Attributes:
        norm: Of the router's rows, which are added up first.
        left: Parts of the splits that are added first, and rows of each, of which those past the tokens are 0.
        depth: Inputs of the product that is added last.
        attention: That its rows are made by; None where they are given.
        leaves_for: The next layer's, which the kernel that reads the result may begin with: room is left for it.
        output_biased: Whether the product that is added last has a bias.
        biased: Whether logits have one.
        choice_biased: Whether scores have a bias for the choice alone.
        next: What follows the mixture; None if nothing.
    """

    norm: NormCall
    left: tuple[int, int]
    depth: int
    choice_biased: bool
    output_biased: bool = False
    biased: bool = False
    attention: AttentionCall | None = None
    leaves_for: AttentionCall | None = None
    next: NextCall | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsCall:
    """The static facts of one mixture of experts; hashable.

    Attributes:
        num_tokens: Tokens, padded ones included.
        per_token: Experts a token.
        num_experts: Experts.
        hidden_size: Numbers of a token.
        units: Hidden units of an expert.
        dtype: Name of the tokens' dtype.
        kernel_dtype: Name of the weights'.
        activation: Of the gate's and the other half's outputs.
        weighs_inputs: Whether weights are on what an expert is given.
        routing: What becomes of a router's logits; None if weights and experts are given.
        router: How they are made; None if they are given too.
        scales: As in MatmulCall.
        block: Outputs and inputs that share a scale, of blocks, the fewest of both projections; else None.
        features: Names of the optional arguments that were given.
        in_splits: Whether the result may be what adds up to it.
        device, modes: As in AttentionCall.
    """

    num_tokens: int
    per_token: int
    num_experts: int
    hidden_size: int
    units: int
    dtype: str
    kernel_dtype: str
    activation: Callable[[jax.Array, jax.Array], jax.Array]
    weighs_inputs: bool = False
    routing: Routing | None = None
    router: RouterCall | None = None
    scales: ScalesKind | None = None
    block: tuple[int, int] | None = None
    features: frozenset[str] = frozenset()
    in_splits: bool = False
    device: Device = dataclasses.field(default_factory=lambda: default_device())
    modes: frozenset[str] = dataclasses.field(default_factory=modes_of)
    operation: Literal["mixture_of_experts"] = "mixture_of_experts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """The static facts of one product with weights; hashable.

    Attributes:
        num_rows, depth, columns: Of [num_rows, depth] @ [depth, columns].
        dtype, kernel_dtype: Names of those of the rows and of the weights.
        out_dtype: Name of the result's; products are summed in float32.
        scales: What of quantised weights has a scale of its own; None of weights that are not.
        group_size: Inputs that share a scale, of groups; else None.
        interleaved: Whether the weights' inputs are, as of a QuantizedKernel.
        in_splits: Whether the result may be what adds up to it.
        norm: Of the rows, which the product takes first; None where it takes them as they are.
        activation: Of the rows' halves, likewise.
        gate: Of the halves of the product's columns: what is returned is half as wide.
        zero_points: Whether weights have some.
        rounded: Whether rows come in fp8, a QuantizedRows.
        biased: Whether a bias is in what the product returns.
        device, modes: As in AttentionCall.
    """

    num_rows: int
    depth: int
    columns: int
    dtype: str
    kernel_dtype: str
    out_dtype: str
    scales: ScalesKind | None = None
    group_size: int | None = None
    interleaved: bool = False
    in_splits: bool = False
    norm: NormCall | None = None
    activation: Callable[..., Any] | None = None
    gate: Callable[..., Any] | None = None
    zero_points: bool = False
    rounded: bool = False
    biased: bool = False
    device: Device = dataclasses.field(default_factory=lambda: default_device())
    modes: frozenset[str] = dataclasses.field(default_factory=modes_of)
    operation: Literal["matmul"] = "matmul"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpCall:
    """The static facts of an MLP of rows that are added up and normed first; hashable.

    Attributes:
        norm, left: As in RouterCall.
        output, gate_up, down: The product that is added last, and the MLP's, of which the first has the activation.
        next, next_norm: The next layer's first product, and the norm of its rows; None if nothing follows.
        scales_dtype: Name of that of all weights' scales; None where there is no such one.
        device, modes: As in AttentionCall.
    """

    norm: NormCall
    left: tuple[int, int]
    output: MatmulCall
    gate_up: MatmulCall
    down: MatmulCall
    next: MatmulCall | None = None
    next_norm: NormCall | None = None
    scales_dtype: str | None = None
    device: Device = dataclasses.field(default_factory=lambda: default_device())
    modes: frozenset[str] = dataclasses.field(default_factory=modes_of)
    operation: Literal["mlp_of_sum"] = "mlp_of_sum"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FiltersCall:
    """The static facts of what filters keep of rows of logits; hashable.

    Attributes:
        num_rows, vocab_size: Of the logits.
        device, modes: As in AttentionCall.
    """

    num_rows: int
    vocab_size: int
    device: Device = dataclasses.field(default_factory=lambda: default_device())
    modes: frozenset[str] = dataclasses.field(default_factory=modes_of)
    operation: Literal["kept_tokens"] = "kept_tokens"


Call = AttentionCall | NormCall | ExpertsCall | MatmulCall | MlpCall | FiltersCall


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A work list, and which calls of which implementation it is for.

    Attributes:
        work: The implementation's own arrays.
        call: As `AttentionCall.for_schedule` gives it; static.
        implementation: Its name; static.
    """

    work: Any
    call: AttentionCall = dataclasses.field(metadata={"static": True})
    implementation: str = dataclasses.field(metadata={"static": True})
