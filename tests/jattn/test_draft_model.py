"""A draft model: what is refused, and that it may be the served model itself; its text is in test_speculative."""

import dataclasses
import types

import pytest

from jattn.checkpoint import Checkpoint
from jattn.serving.engine import Engine
from jattn.serving.steps.draft_model import DraftModel, TargetAndDraft
from jattn.serving.steps.drafting import Drafter, NgramDrafting
from tests.jattn.harness.tiny import CONFIG, plans_of, tiny_model


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "`num_layers` must be given where `checkpoint` is None"),
        ({"num_layers": 0}, "`num_layers` must be a whole number of at least 1. Got 0"),
        ({"checkpoint": "x", "num_draft_tokens": 0}, "`num_draft_tokens` must be a whole number of at least 1. Got 0"),
    ],
)
def test_draft_model_refuses_what_is_out_of_range(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        DraftModel(**arguments)


@pytest.mark.parametrize("thing", [DraftModel, Checkpoint], ids=lambda thing: thing.__name__)
def test_checkpoint_that_is_no_path_is_refused(thing, unchecked):
    argument = {"DraftModel": "checkpoint", "Checkpoint": "path"}[thing.__name__]
    with pytest.raises(ValueError, match=f"`{argument}` must be .*the path of a .*folder. Got 5"):
        thing(**{argument: 5})


@pytest.mark.parametrize("drafter", [NgramDrafting(), DraftModel(num_layers=1)])
def test_drafters_are_static(drafter):
    assert isinstance(drafter, Drafter)
    assert hash(drafter) == hash(dataclasses.replace(drafter))


def test_draft_model_of_another_vocabulary_or_context_is_refused():
    target = tiny_model()
    other = types.SimpleNamespace(vocab_size=target.vocab_size - 1, context_len=64)
    with pytest.raises(ValueError, match=r"must have the served model's vocabulary of 512 tokens. Got 511"):
        TargetAndDraft(target, other, max_context_len=64)
    with pytest.raises(ValueError, match=r"`max_context_len` must not exceed the draft model's 64. Got 65"):
        TargetAndDraft(target, target, max_context_len=65)


def test_engine_wants_a_draft_model_exactly_where_one_drafts():
    drafter = DraftModel(num_layers=1)
    with pytest.raises(ValueError, match=r"`draft_model` must be given if .* Got draft_model=NoneType"):
        Engine(tiny_model(), dataclasses.replace(CONFIG, speculative=drafter))
    for speculative in (None, NgramDrafting()):
        with pytest.raises(ValueError, match=r"`draft_model` must be given if .* Got draft_model=LlamaForCausalLM"):
            Engine(tiny_model(), dataclasses.replace(CONFIG, speculative=speculative), draft_model=tiny_model())


def test_pool_and_pages_hold_the_drafts_keys_too():
    """The request's room includes its drafted tokens, and the pool both models' keys."""
    config = dataclasses.replace(CONFIG, speculative=DraftModel(num_layers=2, num_draft_tokens=5))
    engine = plans_of(config, draft_model=tiny_model())
    assert [group.name for group in engine.executor.pool.groups] == ["layers", "draft layers"]
    assert {group.k.shape for group in engine.executor.pool.groups} == {(2, 17, 4, 2, 8)}
    assert engine.executor.state.page_tables[0].shape == (4, 18)  # 64 tokens and 5 drafted ones
