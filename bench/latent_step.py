"""The serving loop's decode step of models with latent attention, at full size: a row a batch, as JSON lines.

python -m bench.latent_step [--shapes deepseek-v2-lite|deepseek-v3-4-layers] [--batch N,N,...] [--ctx N] [--page N]
    [--implementation NAME] [--steps N]
"""

import argparse
import json
from typing import Any

from bench.decode_step import measured, random_model
from bench.step_workload import DEEPSEEK_V2_LITE, DEEPSEEK_V3_4_LAYERS, StepWorkload
from jattn_models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

SHAPES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "deepseek-v2-lite": ("DeepSeek-V2-Lite shapes, random bf16", DEEPSEEK_V2_LITE, DeepseekV2ForCausalLM),
    "deepseek-v3-4-layers": ("DeepSeek-V3 shapes, 4 layers, random bf16", DEEPSEEK_V3_4_LAYERS, DeepseekV3ForCausalLM),
}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.latent_step", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="deepseek-v2-lite")
    parser.add_argument("--batch", default="1,8,64", help="sequences, one row each")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of each")
    parser.add_argument("--page", type=int, default=64, help="tokens in a page")
    parser.add_argument("--implementation", help="of attention; dispatch chooses by default")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    name, shapes, family = SHAPES[options.shapes]
    model = random_model(shapes, family)
    for batch in map(int, options.batch.split(",")):
        workload = StepWorkload(batch=batch, ctx=options.ctx, page=options.page, model=name)
        found = measured(model, workload, steps=options.steps, implementation=options.implementation)
        print(json.dumps(found.row | {"longest_kernels": found.kernels[:8]}), flush=True)


if __name__ == "__main__":
    main()
