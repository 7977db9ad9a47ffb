"""Golden checkpoints as an engine serves them."""

from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from tests.jattn.harness.tiny import one_variant, run
from tests.models.harness.goldens import golden, load


def assert_served_greedily(case, **knobs):
    """The texts are transformers', and again when the prompts' keys are in the pool. Returns the second requests."""
    config = EngineConfig(
        num_pages=40,
        max_num_seqs=3,
        max_context_len=80,
        prefill_tokens=64,
        prefill_seqs=2,
        page_size=8,
        full_sampling=False,
        **knobs,
    )
    expected, requests = golden(case, "greedy"), []
    params = SamplingParams(max_tokens=len(expected[0]), temperature=0.0, ignore_eos=True)
    with one_variant("greedy"):
        engine = Engine(load(case), config)
        for _ in range(2):
            requests = [engine.make_request(tokens, params) for tokens in golden(case, "tokens")]
            assert run(engine, requests) == [tokens.tolist() for tokens in expected]
    return requests
