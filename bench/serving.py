"""How much of the engine's own rate clients of the server get, at full size: random weights, real steps, HTTP.

python -m bench.serving [--shapes llama-3-8b|qwen3-30b-a3b] [--concurrency N,N,...] [--input-len N] [--output-len N]
    [--range R] [--prefix-len N] [--num-prompts N] [--prefill-tokens N] [--json FILE]

The client is a process of its own. A vocabulary of words stands for the tokenizer, as there is no checkpoint.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from flax import nnx
from rich.console import Console

from bench.decode_step import Model, random_model
from bench.step_workload import LLAMA_3_8B, QWEN3_30B_A3B
from jattn.load.figures import show
from jattn.load.served import measured_served
from jattn.load.workload import Level, Workload
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.frontend.chat import ChatTemplate
from jattn.serving.frontend.llm import LLM
from jattn.serving.frontend.text import Tokenizer
from jattn.step_cache import use_persistent_cache
from jattn_models.llama import LlamaForCausalLM
from jattn_models.qwen3_moe import Qwen3MoeForCausalLM

_ROWS = 256  # of a server's, at most: further requests wait

SHAPES: dict[str, tuple[dict[str, Any], Any]] = {
    "llama-3-8b": (LLAMA_3_8B, LlamaForCausalLM),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, Qwen3MoeForCausalLM),
}


def random_llm(model: Model, **knobs: Any) -> LLM:
    """An LLM of random weights, whose words are numbers.

    Args:
        knobs: Of `EngineConfig`.
    """
    use_persistent_cache()
    config = EngineConfig(compile_in_background=False, **knobs)
    engine = Engine(nnx.merge(model.graph, model.weights), config)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), model.config.vocab_size)
        return LLM.over(engine, Tokenizer(folder), ChatTemplate(folder))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of so many words, which decodes as those of Llama 3 and Qwen do: pieces of bytes put together."""
    words = {f"Ġ{number}": number for number in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--concurrency", default="1,8,64,256", help="requests at a time, one run each")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--range", type=float, default=0.0, dest="spread")
    parser.add_argument("--prefix-len", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, help="of a run; four times as many as run at a time, 16 at least")
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="tokens of a launch with prompts")
    parser.add_argument("--json", type=Path, help="where to write the figures too")
    options = parser.parse_args(arguments)
    concurrencies = [int(number) for number in options.concurrency.split(",")]
    shapes, family = SHAPES[options.shapes]
    workload = Workload(
        input_len=options.input_len,
        output_len=options.output_len,
        spread=options.spread,
        prefix_len=options.prefix_len,
        vocab_size=shapes["vocab_size"],
    )
    levels = [Level(num_prompts=options.num_prompts or max(16, 4 * n), concurrency=n) for n in concurrencies]
    model = random_model(shapes | {"max_position_embeddings": workload.longest}, family)
    llm = random_llm(
        model,
        dtype="bfloat16",
        max_num_seqs=min(max(concurrencies), _ROWS),
        max_context_len=workload.longest,
        prefill_tokens=options.prefill_tokens,
        full_sampling=False,
    )
    rows = []
    for row in measured_served(llm, workload, levels):
        rows.append(row)
        print(json.dumps(row), flush=True)
    show(rows, Console(width=120))
    if options.json is not None:
        options.json.write_text(json.dumps({"shapes": options.shapes, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
