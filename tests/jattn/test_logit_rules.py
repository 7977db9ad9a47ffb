"""Rules on logits against transformers' processors and NumPy; the history that penalties need against a recount."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.steps.logit_rules import TokenHistory, apply_rules, empty_history, empty_rules
from jattn.serving.steps.sampler import SamplingState, drawn_logits

GOLDEN = np.load(Path(__file__).parent / "golden" / "sampling.npz")
CASES = sorted({name.split("/")[0] for name in GOLDEN.files})


# Compiled as a whole, as a step has them.
compiled_rules, compiled_drawn = jax.jit(apply_rules), jax.jit(drawn_logits)
with_parts, with_tokens = jax.jit(TokenHistory.with_parts), jax.jit(TokenHistory.with_tokens)


def rules_of(batch, *, max_logit_bias=4, **fields):
    """Rules in force for each row; a field is one value for all, or one for each."""
    neutral = {"in_force": True, "repetition_penalty": 1.0}
    rules = empty_rules(batch, max_logit_bias, np)
    for name, value in (neutral | fields).items():
        getattr(rules, name)[...] = value
    return jax.tree.map(jnp.asarray, rules)


def counted(prompts, outputs, vocab_size):
    """The history of each row, counted in NumPy."""
    counts = [[np.bincount(ids, minlength=vocab_size) for ids in rows] for rows in (prompts, outputs)]
    in_prompt, output_counts = (np.stack(rows) for rows in counts)
    return TokenHistory(in_prompt=jnp.asarray(in_prompt > 0), output_counts=jnp.asarray(output_counts.astype(np.int16)))


@pytest.mark.parametrize("case", CASES)
def test_rules_and_sampler_agree_with_transformers(case):
    """The penalties' rounding is theirs: one multiplication or division in float32, so the logits are equal."""
    golden = {name.split("/")[1]: GOLDEN[name] for name in GOLDEN.files if name.startswith(case + "/")}
    logits, prompt, output = golden["logits"], golden["prompt"], golden["output"]
    batch, vocab_size = logits.shape
    params = {name: float(golden[name]) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    rules = rules_of(
        batch,
        max_logit_bias=len(golden["bias_ids"]),
        repetition_penalty=params["repetition_penalty"],
        bias_ids=golden["bias_ids"],
        bias=golden["bias"],
        prompt_len=prompt.shape[1],
        min_len=prompt.shape[1] + int(golden["min_tokens"]),
    )
    positions = jnp.full(batch, prompt.shape[1] + output.shape[1], jnp.int32)
    stop_ids = jnp.asarray(np.broadcast_to(golden["stop_ids"], (batch, len(golden["stop_ids"]))))
    history = counted(prompt, output, vocab_size)
    ruled = compiled_rules(jnp.asarray(logits), rules, history, stop_ids, positions)
    np.testing.assert_array_equal(ruled, golden["ruled"])

    def column(name, dtype):
        return jnp.full(batch, params[name], dtype)

    sampling = SamplingState(
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        seed=jnp.zeros(batch, jnp.uint32),
    )
    drawn = np.asarray(compiled_drawn(ruled, sampling))
    expected = golden["drawn"] - golden["drawn"].max(axis=1, keepdims=True)
    np.testing.assert_array_equal(drawn == -np.inf, expected == -np.inf)
    # Both divide numbers of up to 2**5 by the temperature: an ulp of the greatest, before and after the subtraction.
    largest = np.abs(logits).max() / params["temperature"]
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=4 * np.finfo(np.float32).eps * largest)


def test_frequency_and_presence_penalties_are_openais_formula():
    random = np.random.default_rng(0)
    logits = random.normal(0, 4, (6, 40)).astype(np.float32)
    prompts, outputs = random.integers(0, 40, (6, 9)), random.integers(0, 40, (6, 50))
    frequency, presence = random.uniform(-2, 2, (2, 6)).astype(np.float32)
    rules = rules_of(6, frequency_penalty=frequency, presence_penalty=presence)
    no_stop, positions = jnp.full((6, 1), -1, jnp.int32), jnp.zeros(6, jnp.int32)
    ruled = compiled_rules(jnp.asarray(logits), rules, counted(prompts, outputs, 40), no_stop, positions)
    ruled = np.asarray(ruled)
    for row in range(6):
        for token in range(40):
            count = np.count_nonzero(outputs[row] == token)
            penalty = float(frequency[row]) * count + float(presence[row]) * (count > 0)
            # Two roundings of numbers below 2 * 50 in all.
            assert abs(float(ruled[row, token]) - (logits[row, token] - penalty)) < 100 * 2**-23


def test_rules_not_in_force_leave_the_logits():
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 4, (2, 8)).astype(np.float32))
    rules = rules_of(
        2, in_force=[True, False], repetition_penalty=2.0, frequency_penalty=1.0, bias_ids=3, bias=5.0, min_len=99
    )
    history = TokenHistory(in_prompt=jnp.ones((2, 8), bool), output_counts=jnp.ones((2, 8), jnp.int16))
    ruled = compiled_rules(logits, rules, history, jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32))
    assert np.all(np.asarray(ruled[0]) != np.asarray(logits[0]))
    np.testing.assert_array_equal(ruled[1], logits[1])


@pytest.mark.parametrize(("position", "banned"), [(4, True), (5, True), (6, False)])
def test_min_len_bans_stop_tokens_before_it_and_no_others(position, banned):
    logits = jnp.zeros((1, 5), jnp.float32)
    ruled = compiled_rules(
        logits,
        rules_of(1, min_len=6),
        empty_history(1, 5, 99),
        jnp.array([[3, 1, -1]], jnp.int32),
        jnp.array([position], jnp.int32),
    )
    assert np.isneginf(np.asarray(ruled)[0]).tolist() == [False, banned, False, banned, False]


def test_history_of_parts_is_a_recount():
    """Random sequences in random parts, restarted now and then, in a batch with padding."""
    random = np.random.default_rng(2)
    num_rows, vocab_size, prompt_len = 5, 7, 6
    history = empty_history(num_rows, vocab_size, 99)
    sequences = {row: [] for row in range(num_rows)}
    for _ in range(60):
        rows = random.permutation(num_rows + 2)[:3]  # beyond num_rows: padding
        lens = np.where(rows < num_rows, random.integers(0, 5, 3), 0)
        starts = np.zeros(3, int)
        for row in rows[rows < num_rows]:
            if random.random() < 0.2:
                sequences[row].clear()
        ids = np.zeros(16, np.int32)
        owner, in_prompt, in_output = np.zeros(16, np.int32), np.zeros(16, bool), np.zeros(16, bool)
        end = 0
        for i, row in enumerate(rows):
            sequence = sequences.get(row, [])
            starts[i] = len(sequence)
            for _ in range(lens[i]):
                ids[end], owner[end] = random.integers(vocab_size), i
                in_prompt[end] = len(sequence) < prompt_len
                in_output[end] = ~in_prompt[end]
                sequence.append(int(ids[end]))
                end += 1
        history = with_parts(
            history,
            jnp.asarray(rows.astype(np.int32)),
            jnp.asarray((starts == 0) & (rows < num_rows)),
            *map(jnp.asarray, (owner, ids, in_prompt, in_output)),
        )
        chosen = random.integers(vocab_size, size=3).astype(np.int32)
        live = (lens > 0) & (starts + lens >= prompt_len)
        history = with_tokens(
            history, jnp.asarray(np.where(live, rows, num_rows).astype(np.int32)), jnp.asarray(chosen)
        )
        for row, token in zip(rows[live], chosen[live], strict=True):
            sequences[row].append(int(token))
        for row, sequence in sequences.items():
            prompt, output = sequence[:prompt_len], sequence[prompt_len:]
            expected = counted([prompt], [output], vocab_size)
            np.testing.assert_array_equal(np.asarray(history.in_prompt)[row], np.asarray(expected.in_prompt)[0])
            np.testing.assert_array_equal(np.asarray(history.output_counts)[row], np.asarray(expected.output_counts)[0])


@pytest.mark.parametrize(("context", "dtype"), [(2**15 - 1, jnp.int16), (2**15, jnp.int32)])
def test_history_counts_a_whole_context(context, dtype):
    assert empty_history(2, 3, context).output_counts.dtype == dtype
    assert jnp.iinfo(dtype).max >= context
