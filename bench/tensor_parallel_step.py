"""The serving loop's decode step over several devices: Llama-3-8B shapes, random bf16, as JSON lines.

python -m bench.tensor_parallel_step [--tensor-parallel N,N,...] [--batch N:CTX,N:CTX,...] [--page N] [--steps N]
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from bench.attention import Measured
from bench.decode_step import measured, random_model
from bench.step_workload import StepWorkload
from jattn.serving.config import EngineConfig
from jattn.serving.resolved_config import parallel_of

BATCHES = ((1, 1024), (8, 1024), (64, 2048), (256, 1024))  # sequences and the tokens of each
PAGE = 64


def steps(
    sizes: Sequence[int], batches: Sequence[tuple[int, int]] = BATCHES, *, page: int = PAGE, **options: Any
) -> Iterator[Measured]:
    """Steps of a model that so many devices share, one number after the other; their rows say how many."""
    for size in sizes:
        model = random_model(parallel=parallel_of(EngineConfig(tensor_parallel=size)))
        for batch, ctx in batches:
            found = measured(model, StepWorkload(batch=batch, ctx=ctx, page=page), **options)
            yield found._replace(row={"tensor_parallel": size, **found.row})
        del model  # its memory is the next one's


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tensor_parallel_step", description=__doc__)
    parser.add_argument("--tensor-parallel", default="1,2", help="devices that share the model")
    told = ",".join(f"{batch}:{ctx}" for batch, ctx in BATCHES)
    parser.add_argument("--batch", default=told, help="sequences and the tokens of each")
    parser.add_argument("--page", type=int, default=PAGE, help="tokens in a page")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.tensor_parallel.split(",")]
    cases = (case.split(":") for case in options.batch.split(","))
    batches = [(int(batch), int(ctx)) for batch, ctx in cases]
    for found in steps(sizes, batches, page=options.page, steps=options.steps):
        print(json.dumps({**found.row, "longest_kernels": found.kernels[:14]}), flush=True)


if __name__ == "__main__":
    main()
