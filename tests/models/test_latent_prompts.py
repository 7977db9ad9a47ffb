"""Models of latent attention whose prompts are expanded to heads: transformers' logits and tokens."""

import dataclasses

import numpy as np
import pytest

from jattn.attention import latent_extend
from jattn.attention.paged import PagedAttentionBackend
from jattn.checkpoint import Checkpoint
from tests.jattn.harness.several_devices import GREEDY, engine_of, texts
from tests.models.harness.goldens import GOLDEN, assert_golden, golden, paged_run, prompts
from tests.models.harness.served import assert_served_greedily
from tests.often import often

CASES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
FEWEST = 5


@pytest.fixture(autouse=True)
def expanded(monkeypatch):
    """Prompts of five tokens and more are, however narrow the heads; the sequences of each launch that were."""
    for_model, extend, launches = PagedAttentionBackend.for_model, latent_extend.extend_expanded, []

    def with_fewest(layers, options):
        return dataclasses.replace(for_model(layers, options), fewest_expanded=FEWEST)

    def noted(*arguments, **facts):
        launches.append(arguments[5])
        return extend(*arguments, **facts)

    monkeypatch.setattr(PagedAttentionBackend, "for_model", with_fewest)
    monkeypatch.setattr("jattn.attention.paged.extend_expanded", noted)
    return launches


@pytest.mark.parametrize("case", often(CASES, ("deepseek_v2",)))
def test_prompts_in_two_chunks_match_transformers(case, expanded):
    """The second one's sequences have a short prefix and few tokens, or a longer prefix and many, or none of both."""
    run = paged_run(case, page_size=8, surface="paged")
    first = run.extend([row[: len(row) // 2] for row in prompts(case)])
    second = run.extend([row[len(row) // 2 :] for row in prompts(case)])
    assert expanded
    for expected, *parts in zip(golden(case), first, second, strict=True):
        logits = np.concatenate(parts)
        assert_golden(logits, expected[: len(logits)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_served_tokens_match_transformers_with_cached_prefixes_and_mixed_steps(case, expanded):
    requests = assert_served_greedily(case, mixed_steps=True)
    assert any(request.num_cached_tokens for request in requests)
    assert any(len(plan.absorbed) == 2 for plan in expanded)


@pytest.mark.slow
def test_devices_that_share_the_heads_write_what_one_writes(expanded):
    checkpoint = Checkpoint(GOLDEN / "deepseek_v3")
    rows = [row.tolist() for row in golden("deepseek_v3", "tokens")]
    one, two = (texts(engine_of(checkpoint, devices, mixed_steps=True), rows, GREEDY) for devices in (1, 2))
    assert one == two
    assert expanded
