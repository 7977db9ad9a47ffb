"""Models of latent attention from a folder to text, in the engine's several ways: transformers' greedy tokens."""

import shutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jattn
from tests.jattn.harness.tiny import one_variant
from tests.models.harness.goldens import GOLDEN, golden
from tests.often import slow

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


@pytest.mark.slow  # test_latent_engine has the oracle's tokens of such a pool
def test_latents_in_fp8_with_scales_of_tiles_give_nearly_the_same_probabilities(folder):
    """Through the whole engine: prompts in parts, prefixes that are read back, drafts."""
    (row,) = golden("deepseek_v3", "tokens")[:1]
    params = jattn.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    path, found = folder("deepseek_v3"), []
    sizes: dict[str, Any] = SIZES | WAYS["few_pages"] | {"full_sampling": True}
    for kv_cache_dtype in ("auto", "fp8_ds_mla"):
        with one_variant("full"):
            llm = jattn.LLM(path, **sizes, kv_cache_dtype=kv_cache_dtype)
            (output,) = llm.generate([np.asarray(row)], params)
        assert len(output.outputs[0].token_ids) == 6
        found.append([logprob.logprob for of_token in output.prompt_logprobs[1:] for logprob in of_token.values()])
    errors = np.abs(np.subtract(*found))
    # A golden model has weights of size 1, through which a 16th of a number goes far.
    assert 0 < errors.mean() < 1 / 4


@pytest.mark.parametrize("num_pages", [None, 64])
def test_format_of_latents_is_refused_by_a_model_without_any(num_pages):
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    sizes: dict[str, Any] = SIZES | {"kv_cache_dtype": "fp8_ds_mla", "num_pages": num_pages}
    with pytest.raises(ValueError, match="`kv_cache_dtype` may be fp8_ds_mla only where all layers read latent rows"):
        jattn.LLM(point.load()(), **sizes)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("deepseek_v3", "drafts"),
        *(
            slow(case, way)
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
