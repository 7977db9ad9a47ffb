"""The serving loop's decode step over several devices: Llama-3-8B shapes, random bf16, as JSON lines.

python -m bench.tensor_parallel_step [--tensor-parallel N,N,...] [--batch N:CTX,N:CTX,...] [--page N] [--steps N]
"""

import argparse
import json

from bench.decode_step import measured, random_model
from bench.step_workload import StepWorkload
from jattn.parallel import ONE_DEVICE, Parallel


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tensor_parallel_step", description=__doc__)
    parser.add_argument("--tensor-parallel", default="1,2", help="devices that share the model")
    parser.add_argument("--batch", default="1:1024,8:1024,64:2048,256:1024", help="sequences and the tokens of each")
    parser.add_argument("--page", type=int, default=64, help="tokens in a page")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    for size in map(int, options.tensor_parallel.split(",")):
        model = random_model(parallel=ONE_DEVICE if size == 1 else Parallel("tensor", size))
        for case in options.batch.split(","):
            batch, ctx = map(int, case.split(":"))
            found = measured(model, StepWorkload(batch=batch, ctx=ctx, page=options.page), steps=options.steps)
            print(json.dumps({"tensor_parallel": size, **found.row, "longest_kernels": found.kernels[:14]}), flush=True)
        del model  # its memory is the next one's


if __name__ == "__main__":
    main()
