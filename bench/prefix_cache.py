"""How long a prompt waits for its first token where others have begun alike, with the prefix cache and without.

python -m bench.prefix_cache [--groups N] [--of-group N] [--shared N] [--own N] [--running N] [--out N]
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import numpy as np
from flax import nnx

from bench.decode_step import Model, random_model
from bench.step_workload import LLAMA_3_8B
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import Request, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Groups of requests whose prompts begin alike, in random order, so many at a time.

    Attributes:
        groups: How many beginnings there are.
        of_group: Requests with the same one.
        shared, own: Tokens of a beginning, and of each prompt after it.
        out: Tokens that each request is given.
        running: Requests at a time: one that ends is followed by the next.
        prefill_tokens: As in `EngineConfig`.
        page: Tokens a page.
    """

    groups: int = 16
    of_group: int = 16
    shared: int = 2048
    own: int = 128
    out: int = 64
    running: int = 16
    prefill_tokens: int = 2048
    page: int = 16

    @property
    def max_context_len(self) -> int:
        return self.shared + self.own + self.out

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random tokens; other seeds have other beginnings."""
        rng = np.random.default_rng(seed)
        beginnings = rng.integers(vocab_size, size=(self.groups, self.shared)).tolist()
        order = rng.permutation(np.repeat(np.arange(self.groups), self.of_group)).tolist()
        return [[*beginnings[group], *rng.integers(vocab_size, size=self.own).tolist()] for group in order]

    def engine(self, model: Model, *, enable_prefix_caching: bool) -> Engine:
        """An engine with pages for all that run, and as many again for what is kept."""
        pages = -(-(self.max_context_len + 1) // self.page)
        config = EngineConfig(
            num_pages=1 + 2 * max(self.running, self.groups) * pages,
            dtype="bfloat16",
            page_size=self.page,
            max_num_seqs=self.running,
            max_context_len=self.max_context_len,
            prefill_tokens=self.prefill_tokens,
            enable_prefix_caching=enable_prefix_caching,
            full_sampling=False,
            compile_in_background=False,
        )
        return Engine(nnx.merge(model.graph, model.weights), config)


def measured(model: Model, traffic: Traffic, *, enable_prefix_caching: bool) -> dict[str, Any]:
    """Milliseconds to the first token, of requests that have a row at once, and output tokens a second."""
    engine = traffic.engine(model, enable_prefix_caching=enable_prefix_caching)
    vocab_size = model.config.vocab_size
    _serve(engine, traffic, traffic.prompts(vocab_size, seed=0)[: traffic.running])  # the first launches take longer
    engine.reset_prefix_cache()
    before = dataclasses.replace(engine.kv_cache.prefix_cache_stats)
    prompts = traffic.prompts(vocab_size, seed=1)
    start = time.perf_counter()
    waits = _serve(engine, traffic, prompts)
    seconds = time.perf_counter() - start
    stats = engine.kv_cache.prefix_cache_stats
    return {
        "case": "prefix_cache",
        **dataclasses.asdict(traffic),
        "enable_prefix_caching": enable_prefix_caching,
        "hit_rate": round((stats.hits - before.hits) / (len(prompts) * (traffic.shared + traffic.own)), 3),
        "first_token_ms": round(1e3 * statistics.median(waits), 3),
        "first_token_p99_ms": round(1e3 * float(np.quantile(waits, 0.99)), 3),
        "tokens_per_s": round(len(prompts) * traffic.out / seconds, 1),
    }


def _serve(engine: Engine, traffic: Traffic, prompts: list[list[int]]) -> list[float]:
    """Seconds from each request's arrival to its first token."""
    params = SamplingParams(max_tokens=traffic.out, temperature=0.0, ignore_eos=True)
    left, arrived, waits = list(reversed(prompts)), dict[Request, float](), list[float]()
    num_running = 0
    while left or engine.has_work:
        while left and num_running < traffic.running:
            request = engine.make_request(left.pop(), params)
            arrived[request] = time.perf_counter()
            engine.add(request)
            num_running += 1
        for event in engine.step():
            if event.request in arrived:
                waits.append(time.perf_counter() - arrived.pop(event.request))
            num_running -= event.finish_reason is not None
    return waits


def sentence(row: dict[str, Any]) -> str:
    """A row in words."""
    which = "With" if row["enable_prefix_caching"] else "Without"
    return (
        f"{which} the prefix cache, {row['running']} requests at a time with {row['shared']:,} shared and "
        f"{row['own']:,} own tokens: first token after {row['first_token_ms']:,} ms (median; p99 "
        f"{row['first_token_p99_ms']:,} ms), {row['tokens_per_s']:,} tokens a second, {row['hit_rate']:.1%} of the "
        "prompts' tokens not computed."
    )


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_cache", description=__doc__)
    for field in dataclasses.fields(Traffic):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    traffic = Traffic(**vars(parser.parse_args(arguments)))
    model = random_model(LLAMA_3_8B | {"max_position_embeddings": traffic.max_context_len})
    for enable_prefix_caching in (False, True):
        print(sentence(measured(model, traffic, enable_prefix_caching=enable_prefix_caching)), flush=True)


if __name__ == "__main__":
    main()
