"""The serving loop's decode step of models beside Llama, at full size, random weights: a row a batch, as JSON lines.

python -m bench.family_step [--shapes deepseek-v2-lite|deepseek-v3-4-layers|gpt-oss-20b|qwen3-30b-a3b]
    [--weights bf16|fp8|int4|mxfp4] [--kv bfloat16|float8_e4m3fn|fp8_ds_mla] [--batch N,N,...] [--ctx N] [--page N]
    [--layers N] [--implementation NAME] [--steps N]
"""

import argparse
import json
from typing import Any, NamedTuple

from bench.decode_step import random_model
from bench.quantized_step import measured
from bench.step_workload import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3_4_LAYERS,
    GPT_OSS_20B,
    QWEN3_30B_A3B,
    StepWorkload,
)
from jattn_models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from jattn_models.gpt_oss import GptOssForCausalLM
from jattn_models.qwen3_moe import Qwen3MoeForCausalLM


class Shapes(NamedTuple):
    """A model's, and what its steps are timed with unless told."""

    model: str
    fields: dict[str, Any]
    family: Any
    ctx: int = 4096
    page: int = 64
    weights: str = "bf16"


SHAPES = {
    "deepseek-v2-lite": Shapes("DeepSeek-V2-Lite shapes", DEEPSEEK_V2_LITE, DeepseekV2ForCausalLM),
    "deepseek-v3-4-layers": Shapes("DeepSeek-V3 shapes, 4 layers", DEEPSEEK_V3_4_LAYERS, DeepseekV3ForCausalLM),
    "gpt-oss-20b": Shapes("gpt-oss-20b shapes", GPT_OSS_20B, GptOssForCausalLM, ctx=2048, page=16, weights="mxfp4"),
    "qwen3-30b-a3b": Shapes("Qwen3-30B-A3B shapes", QWEN3_30B_A3B, Qwen3MoeForCausalLM, ctx=1024, page=16),
}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.family_step", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="deepseek-v2-lite")
    parser.add_argument("--weights", choices=("bf16", "fp8", "int4", "mxfp4"), help="what they are held in; the same")
    parser.add_argument("--kv", default="bfloat16", help="what keys and values, or latents, are held in")
    parser.add_argument("--batch", default="1,8,64", help="sequences, one row each")
    parser.add_argument("--ctx", type=int, help="tokens of each; as is usual for the shapes by default")
    parser.add_argument("--page", type=int, help="tokens in a page; the same")
    parser.add_argument("--layers", type=int, help="how many of the shapes' layers; all by default")
    parser.add_argument("--implementation", help="of attention; dispatch chooses by default")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    shapes = SHAPES[options.shapes]
    ctx, page = options.ctx or shapes.ctx, options.page or shapes.page
    weights = options.weights or shapes.weights
    cut = {} if options.layers is None else {"num_hidden_layers": options.layers}
    model = random_model(shapes.fields | cut, shapes.family, quantization=None if weights == "bf16" else weights)
    of_layers = f" cut to {options.layers} layers" if cut else ""
    name = f"{shapes.model}{of_layers}, random {model.held_in}"
    for batch in map(int, options.batch.split(",")):
        workload = StepWorkload(batch=batch, ctx=ctx, page=page, model=name, kv=options.kv)
        found = measured(model, model.held_in, workload, steps=options.steps, implementation=options.implementation)
        print(json.dumps(found.row | {"longest_kernels": found.kernels[:8]}), flush=True)


if __name__ == "__main__":
    main()
