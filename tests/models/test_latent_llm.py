"""Models of latent attention from a folder to text, in the engine's several ways: transformers' greedy tokens."""

import shutil
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

import jattn
from tests.jattn.harness.tiny import one_variant
from tests.models.harness.goldens import GOLDEN, golden

SIZES = {"max_num_seqs": 3, "max_context_len": 80, "page_size": 8, "prefill_tokens": 64}
SIZES |= {"full_sampling": False, "progress": False}
WAYS = {
    "drafts": {"speculative": jattn.NgramDrafting(num_draft_tokens=3)},
    "draft_model": {"speculative": jattn.DraftModel(num_layers=2, num_draft_tokens=2)},
    "mixed": {"mixed_steps": True, "prefill_tokens": 16, "smallest_prefill_bucket": 16},
    "few_pages": {"num_pages": 15, "prefill_tokens": 16, "smallest_prefill_bucket": 16},
    "sglang": {"backend": "flash_attention", "page_size": 1},
}


@pytest.fixture
def folder(tmp_path):
    """Golden checkpoints have no tokenizer: any one will do."""
    (point,) = entry_points(group="jattn.checkpoints", name="default")

    def of_case(case):
        copied = shutil.copytree(GOLDEN / case, tmp_path / case)
        return shutil.copy(Path(point.load()()) / "tokenizer.json", copied) and copied

    return of_case


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("deepseek_v3", "drafts"),
        *(
            pytest.param(case, way, marks=pytest.mark.slow)
            for case in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
            for way in WAYS
            if (case, way) != ("deepseek_v3", "drafts")
        ),
    ],
)
def test_all_of_n_texts_are_transformers_tokens(folder, case, way):
    tokens, expected = golden(case, "tokens"), [row.tolist() for row in golden(case, "greedy")]
    params = jattn.SamplingParams(n=2, max_tokens=len(expected[0]), temperature=0.0, ignore_eos=True)
    with one_variant("greedy"):
        llm = jattn.LLM(folder(case), **(SIZES | WAYS[way]))
        outputs = llm.generate([np.asarray(row) for row in tokens], params)
    assert [[list(text.token_ids) for text in each.outputs] for each in outputs] == [[row] * 2 for row in expected]
    if "speculative" in WAYS[way]:
        assert llm.stats.drafts.drafted
    if way == "few_pages":
        assert llm.stats.preemptions
