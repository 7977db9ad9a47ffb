"""Text models inside models that see too, against transformers; what a family computes is in test_families."""

import json
import shutil

import jax.numpy as jnp
import pytest

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from tests.models.harness.goldens import (
    GOLDEN,
    WRAPPED_CASES,
    assert_golden,
    assert_run_is_golden,
    dense_logits,
    golden,
    load,
)
from tests.often import slow

LONGEST = 2


@pytest.mark.parametrize("prompt", [slow(0), slow(1), LONGEST])
@pytest.mark.parametrize("case", WRAPPED_CASES)
def test_logits_match_transformers(case, prompt):
    assert_golden(dense_logits(load(case), golden(case, "tokens")[prompt]), golden(case)[prompt])


@pytest.mark.slow
@pytest.mark.parametrize("case", WRAPPED_CASES)
def test_paged_logits_match_transformers(case):
    assert_run_is_golden(case, page_size=8)


@pytest.mark.parametrize(
    ("case", "field", "message"),
    [
        (
            "mistral3_wrapped",
            {"model_type": "mistral4"},
            "`model_type` .* must be one of mistral, ministral3. Got 'mistral4'",
        ),
        ("gemma3_wrapped", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` must be null"),
    ],
)
def test_text_model_that_is_not_built_is_refused(case, field, message, tmp_path):
    shutil.copytree(GOLDEN / case, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= field
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(NotImplementedError, match=message):
        model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=jnp.float32)
