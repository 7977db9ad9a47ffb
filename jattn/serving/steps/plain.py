"""The two steps of the serving loop, prefill and decode, as pure functions of arrays."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jattn.backend import AttentionBackend
from jattn.forward_batch import ForwardMode
from jattn.kv_pool import KVPool
from jattn.parallel import ONE_DEVICE, Parallel
from jattn.pytree import pytree
from jattn.serving.steps.choice import Choice, Variant, choose, stops
from jattn.serving.steps.logit_rules import TokenMasks
from jattn.serving.steps.logprobs import TokenLogprobs, token_logprobs
from jattn.serving.steps.loop_state import LoopState
from jattn.serving.steps.passes import decode_pass, owners, ragged_pass
from jattn_kernels import call

UNUSED = -2  # in a token's place: the row has no more of them from this step


@pytree(kw_only=True)
class PrefillBatch:
    """Parts of prompts, sequence by sequence, padded to a bucket.

    Attributes:
        input_ids: Tokens; 0 past the last.
        cu_q_lens: Where each sequence's tokens begin; padded sequences have none.
        rows: The loop state's row of each sequence; out of range where padded.
        is_first: Whether the part is its request's first, so that what the row's former request left is forgotten.
            Tokens before it, if any, are in the pool and on no record (`Steps.note` puts them there).
        is_last: Whether the sequence's prompt ends here, so that a token is sampled.
        values: The rows' new content. `seq_lens` counts the keys once this launch has run; `last_tokens` and
            `finished` are the launch's to fill.
        window_pages: Of the rows' pages those that this launch reads or writes, in each page list but the first, as
            `LoopState.with_window_pages` takes them.
    """

    input_ids: Int[Array, " T"]
    cu_q_lens: Int[Array, " B+1"]
    rows: Int[Array, " B"]
    is_first: Bool[Array, " B"]
    is_last: Bool[Array, " B"]
    values: LoopState
    window_pages: tuple[Int[Array, "B pages"], ...] = ()


@pytree(kw_only=True)
class StepOutput:
    """What the host reads of a launch, but for `prompt_hidden`.

    Attributes:
        tokens: The next token of each row of the launch, after a prefill of each row of the loop state; of a step that
            verifies, those that it accepts, and UNUSED past the last.
        logprobs: Its log-probabilities, in the full variant; of a step that verifies, place by place of each row.
        prompt_hidden: What `score` takes, in the full variant of a prefill.
        drafts: Of a step that verifies, how many tokens were drafted for each row, and how many of them accepted.
    """

    tokens: Int[Array, " B"] | Int[Array, "B D"]
    logprobs: TokenLogprobs | None = None
    prompt_hidden: Float[Array, "M D"] | None = None
    drafts: Int[Array, "B 2"] | None = None


@pytree(kw_only=True)
class Unsampled:
    """What a forward pass leaves to choose tokens from.

    Attributes:
        hidden: At each place that may give a token.
        rows: The loop state's row of each sequence.
        live: Whether the sequence gives a token.
        drafts: The tokens drafted for each sequence, whose places follow its own; None of a step that verifies none.
        prompt_hidden: What `StepOutput` is to have.
    """

    hidden: Float[Array, "N D"]
    rows: Int[Array, " B"]
    live: Bool[Array, " B"]
    drafts: Int[Array, "B drafts"] | None = None
    prompt_hidden: Float[Array, "M D"] | None = None


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of one model; static, so that weights, state and pool are all arguments.

    Each is a forward pass and the choice of tokens. These are steps of their own too: between them the host may find
    out which tokens may come, while the pass runs.

    Results come in the order of the arguments, state and pool before what is new: JAX gives the memory of donated
    arrays to results of their shape in that order, and tokens of all rows would take that of a part of the state, which
    XLA would then copy.

    Attributes:
        graph: The model without its arrays (`nnx.split`).
        backend: Attention for every layer.
        max_logprobs: Likeliest tokens whose log-probabilities the full variant gives.
        parallel: The devices that share the model.
        prefill_tokens: Tokens of the largest prefill, M.
    """

    graph: nnx.GraphDef
    backend: AttentionBackend
    max_logprobs: int = 0
    parallel: Parallel = ONE_DEVICE
    prefill_tokens: int = 0

    def prefill(
        self,
        weights: Any,
        state: LoopState,
        pool: KVPool,
        plan: Int[Array, "D plan"],
        batch: PrefillBatch,
        *,
        variant: Variant,
    ) -> tuple[LoopState, KVPool, StepOutput]:
        """Computes parts of prompts, and the token that follows each one that ends; beside them decodes, in one launch.

        The decodes' tokens come behind those of the prompts. State and pool are donated.

        Args:
            plan: The rows that decode, as in `decode`; none, if the step has no places for them.
        """
        state, pool, unsampled = self.forward_prefill(weights, state, pool, plan, batch, variant=variant)
        state, output = self.sample(weights, state, unsampled, variant=variant)
        return state, pool, dataclasses.replace(output, prompt_hidden=unsampled.prompt_hidden)

    def forward_prefill(
        self,
        weights: Any,
        state: LoopState,
        pool: KVPool,
        plan: Int[Array, "D plan"],
        batch: PrefillBatch,
        *,
        variant: Variant,
    ) -> tuple[LoopState, KVPool, Unsampled]:
        """`prefill` but for the choice of tokens."""
        state = state.put(batch.rows, batch.values).with_window_pages(batch.rows, batch.window_pages).with_pages(plan)
        decoding, num_rows = plan[:, 0], state.finished.shape[0]
        live = ~state.finished.at[decoding].get(mode="fill", fill_value=True)
        q_lens = live.astype(jnp.int32)
        state = dataclasses.replace(state, seq_lens=state.seq_lens.at[decoding].add(q_lens, mode="drop"))
        rows = jnp.concatenate([batch.rows, decoding])
        values = state.take(rows)
        cu_q_lens = jnp.concatenate([batch.cu_q_lens, batch.cu_q_lens[-1] + jnp.cumsum(q_lens, dtype=jnp.int32)])
        num_prompts, num_tokens = batch.rows.shape[0], batch.input_ids.shape[0]
        places = jnp.where(live, cu_q_lens[num_prompts:-1], num_tokens)
        tokens = batch.input_ids.at[places].set(values.last_tokens[num_prompts:], mode="drop")
        seq_lens = jnp.where(jnp.diff(cu_q_lens) > 0, values.seq_lens, 0)
        mode = ForwardMode.MIXED if plan.shape[0] else ForwardMode.EXTEND
        forward_batch = ragged_pass(pool, values.page_tables, tokens, seq_lens, cu_q_lens, mode=mode)
        hidden, pool = self._forward(weights, pool, forward_batch)
        owner, is_real = owners(batch.cu_q_lens, num_tokens)
        state = self._recorded(state, batch, owner, is_real, forward_batch.positions, variant=variant)
        # A row is in one sequence here at most: by row, there are the fewest tokens to choose.
        last = jnp.zeros(num_rows, jnp.int32).at[rows].set(jnp.maximum(cu_q_lens[1:] - 1, 0), mode="drop")
        gives = jnp.concatenate([batch.is_last, live])
        gives = jnp.zeros(num_rows, jnp.bool_).at[rows].set(gives, mode="drop")
        every = jnp.arange(num_rows, dtype=jnp.int32)
        padding = ((0, max(0, self.prefill_tokens - num_tokens)), (0, 0))
        of_prompts = jnp.pad(hidden, padding) if variant == "full" else None
        return state, pool, Unsampled(hidden=hidden[last], rows=every, live=gives, prompt_hidden=of_prompts)

    def decode(
        self,
        weights: Any,
        state: LoopState,
        pool: KVPool,
        plan: Int[Array, "B plan"],
        *,
        variant: Variant,
    ) -> tuple[LoopState, KVPool, StepOutput]:
        """One more token for each row; finished and padded rows write nowhere. State and pool are donated.

        On a GPU layers run in turn without a loop: as a turn of a loop it would keep copies of their weights.

        Args:
            plan: The rows and their last pages, as `LoopState.with_pages` takes them.
        """
        state, pool, unsampled = self.forward_decode(weights, state, pool, plan, variant=variant)
        state, output = self.sample(weights, state, unsampled, variant=variant)
        return state, pool, output

    def forward_decode(
        self,
        weights: Any,
        state: LoopState,
        pool: KVPool,
        plan: Int[Array, "B plan"],
        *,
        variant: Variant,
    ) -> tuple[LoopState, KVPool, Unsampled]:
        """`decode` but for the choice of tokens."""
        rows, (state, values) = plan[:, 0], state.taken_with_pages(plan)
        live = (rows < state.finished.shape[0]) & ~values.finished
        unrolled = call.default_device().platform == "gpu"
        # A kernel that reads rows of the state by their numbers cannot write them in place: XLA would copy them first.
        # Behind a barrier it makes no kernel that does both.
        tables = lax.optimization_barrier(values.page_tables)
        batch = decode_pass(pool, tables, values.last_tokens, values.seq_lens, live, unrolled=unrolled)
        live = lax.optimization_barrier(live)
        hidden, pool = self._forward(weights, pool, batch)
        return state.grown(rows, live), pool, Unsampled(hidden=hidden, rows=rows, live=live)

    def sample(
        self,
        weights: Any,
        state: LoopState,
        unsampled: Unsampled,
        masks: TokenMasks | None = None,
        *,
        variant: Variant,
    ) -> tuple[LoopState, StepOutput]:
        """The live rows' next tokens, drawn with each row's key for the position they will have. State is donated.

        A row whose logits are not finite, or that no token is left to, has finished, and yields NO_TOKEN.

        Args:
            masks: Of the rows of `unsampled`; None where all tokens may come.
        """
        rows, live = unsampled.rows, unsampled.live
        values = state.take(rows)
        choice, logits = self._choose(weights, unsampled.hidden, values, variant, masks)
        tokens, finished = jnp.maximum(choice.tokens, 0), choice.stopped | choice.broken
        state = state.with_values(state.places(rows, live), last_tokens=tokens, finished=finished)
        rows = jnp.where(live, rows, state.finished.shape[0])
        state = state.with_tokens(rows, values.seq_lens, tokens)
        output = StepOutput(tokens=choice.tokens)
        if variant != "full":
            return state, output
        assert state.history
        state = dataclasses.replace(state, history=state.history.with_tokens(rows, tokens))
        return state, dataclasses.replace(output, logprobs=token_logprobs(logits, tokens, top=self.max_logprobs))

    def score(self, weights: Any, hidden: Float[Array, "M D"], places: Int[Array, "S 2"]) -> TokenLogprobs:
        """Log-probabilities of tokens of prompts.

        A step of its own, as only the host knows without asking the device whether any are wanted.

        Args:
            hidden: `StepOutput.prompt_hidden`.
            places: Where the token before is in the launch, and the token.
        """
        logits = self._logits(weights, hidden[places[:, 0]])
        return token_logprobs(logits, places[:, 1], top=self.max_logprobs)

    def note(self, state: LoopState, batch: PrefillBatch, *, variant: Variant) -> LoopState:
        """The state once parts of sequences are on record that no prefill computes, as the pool has their keys.

        State is donated.
        """
        state = state.put(batch.rows, batch.values)
        owner, is_real = owners(batch.cu_q_lens, batch.input_ids.shape[0])
        positions = (batch.values.seq_lens - batch.cu_q_lens[1:])[owner] + jnp.arange(owner.shape[0], dtype=jnp.int32)
        return self._recorded(state, batch, owner, is_real, positions, variant=variant)

    def _model(self, weights):
        return nnx.merge(self.graph, weights)

    def _forward(self, weights, pool, forward_batch):
        metadata = self.backend.init_forward_metadata(forward_batch)
        return self._model(weights)(forward_batch, metadata, self.backend, pool)

    def _recorded(self, state, batch, owner, is_real, positions, *, variant):
        """The state that has the parts of prompts on record, as far as drafting and the rules read it."""
        row_of_token = jnp.where(is_real, batch.rows[owner], state.finished.shape[0])
        fresh = jnp.where(batch.is_first, batch.rows, state.finished.shape[0])
        state = state.without_tokens(fresh).with_tokens(row_of_token, positions, batch.input_ids)
        if variant != "full":
            return state.without_rules(batch.rows)
        assert state.history
        assert batch.values.rules
        in_prompt = positions < batch.values.rules.prompt_len[owner]
        history = state.history.with_parts(
            batch.rows, batch.is_first, owner, batch.input_ids, is_real & in_prompt, is_real & ~in_prompt
        )
        return dataclasses.replace(state, history=history)

    def _logits(self, weights, hidden):
        return self._model(weights).compute_logits(hidden)

    def _choose(self, weights, hidden, values, variant, masks) -> tuple[Choice, Any]:
        """A token at each place, and the logits, which several devices do not gather where nobody else needs them."""
        if variant != "greedy" or masks is not None:
            logits = self._logits(weights, hidden)
            return choose(logits, values, variant, masks), logits
        if self.parallel.axis is None:
            logits = self._logits(weights, hidden)
            tokens = self.parallel.best_token(logits)
        else:
            logits, tokens = None, self._model(weights).best_token(hidden)
        return Choice(tokens=tokens, broken=tokens < 0, stopped=stops(tokens, values.stop_ids)), logits
