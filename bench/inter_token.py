"""How long running requests wait for their next token while a long prompt arrives: the engine at full size.

python -m bench.inter_token [--prefill-tokens N ...] [--running N] [--ctx N] [--prompt N] [--apart]
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from bench.decode_step import Model, random_model
from bench.step_workload import LLAMA_3_8B
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import Request, SamplingParams

_WARM_UP_STEPS = 10
_STEPS_ALONE = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A long prompt that arrives among running requests.

    Attributes:
        running: Requests in the middle of their text.
        ctx: Tokens of each one's prompt.
        prompt: Tokens of the prompt that arrives.
        prefill_tokens: The budget: tokens of a prefill launch at most.
        page: Tokens a page.
        mixed_steps: As in `EngineConfig`.
    """

    running: int = 32
    ctx: int = 1024
    prompt: int = 32768
    prefill_tokens: int = 512
    page: int = 16
    mixed_steps: bool | None = None

    @property
    def max_tokens(self) -> int:
        """Of a running request: more than the steps that are taken, those while its like are still prefilled too."""
        prefilled = self.prompt + self.running * self.ctx
        chunk = self.prefill_tokens - (self.running if 2 * self.running <= self.prefill_tokens else 0)
        return _WARM_UP_STEPS + _STEPS_ALONE + -(-prefilled // chunk) + 10

    def engine(self, model: Model) -> Engine:
        """An engine of one bucket for each step, with pages for all."""
        pages = [-(-tokens // self.page) for tokens in (self.prompt + 1, self.ctx + self.max_tokens)]
        config = EngineConfig(
            num_pages=1 + pages[0] + self.running * pages[1],
            dtype="bfloat16",
            page_size=self.page,
            max_num_seqs=self.running + 1,
            max_context_len=max(self.prompt + 1, self.ctx + self.max_tokens),
            prefill_tokens=self.prefill_tokens,
            smallest_decode_bucket=self.running + 1,
            smallest_prefill_bucket=self.prefill_tokens,
            mixed_steps=self.mixed_steps,
            full_sampling=False,
            compile_in_background=False,
            enable_prefix_caching=False,  # a prompt that comes twice is measured twice
            tensor_parallel=model.parallel.size,
        )
        return Engine(nnx.merge(model.graph, model.weights), config)


def measured(model: Model, arrival: Arrival) -> dict[str, Any]:
    """Inter-token times of the running requests on the default device, alone and while the prompt is computed.

    Raises:
        RuntimeError: A step gave some running request no token, so the times are not between tokens.
    """
    engine = arrival.engine(model)
    tokens = np.random.default_rng(0)

    def add(length: int, max_tokens: int) -> Request:
        prompt = tokens.integers(model.config.vocab_size, size=length)
        request = engine.make_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        engine.add(request)
        return request

    running = [add(arrival.ctx, arrival.max_tokens) for _ in range(arrival.running)]
    while not all(request.generated for request in running):
        engine.step()
    _inter_token_ms(engine, running, lambda steps: steps == _WARM_UP_STEPS)
    alone = _inter_token_ms(engine, running, lambda steps: steps == _STEPS_ALONE)
    long = add(arrival.prompt, 1)
    beside = _inter_token_ms(engine, running, lambda _: bool(long.generated))
    return {
        "case": "inter_token",
        **dataclasses.asdict(arrival),
        "alone_median_ms": round(statistics.median(alone), 3),
        "alone_worst_ms": round(max(alone), 3),
        "median_ms": round(statistics.median(beside), 3),
        "worst_ms": round(max(beside), 3),
        "first_token_ms": round(sum(beside), 1),
    }


def _inter_token_ms(engine: Engine, running: list[Request], done: Callable[[int], bool]) -> list[float]:
    """Milliseconds between the tokens of the running requests, which come together, until `done` (of steps taken)."""
    times = [time.perf_counter()]
    while not done(len(times) - 1):
        served = {event.request for event in engine.step()}
        times.append(time.perf_counter())
        if not served.issuperset(running):
            raise RuntimeError("Each step must give every running request a token.")
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def sentence(row: dict[str, Any]) -> str:
    """A row in words."""
    apart = ", prefills and decodes apart" if row["mixed_steps"] is False else ""
    return (
        f"prefill_tokens {row['prefill_tokens']}{apart}: inter-token time of {row['running']} running requests alone "
        f"{row['alone_median_ms']} ms (median), {row['alone_worst_ms']} ms (worst); while a prompt of {row['prompt']} "
        f"tokens arrives {row['median_ms']} ms (median), {row['worst_ms']} ms (worst); its first token came after "
        f"{row['first_token_ms']} ms."
    )


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.inter_token", description=__doc__)
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[512], help="budgets, one run each")
    for name in ("running", "ctx", "prompt"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Arrival, name))
    parser.add_argument("--apart", action="store_true", help="prefills and decodes in launches of their own")
    options = parser.parse_args(arguments)
    model = random_model(LLAMA_3_8B | {"max_position_embeddings": 2 * max(options.prompt, options.ctx)})
    for prefill_tokens in options.prefill_tokens:
        arrival = Arrival(
            running=options.running,
            ctx=options.ctx,
            prompt=options.prompt,
            prefill_tokens=prefill_tokens,
            mixed_steps=False if options.apart else None,
        )
        print(sentence(measured(model, arrival)), flush=True)


if __name__ == "__main__":
    main()
