"""The decode step that drafts tokens and verifies them: several tokens a row, the same ones that plain decode gives.

The model runs over each row's newest token and the drafted ones after it, and at each place the row's token is chosen
as plain decode would choose it there, with the key of that position. As long as the drafted tokens are the chosen ones,
the places after them are right too (Leviathan et al., 2023; a draw whose noise is fixed makes their test an equality).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn.kv_pool import KVPool
from jattn.serving.steps.choice import Variant
from jattn.serving.steps.drafting import NO_DRAFT, Drafter
from jattn.serving.steps.logit_rules import TokenMasks
from jattn.serving.steps.logprobs import token_logprobs
from jattn.serving.steps.loop_state import LoopState
from jattn.serving.steps.passes import verify_pass
from jattn.serving.steps.plain import UNUSED, StepOutput, Steps, Unsampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeSteps(Steps):
    """Steps whose decode verifies drafted tokens.

    Attributes:
        drafter: Proposes them.
    """

    drafter: Drafter

    def forward_decode(
        self,
        weights: Any,
        state: LoopState,
        pool: KVPool,
        plan: Int[Array, "B plan"],
        *,
        variant: Variant,
    ) -> tuple[LoopState, KVPool, Unsampled]:
        """Drafts tokens for each row and computes them with it, so that it may be given several; else as `Steps` do.

        Keys are written for all drafted tokens; those that are not accepted lie past the row's length, where the next
        step's go.
        """
        rows, state = plan[:, 0], state.with_pages(plan)
        values = state.take(rows)
        live = (rows < state.finished.shape[0]) & ~values.finished
        drafts, pool = self.drafter.propose(
            self._model(weights), self.backend, pool, values, live, greedy_only=variant == "greedy"
        )
        last = values.last_tokens[:, None]
        # In place of a token that is not drafted any one will do; the newest harms no row that it is in already.
        tokens = jnp.concatenate([last, jnp.where(drafts >= 0, drafts, last)], axis=1)
        hidden, pool = self._forward(
            weights, pool, verify_pass(pool, values.page_tables, tokens, values.seq_lens, live)
        )
        return state, pool, Unsampled(hidden=hidden, rows=rows, live=live, drafts=drafts)

    def sample(
        self,
        weights: Any,
        state: LoopState,
        unsampled: Unsampled,
        masks: TokenMasks | None = None,
        *,
        variant: Variant,
    ) -> tuple[LoopState, StepOutput]:
        """The tokens that the live rows are given, chosen as `Steps.sample` would one by one.

        A row with a mask is given one: which tokens may come after it the host does not know yet.
        """
        if unsampled.drafts is None:
            return super().sample(weights, state, unsampled, masks, variant=variant)
        rows, live, drafts = unsampled.rows, unsampled.live, unsampled.drafts
        if masks is not None:
            drafts = jnp.where(masks.in_force[:, None], NO_DRAFT, drafts)
            masks = jax.tree.map(lambda leaf: jnp.repeat(leaf, drafts.shape[1] + 1, axis=0), masks)
        values = state.take(rows)
        at_places = _at_places(values, drafts, variant)
        choice, logits = self._choose(weights, unsampled.hidden, at_places, variant, masks)
        assert values.tokens
        by_row = (drafts.shape[0], drafts.shape[1] + 1)
        positions = at_places.seq_lens.reshape(by_row)
        chosen = choice.tokens.reshape(by_row)
        ends = (choice.broken | choice.stopped).reshape(by_row) | (positions + 1 >= values.tokens.limits[:, None])
        num_accepted, count = accepted(drafts, chosen, ends)
        is_given = live[:, None] & (jnp.arange(by_row[1], dtype=jnp.int32)[None] < count[:, None])

        nowhere = state.finished.shape[0]
        given_rows, rows = jnp.where(is_given, rows[:, None], nowhere), jnp.where(live, rows, nowhere)
        newest = jnp.take_along_axis(chosen, count[:, None] - 1, axis=1)[:, 0]
        state = dataclasses.replace(
            state,
            last_tokens=state.last_tokens.at[rows].set(newest, mode="drop"),
            seq_lens=state.seq_lens.at[rows].add(count, mode="drop"),
            finished=state.finished.at[rows].set(jnp.any(is_given & ends, axis=1), mode="drop"),
        )
        state = state.with_tokens(given_rows, positions, chosen)
        num_drafted = jnp.sum(drafts >= 0, axis=1, dtype=jnp.int32)
        output = StepOutput(
            tokens=jnp.where(is_given, chosen, UNUSED), drafts=jnp.stack([num_drafted, num_accepted], axis=1)
        )
        if variant != "full":
            return state, output
        assert state.history
        tokens = jnp.maximum(choice.tokens, 0)
        state = dataclasses.replace(state, history=state.history.with_tokens(given_rows.reshape(-1), tokens))
        logprobs = token_logprobs(logits, tokens, top=self.max_logprobs)
        return state, dataclasses.replace(output, logprobs=logprobs)


def _at_places(values: LoopState, drafts: Int[Array, "B drafts"], variant: Variant) -> LoopState:
    """The rows as they are at each place of their runs, row by row, if all drafted tokens before it are right.

    `seq_lens` is the position of the token to be chosen there.
    """
    length = drafts.shape[1] + 1
    history = values.history.along(drafts) if variant == "full" and values.history else None
    values = jax.tree.map(lambda leaf: jnp.repeat(leaf, length, axis=0), dataclasses.replace(values, history=None))
    place = jnp.tile(jnp.arange(length, dtype=jnp.int32), drafts.shape[0])
    return dataclasses.replace(values, seq_lens=values.seq_lens + 1 + place, history=history)


def accepted(
    drafts: Int[Array, "B drafts"], chosen: Int[Array, "B D"], ends: Bool[Array, "B D"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many drafted tokens each row accepts, and how many tokens it is given in all, one at least.

    Args:
        drafts: At place i the token that is proposed for place i; negative for none.
        chosen: The token that the model's logits give at each place, if the drafted ones before it are right; negative
            where they are not finite.
        ends: Whether the row ends with that token.
    """
    num_right = _leading((drafts >= 0) & (drafts == chosen[:, :-1]))
    count = jnp.minimum(num_right, _leading(~ends)) + 1
    return jnp.minimum(num_right, count), count


def _leading(holds: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """At how many places in a row, from the first on, it holds."""
    return jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
