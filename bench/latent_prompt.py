"""A prompt's pass through a model of latent attention by both forms, random bf16: a row each, as JSON lines.

python -m bench.latent_prompt [--shapes deepseek-v2-lite|deepseek-v3-4-layers] [--layers N] [--tokens N,N,...]
    [--prefix N] [--seqs N] [--page N] [--repeats N]

Where the two rows of a length cross is where `jattn/attention/latent_form.py::choose_fewest_expanded` should put it.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.decode_step import Model, random_model
from bench.family_step import SHAPES
from bench.timing import profiled
from bench.workloads import random_normal, random_page_table
from jattn.attention.paged import PagedAttentionBackend
from jattn.backend import BackendOptions
from jattn.forward_batch import ForwardMode
from jattn.kv_pool import make_pool
from jattn.serving.steps.passes import ragged_pass

Form = Literal["absorbed", "expanded"]
_FEWEST = {"absorbed": 10**9, "expanded": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """So many new tokens of each sequence, behind a prefix that is in the pool."""

    tokens: int
    prefix: int
    seqs: int = 1
    page: int = 64

    def arrays(self, vocab_size: int) -> dict[str, Any]:
        """The arguments of `ragged_pass`, but for the pool, and how many pages that has."""
        page_table, num_pages = random_page_table((self.prefix + self.tokens,) * self.seqs, self.page)
        ids = np.random.default_rng(0).integers(vocab_size, size=self.seqs * self.tokens)
        return {
            "num_pages": num_pages,
            "page_tables": (jnp.asarray(page_table),),
            "tokens": jnp.asarray(ids, jnp.int32),
            "seq_lens": jnp.full((self.seqs,), self.prefix + self.tokens, jnp.int32),
            "cu_q_lens": jnp.arange(self.seqs + 1, dtype=jnp.int32) * self.tokens,
        }


def measured(model: Model, prompt: Prompt, form: Form, *, repeats: int) -> dict[str, Any]:
    """Milliseconds of a pass without logits on the default device, and its longest kernels."""
    options = BackendOptions(
        max_context_len=prompt.prefix + prompt.tokens, page_size=prompt.page, max_num_seqs=prompt.seqs, dtype="bfloat16"
    )
    backend = PagedAttentionBackend.for_model(model.attention_layers, options)
    backend = dataclasses.replace(backend, fewest_expanded=_FEWEST[form])
    arrays = prompt.arrays(model.config.vocab_size)
    shapes = functools.partial(make_pool, model.kv_groups, page_size=prompt.page, dtype=jnp.bfloat16)
    leaves, tree = jax.tree.flatten(jax.eval_shape(functools.partial(shapes, num_pages=arrays.pop("num_pages"))))
    rows = [random_normal(jax.random.key(i), leaf.shape, leaf.dtype.name) for i, leaf in enumerate(leaves)]

    def step(weights: Any, pool: Any, arrays: dict[str, Any]) -> Any:
        batch = ragged_pass(pool, **arrays, mode=ForwardMode.EXTEND)
        return nnx.merge(model.graph, weights)(batch, backend.init_forward_metadata(batch), backend, pool)

    pool = jax.tree.unflatten(tree, rows)
    compiled = jax.jit(step, donate_argnums=1).lower(model.weights, pool, arrays).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    run = _running(compiled, model.weights, pool, arrays)
    del pool, rows  # donated to the first pass
    run()
    times = [_milliseconds(run) for _ in range(repeats)]
    profile = profiled(run, runs=1)
    return {
        "case": "latent_prompt",
        "form": form,
        **dataclasses.asdict(prompt),
        "layers": model.config.num_layers,
        "time_ms": round(statistics.median(times), 4),
        "min_ms": round(min(times), 4),
        "temp_MB": round(memory.temp_size_in_bytes / 1e6, 2),
        "longest_kernels": profile.rows(per=1)[:8],
    }


def _running(compiled: Any, weights: Any, pool: Any, arrays: dict[str, Any]) -> Callable[[], Any]:
    """What passes over one pool after the other, each the result of the one before, and waits."""
    held = [pool]

    def run() -> Any:
        hidden, pool = compiled(weights, held.pop(), arrays)
        held.append(pool)
        return jax.block_until_ready(hidden)

    return run


def _milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.latent_prompt", description=__doc__)
    parser.add_argument("--shapes", choices=[name for name in SHAPES if "deepseek" in name], default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, default=4, help="of the model, the dense ones first")
    parser.add_argument("--tokens", default="8192", help="new ones of a sequence, two rows each")
    parser.add_argument("--prefix", type=int, default=0, help="tokens of each sequence that are in the pool")
    parser.add_argument("--seqs", type=int, default=1)
    parser.add_argument("--page", type=int, default=64, help="tokens in a page")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    shapes = SHAPES[options.shapes]
    model = random_model(shapes.fields | {"num_hidden_layers": options.layers}, shapes.family)
    for tokens in map(int, options.tokens.split(",")):
        prompt = Prompt(tokens=tokens, prefix=options.prefix, seqs=options.seqs, page=options.page)
        for form in get_args(Form):
            row = measured(model, prompt, form, repeats=options.repeats)
            print(json.dumps({"model": shapes.model, **row}), flush=True)


if __name__ == "__main__":
    main()
