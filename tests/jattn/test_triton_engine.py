"""Text by Triton's kernels alone, in its interpreter: steps of prompts, of greedy tokens, and mixed ones."""

import contextvars

import pytest

import jattn
from jattn_kernels.triton import launch
from jattn_models.bundled import checkpoint_path
from tests.kernels.harness import triton_interpreter

GREEDY = jattn.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = ["def main():\n", "import os", "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"]


@pytest.mark.slow
def test_text_is_the_same_by_triton_as_by_xla(monkeypatch):
    # Steps are traced in threads, which know of no context.
    everywhere = contextvars.ContextVar("interpreter", default=triton_interpreter.run)
    monkeypatch.setattr(launch, "_interpreter", everywhere)
    served = [
        jattn.LLM(
            checkpoint_path(),
            max_num_seqs=2,
            max_context_len=64,
            prefill_tokens=32,
            progress=False,
            implementation=implementation,
        ).generate(PROMPTS, GREEDY)
        for implementation in ("xla", "triton")
    ]
    assert served[0] == served[1]
    assert all(len(completion.token_ids) == 6 for completion in served[1])
