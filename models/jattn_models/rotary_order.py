"""Decoders whose checkpoints turn neighbouring dimensions of a head, in an order in which halves of a head turn."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.checkpoint import Checkpoint
from jattn.parallel import ONE_DEVICE, Parallel
from jattn_models.attention import Attention
from jattn_models.decoder import Decoder


class NeighbourTurningDecoder(Decoder):
    """A decoder of such checkpoints."""

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE, rank: int = 0
    ) -> Decoder:
        """As `Decoder.from_checkpoint`; what turns in pairs of neighbours there turns in halves here."""
        model = super().from_checkpoint(checkpoint, dtype=dtype, parallel=parallel, rank=rank)
        neighbours_to_halves((stack.attention for stack in model.layers), model.config.rope.rotary_dim)
        return model


def neighbours_to_halves(attentions: Iterable[Attention], rotary_dim: int) -> None:
    """Reorders, in place, what makes queries and keys: each head's products are the same in either order.

    Args:
        attentions: A stack of layers each.
        rotary_dim: Dimensions of a head that turn; those after them stay where they are.
    """
    for attention in attentions:
        attention.qkv_proj.reorder_outputs(jnp.asarray(_columns(attention, rotary_dim)))


def _columns(attention: Attention, rotary_dim: int) -> np.ndarray:
    """For each column of the fused projection the one to take: of queries and keys even dimensions, then odd ones."""
    turning, heads = (attention.num_q_heads + times * attention.num_kv_heads for times in (1, 2))
    columns = np.arange(heads * attention.head_dim, dtype=np.int32).reshape(heads, attention.head_dim)
    turned = columns[:turning, :rotary_dim]
    columns[:turning, :rotary_dim] = np.concatenate([turned[:, ::2], turned[:, 1::2]], axis=1)
    return columns.reshape(-1)
