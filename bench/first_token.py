"""How long a long prompt waits for its first token, beside what its products and its attention take.

python -m bench.first_token [--prompt N] [--prefill-tokens N ...] [--weights fp8|int4] [--tensor-parallel N]
"""

import argparse
import functools
import statistics
import time
from typing import Any

import numpy as np

from bench.decode_step import Model, random_model
from bench.inter_token import Arrival
from bench.step_workload import LLAMA_3_8B
from bench.timing import Profile, profiled
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from jattn.serving.resolved_config import parallel_of

_REPEATS = 3
_PRODUCTS = ("nvjet", "gemm", "cutlass", "xmma", "matmul")  # how cuBLAS and we name kernels
_ATTENTION = ("paged_extend", "paged_decode")


def measured(model: Model, *, prompt: int, prefill_tokens: int) -> dict[str, Any]:
    """Time to the first token of a prompt alone on the default device, and of a profile of it the parts."""
    engine = Arrival(running=0, prompt=prompt, prefill_tokens=prefill_tokens).engine(model)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=prompt)
    first_token = functools.partial(_first_token_ms, engine, tokens)
    first_token()
    row = {
        "case": "first_token",
        "prompt": prompt,
        "prefill_tokens": prefill_tokens,
        "time_ms": round(statistics.median(first_token() for _ in range(_REPEATS)), 3),
    }
    profile = profiled(first_token, runs=1)
    return row | parts(profile, row["time_ms"])


def parts(profile: Profile, time_ms: float) -> dict[str, float]:
    """Milliseconds of products and of attention, and the whole time over both; nothing of an empty profile."""
    if not profile.kernel_us:
        return {}
    products, attention = (
        sum(us for name, us in profile.kernel_us.items() if any(part in name.lower() for part in names)) / 1e3
        for names in (_PRODUCTS, _ATTENTION)
    )
    return {
        "products_ms": round(products, 3),
        "attention_ms": round(attention, 3),
        "over_both": round(time_ms / (products + attention), 4),
    }


def _first_token_ms(engine: Engine, tokens: np.ndarray) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    request = engine.make_request(tokens, params)
    engine.add(request)
    while not request.generated:
        engine.step()
    elapsed = (time.perf_counter() - start) * 1e3
    while engine.has_work:
        engine.step()
    return elapsed


def sentence(row: dict[str, Any]) -> str:
    """A row in words."""
    text = (
        f"The first token of a prompt of {row['prompt']:,} tokens came after {row['time_ms']:,} ms, "
        f"{row['prefill_tokens']:,} tokens a launch"
    )
    if "over_both" not in row:
        return f"{text}."
    return (
        f"{text}: {row['over_both']} x what products ({row['products_ms']:,} ms) and attention "
        f"({row['attention_ms']:,} ms) take."
    )


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_token", description=__doc__)
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[8192], help="tokens a launch, one run each")
    parser.add_argument("--weights", choices=("fp8", "int4"), help="what projections are held in; bf16 by default")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices that share the model")
    options = parser.parse_args(arguments)
    parallel = parallel_of(EngineConfig(tensor_parallel=options.tensor_parallel))
    shapes = LLAMA_3_8B | {"max_position_embeddings": 2 * options.prompt}
    model = random_model(shapes, parallel=parallel, quantization=options.weights)
    for prefill_tokens in options.prefill_tokens:
        print(sentence(measured(model, prompt=options.prompt, prefill_tokens=prefill_tokens)), flush=True)


if __name__ == "__main__":
    main()
