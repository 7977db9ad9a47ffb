"""Prompt lookup against a NumPy account of it, and what a step accepts against a loop over its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.config import EngineConfig
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import NO_DRAFT, NgramDrafting, check_drafter
from jattn.serving.steps.verification import accepted
from tests.jattn.harness.prompt_lookup import prompt_lookup


@pytest.mark.parametrize(
    ("num_draft_tokens", "max_ngram", "min_ngram"), [(4, 3, 1), (1, 1, 1), (7, 2, 2), (3, 5, 3), (12, 40, 1)]
)
def test_lookup_proposes_what_followed_the_latest_longest_match(num_draft_tokens, max_ngram, min_ngram):
    drafter = NgramDrafting(num_draft_tokens=num_draft_tokens, max_ngram=max_ngram, min_ngram=min_ngram)
    rng = np.random.default_rng(num_draft_tokens)
    lookup, seen = jax.jit(drafter.lookup), set()
    for vocab_size in (1, 2, 3, 10, 1000):
        texts = rng.integers(0, vocab_size, (40, 24), dtype=np.int32)
        lengths = rng.integers(0, 25, 40, dtype=np.int32)
        drafts = np.asarray(lookup(jnp.asarray(texts), jnp.asarray(lengths)))
        for text, length, found in zip(texts, lengths, drafts, strict=True):
            expected = prompt_lookup(text[:length].tolist(), num_draft_tokens, max_ngram, min_ngram)
            assert found.tolist() == (expected or [NO_DRAFT] * num_draft_tokens)
            seen.add(bool(expected))
    assert seen == {True, False}


def test_lookup_goes_on_with_itself_past_the_end_of_the_text():
    drafter = NgramDrafting(num_draft_tokens=5)
    texts = jnp.array([[7, 1, 2, 3, 1, 2, 3], [5, 5, 9, 9, 9, 9, 9]], jnp.int32)
    drafts = drafter.lookup(texts, jnp.array([7, 7], jnp.int32))
    assert drafts.tolist() == [[1, 2, 3, 1, 2], [9, 9, 9, 9, 9]]


def test_accepted_run_ends_at_the_first_wrong_draft_or_last_token():
    rng = np.random.default_rng(0)
    drafts = rng.integers(-1, 2, (500, 4), dtype=np.int32)
    chosen = rng.integers(0, 2, (500, 5), dtype=np.int32)
    ends = rng.random((500, 5)) < 0.2
    num_accepted, count = jax.jit(accepted)(jnp.asarray(drafts), jnp.asarray(chosen), jnp.asarray(ends))
    for row in range(500):
        given, right = 0, 0
        while True:
            is_draft = given < 4 and drafts[row, given] == chosen[row, given]
            right += is_draft
            given += 1
            if not is_draft or ends[row, given - 1]:
                break
        assert (int(num_accepted[row]), int(count[row])) == (right, given)


def test_token_of_logits_that_are_not_finite_is_no_draft():
    """A negative token marks it, and no draft is marked so too."""
    num_accepted, count = accepted(
        jnp.full((1, 2), NO_DRAFT, jnp.int32), jnp.array([[-1, 5, 5]], jnp.int32), jnp.array([[True, False, False]])
    )
    assert (num_accepted.tolist(), count.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_draft_tokens": 0}, "`num_draft_tokens` must be a whole number of at least 1. Got 0"),
        ({"max_ngram": -1}, "`max_ngram` must be a whole number of at least 1. Got -1"),
        ({"min_ngram": True}, "`min_ngram` must be a whole number of at least 1. Got True"),
        ({"min_ngram": 4}, "`min_ngram` must be at most `max_ngram`. Got min_ngram=4, max_ngram=3"),
    ],
)
def test_ngram_drafting_refuses_what_is_out_of_range(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        NgramDrafting(**arguments)


def test_lookup_of_long_ngrams_is_no_longer_to_compile():
    def operations(max_ngram):
        drafter = NgramDrafting(max_ngram=max_ngram)
        return len(jax.jit(drafter.lookup).lower(jnp.zeros((2, 600), jnp.int32), jnp.zeros(2, jnp.int32)).as_text())

    assert operations(500) < 1.1 * operations(8)


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        (NgramDrafting(num_draft_tokens=64), "`num_draft_tokens` of `speculative` must be below .*, 64. Got .*=64"),
        (NgramDrafting(max_ngram=500), "`max_ngram` of `speculative` must be below `max_context_len`, 64. Got .*=500"),
        (DraftModel(num_layers=1, num_draft_tokens=99), "`num_draft_tokens` of `speculative` must be below"),
    ],
)
def test_drafter_of_more_than_the_context_is_refused(speculative, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(num_pages=9, max_context_len=64, speculative=speculative)
    EngineConfig(num_pages=9, max_context_len=512, speculative=speculative)


def test_what_is_no_drafter_is_refused():
    with pytest.raises(ValueError, match=r"`speculative` must be .* Got 'ngram'"):
        check_drafter("ngram")
    with pytest.raises(ValueError, match=r"`speculative` must be .* Got <class"):
        check_drafter(NgramDrafting)
