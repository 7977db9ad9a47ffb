"""The arrays of one call, packed once at its face."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int8, Int32, Shaped

from jattn_kernels.head_norms import HeadNorms
from jattn_kernels.raw_latents import RawLatents
from jattn_kernels.raw_queries import RawQueries
from jattn_kernels.splits import Splits

_ABSENT: Any = None  # what an operation does not have; which it has is known by its name


class LayerOptions(TypedDict, total=False):
    """The optional arguments of every attention operation; `paged_decode` says what each means."""

    layer_index: Int[Array, ""] | int | None
    q_positions: Int[Array, "..."] | None
    custom_mask: Bool[Array, " M"] | None
    q_scale: Float[Array, "..."] | None
    alibi_slopes: Float[Array, " N"] | None
    sinks: Float[Array, "*L N"] | None


class HeadOptions(LayerOptions, total=False):
    """Those of operations whose keys and values are apart."""

    k_scale: Float[Array, "..."] | None
    v_scale: Float[Array, "..."] | None


class AttentionKwargs(HeadOptions, total=False):
    """Those of `paged_decode`, `paged_extend` and `ragged_extend`."""

    q_start: Int[Array, " B"] | None
    kv_start: Int[Array, " B"] | None


class LatentKwargs(LayerOptions, total=False):
    """Those of `mla_decode` and `mla_extend`."""

    q_start: Int[Array, " B"] | None
    kv_start: Int[Array, " B"] | None
    kv_scale: Float[Array, "..."] | None


def names_options[F: Callable[..., Any]](options: type) -> Callable[[F], F]:
    """Lets a face show each of its `**options` by name, as `help` and editors ask for them, and take no others.

    Args:
        options: The TypedDict of them; each is None by default.
    """

    def named(face: F) -> F:
        signature = inspect.signature(face)
        *parameters, _ = signature.parameters.values()
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in typing.get_type_hints(options).items()
        ]
        known = frozenset(parameter.name for parameter in parameters)

        @functools.wraps(face)
        def of_known(*args: Any, **kwargs: Any) -> Any:
            if unknown := kwargs.keys() - known:  # or an option of another operation would be taken
                raise TypeError(f"{face.__name__}() got an unexpected keyword argument {min(unknown)!r}")
            return face(*args, **kwargs)

        of_known.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return typing.cast(F, of_known)

    return named


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The optional arguments of an attention call; a field that was not given is None.

    Attributes:
        schedule: The implementation's own work list.
    """

    layer_index: Int[Array, ""] | int | None = None
    q_start: Int[Array, " B"] | None = None
    kv_start: Int[Array, " B"] | None = None
    q_positions: Int[Array, "..."] | None = None
    custom_mask: Bool[Array, " M"] | None = None
    q_scale: Float[Array, "..."] | None = None
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None
    alibi_slopes: Float[Array, " N"] | None = None
    sinks: Float[Array, "*L N"] | None = None
    schedule: Any = None

    def given(self) -> frozenset[str]:
        """Names of the arguments that were given."""
        return frozenset(name for name, value in vars(self).items() if value is not None)

    @property
    def sinks_of_layer(self) -> Float[Array, " N"] | None:
        """The sinks, of pages that have layers those of the layer that is read."""
        if self.sinks is None or self.sinks.ndim == 1:
            return self.sinks
        return self.sinks[self.layer_index]

    def starts(
        self, seq_lens: Int[Array, " B"], q_lens: Int[Array, " B"] | int
    ) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """`q_start` and `kv_start`, or what stands for those that were not given: the queries end where the keys do."""
        kv_start = jnp.zeros_like(seq_lens) if self.kv_start is None else self.kv_start
        return kv_start + seq_lens - q_lens if self.q_start is None else self.q_start, kv_start


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOperands:
    """All arrays of an attention call; what its operation does not have is None.

    Attributes:
        q: Queries; of MLA the part without rotation.
        q_pe: Of MLA the rotated part.
        k, v: Pages, or ragged keys and values; latent pages are `k`, as is a pool of both.
    """

    q: Float[Array, "..."]
    q_pe: Float[Array, "..."] = _ABSENT
    k: Float[Array, "..."]
    v: Float[Array, "..."] | None = None
    page_table: Int[Array, "B max_pages"] = _ABSENT
    seq_lens: Int[Array, " B"] = _ABSENT
    cu_q_lens: Int[Array, " B_plus_1"] = _ABSENT
    cu_kv_lens: Int[Array, " B_plus_1"] = _ABSENT
    options: AttentionOptions = AttentionOptions()

    def with_options(self, **changes: Any) -> "AttentionOperands":
        """The operands with other options."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changes))


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryOperands:
    """All arrays of a rotary embedding with the write into pages."""

    qkv: Float[Array, "T heads H"] | Splits
    cos: Float32[Array, "T half"]
    sin: Float32[Array, "T half"]
    k_pages: Float[Array, "..."]
    v_pages: Float[Array, "..."]
    slots: Int[Array, " T"]
    layer_index: Int[Array, ""] | int | None = None
    norms: HeadNorms | None = None


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentRowOperands:
    """All arrays of the write of latent rows into pages.

    Attributes:
        queries: That are to be absorbed beside it; None for none.
    """

    latents: RawLatents
    pages: Shaped[Array, "*L P page_size bytes"]
    slots: Int[Array, " T"]
    layer_index: Int[Array, ""] | int | None = None
    queries: RawQueries | None = None


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOperands:
    """All arrays of a norm; `layer_index` names the row of `scale`.

    Attributes:
        additions: To x before it is normed, one after the other.
    """

    x: Float[Array, "T D"]
    scale: Float[Array, "L D"]
    layer_index: Int[Array, ""]
    additions: tuple[Splits, ...] = ()


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenOperands:
    """All arrays of the attention of one token a sequence that decodes, whose key and value are to be written first.

    Attributes:
        rotary: Of queries, the key and the value; `qkv` are Splits.
        page_table, seq_lens: As of AttentionOperands.
        schedule: The implementation's own work list, or None.
    """

    rotary: RotaryOperands
    page_table: Int[Array, "B max_pages"]
    seq_lens: Int[Array, " B"]
    schedule: Any = None


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentTokenOperands:
    """All arrays of the attention of one token over latent rows, its own among them, and of the values after it.

    Attributes:
        q, q_pe: Queries that have taken up the keys' projection, and what turns of them.
        pages: Of all layers; one head.
        page_table, seq_lens: As of AttentionOperands.
        values, values_layer: Each head's projection of values.
    """

    q: Float[Array, "N C"]
    q_pe: Float[Array, "N R"]
    pages: Float[Array, "L P page_size 1 W"]
    page_table: Int[Array, "1 max_pages"]
    seq_lens: Int[Array, " 1"]
    layer_index: Int[Array, ""]
    values: Float[Array, "L N V C"]
    values_layer: Int[Array, ""]


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOperands:
    """All arrays of a product with weights; `layer_index` names the layer of `kernel`.

    Attributes:
        kernel: [L, D, F]; the values of a QuantizedKernel, [L, F, D], where there are scales.
        scales: Of a QuantizedKernel; of one scale for each output channel, for each block, or for each group of inputs.
        zero_points: Of the same; None where there are none.
        norm: What rows are normed with that are not yet; its own x are these rows.
        row_scales: Of x that comes in fp8, perhaps with more rows than there are.
        bias: Of the product's columns.
    """

    x: Float[Array, "T D"]
    kernel: Shaped[Array, "L _ _"]
    layer_index: Int[Array, ""]
    scales: Float[Array, "L SF SD"] | None = None
    zero_points: Int8[Array, "L SF SD"] | None = None
    norm: NormOperands | None = None
    row_scales: Float32[Array, " S"] | None = None
    bias: Float[Array, "L F"] | None = None


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class FiltersOperands:
    """All arrays of what filters keep of rows of logits, as the face takes them."""

    logits: Float32[Array, "B V"]
    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
