"""Rules on a request's logits ahead of the sampler: bias, minimum of tokens, and penalties on tokens seen before."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jattn.pytree import pytree


@pytree(kw_only=True)
class LogitRules:
    """What each row's request asks of its logits; see `SamplingParams`.

    Attributes:
        in_force: Whether the row's request asks for any of this; if not, the other fields may be a former request's.
        repetition_penalty, presence_penalty, frequency_penalty: On tokens seen before.
        bias_ids, bias: Tokens and what is added to their logits; padded with 0 for any of them.
        only_listed: Whether no other token may come than those of `bias_ids`.
        prompt_len: Tokens of the prompt; those after it are the output.
        min_len: A stop token may not come before this position.
    """

    in_force: Bool[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    bias_ids: Int[Array, "B biases"]
    bias: Float[Array, "B biases"]
    only_listed: Bool[Array, " B"]
    prompt_len: Int[Array, " B"]
    min_len: Int[Array, " B"]


@pytree(kw_only=True)
class TokenHistory:
    """Which tokens each row has seen; kept only for rows whose rules are in force.

    Attributes:
        in_prompt: Whether the prompt has the token.
        output_counts: How often the output has it.
    """

    in_prompt: Bool[Array, "R V"]
    output_counts: Int[Array, "R V"]

    def with_parts(
        self,
        rows: Int[Array, " B"],
        is_first: Bool[Array, " B"],
        owner: Int[Array, " T"],
        token_ids: Int[Array, " T"],
        in_prompt: Bool[Array, " T"],
        in_output: Bool[Array, " T"],
    ) -> "TokenHistory":
        """The history after parts of sequences were computed.

        Args:
            rows: Of the sequences; out of range writes nowhere.
            is_first: Whether a sequence's part is its first, so that its row starts anew; all parts must pass here.
            owner: Each token's sequence.
            in_prompt, in_output: What a token is; padding is neither.
        """
        nowhere = self.in_prompt.shape[0]
        fresh = jnp.where(is_first, rows, nowhere)
        rows = rows[owner]
        prompt, output = (jnp.where(is_part, rows, nowhere) for is_part in (in_prompt, in_output))
        seen = self.in_prompt.at[fresh].set(False, mode="drop")
        counts = self.output_counts.at[fresh].set(0, mode="drop")
        return TokenHistory(
            in_prompt=seen.at[prompt, token_ids].set(True, mode="drop"),
            output_counts=counts.at[output, token_ids].add(1, mode="drop"),
        )

    def with_tokens(self, rows: Int[Array, " B"], tokens: Int[Array, " B"]) -> "TokenHistory":
        """The history after each row chose a token; a row out of range writes nowhere."""
        return dataclasses.replace(self, output_counts=self.output_counts.at[rows, tokens].add(1, mode="drop"))

    def along(self, drafts: Int[Array, "B drafts"]) -> "TokenHistory":
        """The rows' histories at each place of a drafted run, row by row: before it, after its first token, and so on.

        Args:
            drafts: The runs; a negative number is no token.
        """
        num_rows, length = drafts.shape[0], drafts.shape[1] + 1
        place = jnp.arange(num_rows * length, dtype=jnp.int32)[:, None]
        nowhere = self.in_prompt.shape[1]
        is_before = jnp.arange(length - 1, dtype=jnp.int32)[None] < place % length
        before = jnp.where(is_before & (drafts >= 0)[place[:, 0] // length], drafts[place[:, 0] // length], nowhere)
        counts = jnp.repeat(self.output_counts, length, axis=0)
        return TokenHistory(
            in_prompt=jnp.repeat(self.in_prompt, length, axis=0),
            output_counts=counts.at[place, before].add(1, mode="drop"),
        )


@pytree(kw_only=True)
class TokenMasks:
    """The tokens that may come in each row.

    Attributes:
        in_force: Whether the row has a mask; if not, all may come.
        bits: A bit for each token, 32 in a word, the lowest one first; 1 if the token may come.
    """

    in_force: Bool[Array, " B"]
    bits: UInt32[Array, "B words"]


def apply_masks(logits: Float[Array, "B V"], masks: TokenMasks) -> Float[Array, "B V"]:
    """The logits, -inf for tokens that may not come."""
    bits = (masks.bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    is_allowed = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] > 0
    return jnp.where(is_allowed | ~masks.in_force[:, None], logits, -jnp.inf)


def empty_history(num_rows: int, vocab_size: int, max_context_len: int) -> TokenHistory:
    """The history of rows that no request uses yet; counts are as wide as a context needs."""
    dtype = jnp.int16 if max_context_len < 2**15 else jnp.int32
    return TokenHistory(
        in_prompt=jnp.zeros((num_rows, vocab_size), jnp.bool_),
        output_counts=jnp.zeros((num_rows, vocab_size), dtype),
    )


def empty_rules(num_rows: int, max_logit_bias: int, numpy: Any = jnp) -> LogitRules:
    """Rows without rules, made by `numpy`: jax.numpy for the device, NumPy for the host."""
    zeros = functools.partial(numpy.zeros, num_rows)
    return LogitRules(
        in_force=zeros(jnp.bool_),
        repetition_penalty=zeros(jnp.float32),
        presence_penalty=zeros(jnp.float32),
        frequency_penalty=zeros(jnp.float32),
        bias_ids=numpy.zeros((num_rows, max_logit_bias), jnp.int32),
        bias=numpy.zeros((num_rows, max_logit_bias), jnp.float32),
        only_listed=zeros(jnp.bool_),
        prompt_len=zeros(jnp.int32),
        min_len=zeros(jnp.int32),
    )


def apply_rules(
    logits: Float[Array, "B V"],
    rules: LogitRules,
    history: TokenHistory,
    stop_ids: Int[Array, "B stops"],
    positions: Int[Array, " B"],
) -> Float[Array, "B V"]:
    """The logits under each row's rules, in vLLM's order: bias, allowed tokens, no early stop, then the penalties.

    Args:
        history: Of these rows.
        stop_ids: Tokens that end a row; padded with -1.
        positions: Of the token to be chosen, in its sequence.
    """
    num_rows, vocab_size = logits.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    ruled = logits.at[row, rules.bias_ids].add(rules.bias.astype(logits.dtype))
    is_listed = jnp.zeros(logits.shape, jnp.bool_).at[row, rules.bias_ids].set(True)
    ruled = jnp.where(rules.only_listed[:, None] & ~is_listed, -jnp.inf, ruled)
    is_banned = (positions < rules.min_len)[:, None] & (stop_ids >= 0)
    ruled = ruled.at[row, jnp.where(is_banned, stop_ids, vocab_size)].set(-jnp.inf, mode="drop")
    in_output = history.output_counts > 0
    penalty = jnp.where(in_output | history.in_prompt, rules.repetition_penalty[:, None], 1.0)
    ruled = jnp.where(ruled > 0, ruled / penalty, ruled * penalty)
    ruled -= rules.frequency_penalty[:, None] * history.output_counts.astype(jnp.float32)
    ruled -= rules.presence_penalty[:, None] * in_output.astype(jnp.float32)
    return jnp.where(rules.in_force[:, None], ruled, logits)
