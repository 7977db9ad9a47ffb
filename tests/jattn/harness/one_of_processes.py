"""One of two processes that share a model: `python -m tests.jattn.harness.one_of_processes PORT NUMBER FOLDER NAMES`.

It says as JSON what it came to, for a test to compare.
"""

import dataclasses
import json
import sys
import types
from unittest import mock

import jax
import numpy as np

from jattn.checkpoint import Checkpoint
from jattn.mailbox import mailbox_of
from jattn.server.service import Service, ServiceOptions
from jattn.serving import resolved_config
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import NgramDrafting
from jattn.serving.structured.params import StructuredOutputsParams
from jattn.step_compilation import _names, compile_steps
from jattn_models.llama import LlamaForCausalLM
from tests.jattn.harness.several_devices import DRAWN, GREEDY, engine_of, texts
from tests.jattn.harness.tiny import run
from tests.jattn.harness.tiny_grammars import END, grammar

NUM_PROCESSES, NUM_DEVICES = 2, 4
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(1, 60, length).tolist() for length in (1, 5, 23)]
RULED = dataclasses.replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3, prompt_logprobs=2)
REGEX = "[a-m]{3,8}[0-9]{5}"
CHANGES = {
    "plain": {"num_pages": None},
    "drafting": {"speculative": NgramDrafting(num_draft_tokens=3), "greedy_steps": True},
    "draft_model": {"speculative": DraftModel(num_layers=1, num_draft_tokens=3)},
    "rules": {"full_sampling": True, "debug_checks": True, "num_pages": 13},
    "grammar": {},
}


def written(name, engine):
    """What an engine with the changes of a name writes."""
    if name == "grammar":
        asked = StructuredOutputsParams(regex=REGEX)
        params = dataclasses.replace(DRAWN, structured_outputs=asked, ignore_eos=False, stop_token_ids=(END,))
        engine.prepare_structured()
        requests = [engine.make_request(PROMPTS[2], params, grammar=grammar(regex=REGEX))]
        return run(engine, [*requests, engine.make_request(PROMPTS[1], DRAWN)])
    return texts(engine, PROMPTS, GREEDY, DRAWN, *[RULED] * (name == "rules"))


def facts(checkpoint):
    """Of an engine that all devices share, and of what is refused."""
    ranks, load = [], LlamaForCausalLM.from_checkpoint

    def noted(*arguments, rank=0, **options):
        ranks.append(rank)
        return load(*arguments, rank=rank, **options)

    with (
        mock.patch.object(LlamaForCausalLM, "from_checkpoint", noted),
        # One has less memory than the other.
        mock.patch.object(resolved_config, "_POOL_BYTES_WITHOUT_STATS", 10_000 - 3_000 * jax.process_index()),
        mock.patch("jattn.serving.executor.executor.compile_steps", wraps=compile_steps) as compiling,
    ):
        engine = engine_of(checkpoint, NUM_DEVICES, **CHANGES["plain"])
    (plans,) = compiling.call_args.args
    options = ServiceOptions(model_names=("name",))
    return {
        "ranks": ranks,
        "num_pages": engine.config.num_pages,
        "plain": written("plain", engine),
        "num_named": len(_names(plans)),
        "has_mailbox": mailbox_of(engine.config.parallel) is not None,
        "refused": [
            sentence(lambda: engine_of(checkpoint, NUM_DEVICES - 1)),
            sentence(lambda: engine_of(checkpoint, NUM_DEVICES, compile_in_background=True)),
            sentence(lambda: Service(types.SimpleNamespace(engine=engine), options)),
        ],
    }


def sentence(function):
    """What it raises."""
    try:
        function()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    port, number, folder, *names = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", NUM_PROCESSES, int(number))
    shared = Checkpoint(folder)
    found = {name: written(name, engine_of(shared, NUM_DEVICES, **CHANGES[name])) for name in names}
    print(json.dumps(found or facts(shared)))
