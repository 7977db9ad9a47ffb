"""A decoder's layer: attention and MLP around the residual stream, and what a layer may leave for the next to add."""

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jattn.experts import Pages
from jattn.matmul import NextProduct, QuantizedRows, Splits, Unmultiplied, added, in_shape_of, multiplied
from jattn.norm import NormedRows, Unnormed
from jattn.parallel import Parallel
from jattn_models.attention import Attention, Pass
from jattn_models.decoder_config import DecoderConfig
from jattn_models.experts import MixtureOfExperts
from jattn_models.latent_attention import LatentAttention
from jattn_models.layer_pattern import LayerKind
from jattn_models.mlp import GatedMLP, PlainMLP
from jattn_models.norms import LayerNorm, RMSNorm


class Stream(NamedTuple):
    """The residual stream between layers.

    Attributes:
        rows: As far as they are added up.
        addition: What the layer before adds to them, for the next norm to add, of several devices each one's part; None
            if nothing is left.
        product: What the next layer's attention begins with, if it has been multiplied already.
    """

    rows: Float[Array, "T D"]
    addition: Float[Array, "T D"] | Splits | None = None
    product: Splits | None = None

    def summed(self, parallel: Parallel) -> Float[Array, "T D"]:
        """The rows with what is left."""
        return self.rows if self.addition is None else self.rows + parallel.all_reduce(added(self.addition))


class DecoderLayer(nnx.Module):
    """Attention and MLP, each with a norm before it, after it or both, and added to the residual stream.

    Attributes:
        attention_class: Takes what DecoderLayer takes, and says what its keys need of a pool.
    """

    attention_class: ClassVar[Any] = Attention

    def __init__(self, config: DecoderConfig, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel):
        width = config.hidden_size
        norm = functools.partial(norm_of, config, dtype)
        before, after = config.norms != "after", config.norms != "before"
        self.residual_scale = config.residual_scale
        self.input_norm = norm() if before else None
        self.attention = self.attention_class(config, kind, dtype=dtype, rngs=rngs, parallel=parallel)
        self.attended_norm = norm() if after else None
        self.post_attention_norm = norm() if before else None
        if kind.sparse and config.experts is not None:
            self.mlp = MixtureOfExperts(width, config.experts, dtype=dtype, rngs=rngs, parallel=parallel)
        else:
            self.mlp = (GatedMLP if config.gated else PlainMLP)(
                width,
                config.intermediate_size,
                activation=config.activation,
                bias=config.mlp_bias,
                dtype=dtype,
                rngs=rngs,
                parallel=parallel,
            )
        self.mlp_norm = norm() if after else None

    def __call__(
        self,
        stream: Stream,
        layer_index: Int[Array, ""],
        this_pass: Pass,
        pool: Any,
        following: "DecoderLayer | None" = None,
    ) -> tuple[Stream, Any]:
        """What it makes of the stream, and the pool.

        Args:
            following: The next layer, whose first product it may take.
        """
        parallel = this_pass.parallel
        stream, given = self._given(stream, parallel)
        later = {"later": True} if self._takes_attention(parallel) else {}
        attended, pool = self.attention(given, layer_index, this_pass, pool, **later)
        after = None if following is None else following.first_product
        hidden, addition, product, pages = self._after_attention(stream, attended, parallel, after)
        if pages is not None:
            pool = pool.with_pages(self.attention.layer(layer_index).group, *pages)
        if self._leaves(addition, parallel):
            return Stream(hidden, addition, product), pool
        addition = parallel.all_reduce(added(addition))
        return Stream(self._added(hidden, _normed(self.mlp_norm, addition))), pool

    def _takes_attention(self, parallel: Parallel) -> bool:
        """Whether the MLP's kernel may compute attention too."""
        return (
            isinstance(self.attention, Attention | LatentAttention)
            and isinstance(self.mlp, MixtureOfExperts)
            and self.mlp.takes_attention
            and isinstance(self.post_attention_norm, RMSNorm)
            and self._adds_as_it_is
            and parallel.axis is None
        )

    @property
    def first_product(self) -> NextProduct | None:
        """The one it begins with, of the norm of what is there; None where it begins with something else."""
        if not isinstance(self.input_norm, RMSNorm):
            return None
        return self.attention.first_product(self.input_norm)

    def hands_on(self, rows: Float[Array, "T D"], parallel: Parallel) -> bool:
        """Whether its MLP may take the next layer's first product of such rows too."""
        if isinstance(self.mlp, GatedMLP):
            is_alone = rows.shape[0] == 1 and parallel.axis is None
            return is_alone and self.mlp.in_int4 and self._adds_as_it_is and self._defers(parallel)
        return isinstance(self.mlp, MixtureOfExperts)

    def multiplied(self, stream: Stream, like: Splits) -> Stream:
        """The stream with that product of its rows, as the layer before would leave it."""
        assert isinstance(self.input_norm, RMSNorm)
        product = self.attention.first_projection.splits(self.input_norm.later(stream.rows))
        is_alike = isinstance(product, Splits) and product.parts.shape == like.parts.shape
        return stream._replace(product=product if is_alike else in_shape_of(product, like))

    def left(self, normed: NormedRows, parallel: Parallel) -> Float[Array, "T D"] | Splits | None:
        """What it leaves to be added up of such rows, or as much and room; None if nothing."""
        if isinstance(self.mlp, GatedMLP) and isinstance(normed, jax.Array) and self.hands_on(normed, parallel):
            return self.mlp.left_in_one(normed)
        addition = self._of_mlp(normed, parallel)
        return addition if self._leaves(addition, parallel) else None

    def _of_mlp(self, normed: NormedRows, parallel: Parallel) -> Float[Array, "T D"] | Splits:
        """This device's part of what the MLP adds to the residual stream; in splits perhaps where it may leave it."""
        if isinstance(self.mlp, GatedMLP):
            return self.mlp.splits(normed) if self._defers(parallel) else self.mlp(normed)
        assert not isinstance(normed, QuantizedRows)
        if isinstance(self.mlp, MixtureOfExperts) and parallel.axis is None and self._defers(parallel):
            return self.mlp.splits(normed)
        return self.mlp(normed)

    def _leaves(self, addition: Float[Array, "T D"] | Splits, parallel: Parallel) -> bool:
        """Whether it is left to the next layer's norm, which adds up splits, and parts that devices exchange in it."""
        return self._defers(parallel) and (parallel.exchanges or isinstance(addition, Splits))

    def _defers(self, parallel: Parallel) -> bool:
        """Whether what the MLP adds may be left to the next layer's norm, which is taken before a product."""
        if self.mlp_norm is not None or self.residual_scale != 1.0 or not isinstance(self.input_norm, RMSNorm):
            return False
        if parallel.axis is not None:
            return parallel.exchanges
        return isinstance(self.mlp, MixtureOfExperts) or (isinstance(self.mlp, GatedMLP) and self.mlp.in_few_bits)

    def _given(self, stream: Stream, parallel: Parallel) -> tuple[Stream, NormedRows | Unnormed | Splits]:
        """The residual stream, and what attention is given of it."""
        if stream.product is not None:
            return stream, stream.product
        norm = self.input_norm
        if stream.addition is not None and isinstance(norm, RMSNorm):
            rounded = isinstance(self.attention, Attention) and self.attention.rounds_rows
            later = norm.later(stream.rows, stream.addition)
            if parallel.axis is None and self._adds_twice(later, rounded, parallel):
                return stream, later  # what follows attention adds it too, and keeps the sum
            hidden, normed = norm.of_sum(stream.rows, stream.addition, parallel=parallel, rounded=rounded)
            return Stream(hidden), normed
        hidden = stream.summed(parallel)
        return Stream(hidden), norm.later(hidden) if isinstance(norm, RMSNorm) else _normed(norm, hidden)

    def _adds_twice(self, x: Unnormed, rounded: bool, parallel: Parallel) -> bool:
        """Whether the products after both norms add up what the layer before left, each for itself."""
        if isinstance(self.mlp, MixtureOfExperts):
            return not rounded
        if self._is_one_kernel(x, parallel):
            return True
        attention, mlp = self.attention, self.mlp
        return (
            isinstance(attention, Attention) and isinstance(mlp, GatedMLP) and attention.adds_up(x) and mlp.adds_up(x)
        )

    def _is_one_kernel(self, x: Unnormed, parallel: Parallel) -> bool:
        """Whether one kernel takes all that follows attention, of rows that are added up so before."""
        norm, attention = self.post_attention_norm, self.attention
        if not (isinstance(self.mlp, GatedMLP) and isinstance(norm, RMSNorm) and isinstance(attention, Attention)):
            return False
        if not self.hands_on(x.rows, parallel):
            return False
        product = attention.o_proj.later(jnp.zeros((1, attention.o_proj.inputs), x.dtype))  # for its shape
        return self.mlp.is_one_kernel(norm.later(x.rows, *x.additions, product))

    def _after_attention(
        self,
        stream: Stream,
        attended: Float[Array, "T D"] | Splits | Unmultiplied,
        parallel: Parallel,
        following: NextProduct | None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"] | Splits, Splits | None, Pages | None]:
        """The residual stream after attention, what this device's MLP adds to it, and perhaps the product after it.

        And pages that attention has written into, if it was left to the MLP.
        """
        norm, as_it_is = self.post_attention_norm, self._adds_as_it_is
        if (
            isinstance(attended, Splits | Unmultiplied)
            and isinstance(norm, RMSNorm)
            and isinstance(self.mlp, MixtureOfExperts | GatedMLP)
            and parallel.axis is None
            and as_it_is
        ):
            left = () if stream.addition is None else (stream.addition,)
            later = norm.later(stream.rows, *left, attended)
            if isinstance(self.mlp, MixtureOfExperts):
                addition, hidden, product, pages = self.mlp.splits_of_sum(later, following)
                return hidden, addition, product, pages
            if self._defers(parallel):
                if not self.mlp.is_one_kernel(later):
                    attended = multiplied(attended)
                    later = norm.later(stream.rows, *left, attended)
                if isinstance(attended, Unmultiplied) or self.mlp.adds_up(later):
                    addition, hidden, product = self.mlp.splits_of_sum(later, following)
                    return hidden, addition, product, None
        hidden, normed = self._between(stream.summed(parallel), multiplied(attended), parallel)
        return hidden, self._of_mlp(normed, parallel), None, None

    def _between(
        self, hidden: Float[Array, "T D"], attended: Float[Array, "T D"] | Splits, parallel: Parallel
    ) -> tuple[Float[Array, "T D"], NormedRows]:
        """The residual stream after attention, and what the MLP is given of it."""
        norm, as_it_is = self.post_attention_norm, self._adds_as_it_is
        if as_it_is and isinstance(norm, RMSNorm) and (parallel.exchanges or isinstance(attended, Splits)):
            rounded = isinstance(self.mlp, GatedMLP) and self.mlp.rounds_rows
            return norm.of_sum(hidden, attended, parallel=parallel, rounded=rounded)
        hidden = self._added(hidden, _normed(self.attended_norm, parallel.all_reduce(added(attended))))
        return hidden, _normed(norm, hidden)

    @property
    def _adds_as_it_is(self) -> bool:
        """Whether what attention returns is added to the residual stream as it is."""
        return self.attended_norm is None and self.residual_scale == 1.0

    def _added(self, hidden: Float[Array, "T D"], more: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return hidden + (more if self.residual_scale == 1.0 else more * jnp.asarray(self.residual_scale, more.dtype))


def norm_of(config: DecoderConfig, dtype: Any) -> RMSNorm | LayerNorm:
    """Of the residual stream."""
    if config.layer_norm:
        return LayerNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset, dtype=dtype)


def _normed(norm: RMSNorm | LayerNorm | None, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return hidden if norm is None else norm(hidden)
