"""What GPUs of one host take to exchange: sums between products, with the norm and without, by kernels and by XLA.

python -m bench.exchanges [--devices N] [--rows N,N,...]    on a machine of several GPUs
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import span_us
from jattn.device_mesh import OnAll, made
from jattn.mailbox import mailbox_of
from jattn.parallel import Parallel
from jattn_kernels import rms_norm

WIDTH = 4096
_EXCHANGES, _WEIGHTS, _EPS = 32, 8, 1e-5
_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_FULL_UNROLL",
}

# (what is added, the residual stream, the scale of a norm, the devices) -> (the next rows, the residual stream)
Way = Callable[[Any, Any, Any, Parallel], tuple[Any, Any]]


def _nothing(y: Any, rest: Any, scale: Any, parallel: Parallel) -> tuple[Any, Any]:
    return y, rest


def _kernel(y: Any, rest: Any, scale: Any, parallel: Parallel) -> tuple[Any, Any]:
    return parallel.all_reduce(y), rest


def _xla(y: Any, rest: Any, scale: Any, parallel: Parallel) -> tuple[Any, Any]:
    return parallel.connected(None).all_reduce(y), rest


def _norm(y: Any, rest: Any, scale: Any, parallel: Parallel) -> tuple[Any, Any]:
    rest = rest + y
    return rms_norm(rest, scale, eps=_EPS), rest


def _norm_kernel(y: Any, rest: Any, scale: Any, parallel: Parallel) -> tuple[Any, Any]:
    rest, y = parallel.add_and_norm(rest, y, scale, eps=_EPS, offset=0.0, layer_index=None)
    return y, rest


WAYS: dict[str, Way] = {
    "nothing": _nothing,
    "kernel": _kernel,
    "xla": _xla,
    "norm": _norm,
    "norm_kernel": _norm_kernel,
}


def chain(way: Way, parallel: Parallel) -> Any:
    """A program of as many products as exchanges, each behind the other."""

    def run(x: Any, weights: Any, scale: Any, table: Any) -> Any:
        connected = parallel.connected(table)

        def body(i: Any, carry: Any) -> Any:
            x, rest = carry
            y = x @ jax.lax.dynamic_index_in_dim(weights, i % _WEIGHTS, keepdims=False)
            return way(y, rest, scale, connected)

        return jax.lax.fori_loop(0, _EXCHANGES, body, (x, jnp.zeros_like(x)))[0]

    step = OnAll(run, parallel, takes_shares=(False, True, False, True), gives_shares=False)
    return jax.jit(step, compiler_options=_OPTIONS)


def rows(parallel: Parallel, counts: list[int], repeats: int = 7) -> Iterator[dict[str, Any]]:
    """Microseconds of an exchange: a chain's with it, less the same without, over their number."""
    mailbox = mailbox_of(parallel)
    assert mailbox is not None, "The devices cannot exchange by kernels."
    draw = functools.partial(jax.random.normal, shape=(_WEIGHTS, WIDTH, WIDTH), dtype=jnp.bfloat16)
    size = jnp.bfloat16(WIDTH**-0.5 / parallel.size)
    weights = made(lambda: draw(jax.random.key(parallel.first_of(1))) * size, parallel, shares=True)
    scale = jnp.ones(WIDTH, jnp.bfloat16)
    for count in counts:
        x = np.random.default_rng(count).standard_normal((count, WIDTH)).astype(jnp.bfloat16)
        times, results = {}, {}
        for name, way in WAYS.items():
            program = chain(way, parallel)
            for _ in range(2):
                jax.block_until_ready(program(x, weights, scale, mailbox.loopback))
            results[name] = np.asarray(program(x, weights, scale, mailbox.table).astype(jnp.float32))
            run = functools.partial(program, x, weights, scale, mailbox.table)
            span_us(run, 5)
            times[name] = statistics.median(span_us(run, 20) / 20 for _ in range(repeats))
        mailbox.check()
        scale_of = np.linalg.norm(results["xla"])
        yield {
            "case": "exchange",
            "devices": parallel.size,
            "rows": count,
            "kilobytes": count * WIDTH * 2 // 1024,
            "kernel_us": round((times["kernel"] - times["nothing"]) / _EXCHANGES, 2),
            "xla_us": round((times["xla"] - times["nothing"]) / _EXCHANGES, 2),
            "norm_kernel_us": round((times["norm_kernel"] - times["norm"]) / _EXCHANGES, 2),
            "off_from_xla": float(np.linalg.norm(results["kernel"] - results["xla"]) / scale_of),
        }


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.exchanges", description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rows", default="1,8,64,256,512,2048,8192", help="rows of 4,096 numbers of bfloat16")
    options = parser.parse_args(arguments)
    for row in rows(Parallel("tensor", options.devices), [int(count) for count in options.rows.split(",")]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
