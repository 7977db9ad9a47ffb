"""The longest text that is served reaches the models, which may compute differently for it."""

from importlib.metadata import entry_points

import jax.numpy as jnp
import pytest

import jattn
from jattn.checkpoint import Checkpoint
from jattn.serving.steps.draft_model import DraftModel
from jattn_models.llama import LlamaForCausalLM


@pytest.fixture
def served(monkeypatch):
    """The contexts that models were loaded for; none is loaded."""
    contexts = []

    def from_checkpoint(checkpoint, **_):
        contexts.append(checkpoint.max_context_len)
        raise InterruptedError

    monkeypatch.setattr(LlamaForCausalLM, "from_checkpoint", from_checkpoint)
    return contexts


@pytest.fixture(scope="module")
def bundled():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    return point.load()()


@pytest.mark.parametrize("max_context_len", [64, None])
def test_model_is_loaded_for_the_served_context(served, bundled, max_context_len):
    with pytest.raises(InterruptedError):
        jattn.LLM(bundled, max_context_len=max_context_len, progress=False)
    assert served == [max_context_len]


@pytest.mark.parametrize("of_its_own", [False, True])
def test_draft_model_is_loaded_for_the_served_context(served, bundled, of_its_own):
    drafter = DraftModel(checkpoint=bundled if of_its_own else None, num_layers=1)
    with pytest.raises(InterruptedError):
        drafter.load(Checkpoint(bundled).for_context(64), dtype=jnp.float32)
    assert served == [64]


@pytest.mark.parametrize("max_context_len", [0, -1])
def test_context_that_is_no_length_is_refused(served, bundled, max_context_len):
    with pytest.raises(ValueError, match="`max_context_len` must be a whole number of at least 1"):
        Checkpoint(bundled).for_context(max_context_len)
    assert not served
