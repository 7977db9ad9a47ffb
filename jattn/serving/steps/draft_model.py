"""Drafting by a second, smaller model: it reads along with the prompts and decodes the proposals, all on the device."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from jattn.arguments import whole_number
from jattn.backend import AttentionBackend, AttentionLayer
from jattn.checkpoint import Checkpoint
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroupSpec, KVPool
from jattn.model import CausalLM, load_model
from jattn.parallel import ONE_DEVICE, Parallel
from jattn.serving.steps.loop_state import LoopState
from jattn.serving.steps.passes import decode_pass
from jattn.serving.steps.sampler import sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A second model of the same vocabulary proposes tokens, one after another.

    It draws with the noise that the served model draws with, so that the two agree wherever they think alike, at any
    temperature. Penalties and biases it does not know.

    Attributes:
        checkpoint: Its Hugging Face folder; None is the served model's own, cut down to `num_layers`.
        num_layers: How many of the checkpoint's first layers it has; None is all.
        num_draft_tokens: Tokens proposed for a row in each step.

    Raises:
        ValueError: A number is out of range, `checkpoint` is no path, or neither folder nor number is given.
    """

    checkpoint: str | Path | None = None
    num_layers: int | None = None
    num_draft_tokens: int = 4

    def __post_init__(self):
        for name in ("num_draft_tokens", "num_layers"):
            if getattr(self, name) is not None or name == "num_draft_tokens":
                rule = f"`{name}` must be a whole number of at least 1."
                object.__setattr__(self, name, whole_number(getattr(self, name), rule, 1))
        if self.checkpoint is not None and not isinstance(self.checkpoint, str | os.PathLike):
            raise ValueError(f"`checkpoint` must be None or the path of a folder. Got {self.checkpoint!r}.")
        if self.checkpoint is None and self.num_layers is None:
            raise ValueError(
                "`num_layers` must be given where `checkpoint` is None: the served model, cut down. Got None."
            )

    def checkpoint_beside(self, served: Checkpoint) -> Checkpoint:
        """The draft model's checkpoint; raises as `load` does."""
        checkpoint = served
        if self.checkpoint is not None:
            checkpoint = Checkpoint(self.checkpoint).for_context(served.max_context_len)
        return checkpoint if self.num_layers is None else checkpoint.cut_down(self.num_layers)

    def load(self, served: Checkpoint, *, dtype: Any, parallel: Parallel = ONE_DEVICE) -> CausalLM:
        """The draft model.

        Args:
            served: The served model's checkpoint.
            parallel: The devices that share it.

        Raises:
            FileNotFoundError, ValueError: The checkpoint cannot be used, or has fewer layers; the message says why.
        """
        return load_model(self.checkpoint_beside(served), dtype=dtype, parallel=parallel)

    def propose(
        self,
        model: "TargetAndDraft",
        backend: AttentionBackend,
        pool: KVPool,
        values: LoopState,
        live: Bool[Array, " B"],
        *,
        greedy_only: bool,
    ) -> tuple[Int[Array, "B drafts"], KVPool]:
        """A decode of the draft model for each token, whose keys it writes for all tokens but the last.

        That key is missing if all were accepted, so the first decode of the next step takes two tokens of each row, the
        newest and the one before it.
        """
        assert values.tokens
        assert values.tokens.ids is not None
        newest = values.seq_lens
        before = jnp.maximum(newest - 1, 0)

        def decoded(pool, page_tables, tokens, positions, live):
            return model.read_draft(decode_pass(pool, page_tables, tokens, positions, live), backend, pool)

        def chosen(hidden, positions):
            logits = model.draft.compute_logits(hidden)
            return sample(logits, values.sampling, positions, greedy_only=greedy_only)

        def following(carry, step):
            token, pool = carry
            hidden, pool = decoded(pool, values.page_tables, token, newest + step, live)
            token = chosen(hidden, newest + step + 1)
            return (token, pool), token

        token_before = jnp.take_along_axis(values.tokens.ids, before[:, None], axis=1)[:, 0]
        hidden, pool = decoded(
            pool,
            [jnp.tile(table, (2, 1)) for table in values.page_tables],
            jnp.concatenate([token_before, values.last_tokens]),
            jnp.concatenate([before, newest]),
            jnp.tile(live, 2),
        )
        first = chosen(hidden[newest.shape[0] :], newest + 1)
        (_, pool), rest = lax.scan(following, (first, pool), jnp.arange(1, self.num_draft_tokens, dtype=jnp.int32))
        return jnp.concatenate([first[None], rest]).T, pool


class TargetAndDraft(nnx.Module):
    """The served model and its draft model as one: the pool has the groups of both, over the same pages.

    Prompts go through both models, drafted tokens that are verified through the served one alone.

    Args:
        target: The served model.
        draft: The other.
        max_context_len: Longest request, in tokens.

    Raises:
        ValueError: The draft model has another vocabulary, or is made for shorter texts.
    """

    def __init__(self, target: Any, draft: Any, *, max_context_len: int):
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"The draft model must have the served model's vocabulary of {target.vocab_size} tokens. "
                f"Got {draft.vocab_size}."
            )
        if draft.context_len < max_context_len:
            raise ValueError(
                f"`max_context_len` must not exceed the draft model's {draft.context_len}. Got {max_context_len}."
            )
        self.target, self.draft = target, draft

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """One of each kind that attends differently, in either model."""
        return tuple(dict.fromkeys((*self.target.attention_layers, *self.draft.attention_layers)))

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """The target's groups, then the draft model's."""
        draft = (dataclasses.replace(group, name=f"draft {group.name}") for group in self.draft.kv_groups)
        return (*self.target.kv_groups, *draft)

    def __call__(
        self, forward_batch: ForwardBatch, metadata: Any, backend: AttentionBackend, pool: KVPool
    ) -> tuple[Float[Array, "T D"], KVPool]:
        """The target's last hidden states, and the pool with this pass's keys and values."""
        if not forward_batch.forward_mode.is_target_verify():
            _, pool = self.read_draft(forward_batch, backend, pool)
        split = len(self.target.kv_groups)
        hidden, own = self.target(forward_batch, metadata, backend, KVPool(pool.groups[:split]))
        return hidden, KVPool(own.groups + pool.groups[split:])

    def read_draft(
        self, forward_batch: ForwardBatch, backend: AttentionBackend, pool: KVPool
    ) -> tuple[Float[Array, "T D"], KVPool]:
        """The draft model's last hidden states, and the pool with its keys and values."""
        split = len(self.target.kv_groups)
        tables, slots = forward_batch.page_tables[split:], forward_batch.out_cache_loc[split:]
        batch = dataclasses.replace(forward_batch, page_tables=tables, out_cache_loc=slots)
        hidden, own = self.draft(batch, backend.init_forward_metadata(batch), backend, KVPool(pool.groups[split:]))
        return hidden, KVPool(pool.groups[:split] + own.groups)

    def compute_logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """The target's."""
        return self.target.compute_logits(hidden)

    def best_token(self, hidden: Float[Array, "B D"]) -> Int32[Array, " B"]:
        """The target's likeliest token after each, or NO_TOKEN."""
        return self.target.best_token(hidden)
