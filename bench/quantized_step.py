"""The serving loop's decode step with weights in fewer bits: random weights of a model's shapes, as JSON lines.

python -m bench.quantized_step [--weights bf16,fp8,int4,awq] [--kv bfloat16,float8_e4m3fn] [--batch N:CTX,N:CTX,...]
    [--page N] [--steps N]
"""

import argparse
import itertools
import json
from typing import Any

from bench import decode_step
from bench.attention import Measured
from bench.decode_step import Model, random_model
from bench.step_workload import StepWorkload


def measured(model: Model, weights: str, workload: StepWorkload, **options: Any) -> Measured:
    """Times a step of a model whose weights are held so; its row says so, and what keys and values are held in."""
    found = decode_step.measured(model, workload, **options)
    return found._replace(row={"weights": weights, "kv": workload.kv, **found.row})


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantized_step", description=__doc__)
    parser.add_argument("--weights", default="bf16,fp8,int4", help="what projections are held in; awq has zero points")
    parser.add_argument("--kv", default="bfloat16", help="what keys and values are held in")
    parser.add_argument("--batch", default="1:1024,8:1024,64:2048,256:1024", help="sequences and the tokens of each")
    parser.add_argument("--page", type=int, default=16, help="tokens in a page")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    if unknown := {*options.weights.split(",")} - {"bf16", "fp8", "int4", "awq"}:
        parser.error(f"`--weights` must be some of bf16, fp8, int4, awq. Got {min(unknown)!r}.")
    for weights in options.weights.split(","):
        model = random_model(quantization=None if weights == "bf16" else weights)
        for case, kv in itertools.product(options.batch.split(","), options.kv.split(",")):
            batch, ctx = map(int, case.split(":"))
            shapes = f"Llama-3-8B shapes, random {weights}"
            workload = StepWorkload(batch=batch, ctx=ctx, page=options.page, model=shapes, kv=kv)
            found = measured(model, weights, workload, steps=options.steps)
            print(json.dumps({**found.row, "longest_kernels": found.kernels[:8]}), flush=True)
        del model  # its memory is the next one's


if __name__ == "__main__":
    main()
