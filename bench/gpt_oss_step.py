"""The serving loop's decode step of gpt-oss-20b's shapes, at full size, its experts in bfloat16: a row a batch.

python -m bench.gpt_oss_step [--batch N,N,...] [--ctx N] [--page N] [--implementation NAME] [--steps N]
"""

import argparse
import json
from typing import Any

from bench.decode_step import measured, random_model
from bench.step_workload import GPT_OSS_20B, StepWorkload
from jattn_models.gpt_oss import GptOssForCausalLM


def main(arguments: list[str] | None = None, shapes: dict[str, Any] = GPT_OSS_20B) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpt_oss_step", description=__doc__)
    parser.add_argument("--batch", default="1,8,64", help="sequences, one row each")
    parser.add_argument("--ctx", type=int, default=2048, help="tokens of each")
    parser.add_argument("--page", type=int, default=16, help="tokens in a page")
    parser.add_argument("--implementation", help="of attention; dispatch chooses by default")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    model = random_model(shapes, GptOssForCausalLM)
    for batch in map(int, options.batch.split(",")):
        workload = StepWorkload(
            batch=batch, ctx=options.ctx, page=options.page, model="gpt-oss-20b shapes, random bf16"
        )
        found = measured(model, workload, steps=options.steps, implementation=options.implementation)
        print(json.dumps(found.row | {"longest_kernels": found.kernels[:8]}), flush=True)


if __name__ == "__main__":
    main()
