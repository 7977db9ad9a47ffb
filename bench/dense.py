"""What JAX has for dense attention, on the dense equivalents of prefills: rows beside ours, of the same run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from bench.attention import Measured
from bench.timing import measure, profiled
from bench.workloads import AttentionWorkload, random_normal

_CALLS, _PROFILED_RUNS = 4, 2
_KEYS_A_TILE = (256, 128, 64)

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Peer(NamedTuple):
    """An attention of JAX's: the arrangements of which the fastest counts, and the dtype that they take."""

    arrangements: tuple[Attend, ...]
    dtype: str


def implementations() -> dict[str, Peer]:
    """By name of the row."""
    # Imported only here: it wants a CUDA runtime.
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    tuned = (
        attention_mgpu.TuningConfig(block_q=64, block_kv=keys, max_concurrent_steps=2, causal=True)
        for keys in _KEYS_A_TILE
    )
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return {
        # Its shared memory is of float16, whatever it is given.
        "jax-attention_mgpu": Peer(
            tuple(functools.partial(attention_mgpu.attention, config=config) for config in tuned), "float16"
        ),
        "jax-cudnn": Peer((cudnn,), "bfloat16"),
    }


def compiled(workload: AttentionWorkload, peer: Peer) -> list[Any]:
    """Calls of each arrangement, compiled for the default device from shapes alone, or why it does not take them."""
    operands = [jax.ShapeDtypeStruct(shape, peer.dtype) for shape in _shapes(workload)]
    return [
        _or_refusal(lambda a=attend: _in_a_row(a).lower([operands] * _CALLS).compile()) for attend in peer.arrangements
    ]


def measured(workload: AttentionWorkload, name: str, peer: Peer, *, executables: Sequence[Any]) -> Measured:
    """Times the fastest of some arrangements on the default device.

    Args:
        executables: As `compiled` gives them.

    Raises:
        NotImplementedError: None of them takes the workload; the last one's reason.
    """
    keys, shapes = iter(jax.random.split(jax.random.key(0), 3 * _CALLS)), _shapes(workload)
    operands = [[random_normal(next(keys), shape, peer.dtype) for shape in shapes] for _ in range(_CALLS)]
    timed = []
    for executable in executables:
        if isinstance(executable, Exception):
            timed.append(executable)
        else:
            run = functools.partial(executable, operands)
            timed.append(_or_refusal(lambda run=run: (measure(run, calls=_CALLS), run)))
    done = [entry for entry in timed if not isinstance(entry, Exception)]
    if not done:
        raise NotImplementedError(f"`{name}` does not take {workload.name}: {timed[-1]}")
    timing, run = min(done, key=lambda entry: entry[0].time_us)
    profile = profiled(run, runs=_PROFILED_RUNS)
    row: dict[str, Any] = {
        **workload.fields(),
        "case": "prefill_dense",
        "impl": name,
        "dtype": peer.dtype,
        "time_us": round(timing.time_us, 3),
        "min_us": round(timing.min_us, 3),
        **workload.rate(timing.time_us),
    }
    kernels = [{"of": workload.name, "impl": name, **kernel} for kernel in profile.rows(per=_PROFILED_RUNS * _CALLS)]
    return Measured(row, kernels)


def _shapes(workload: AttentionWorkload) -> list[tuple[int, ...]]:
    """Of q, k and v."""
    assert isinstance(workload.batch, int)
    return [(workload.batch, workload.ctx, heads, workload.d) for heads in (workload.hq, workload.hkv, workload.hkv)]


def _or_refusal[T](act: Callable[[], T]) -> T | Exception:
    """What an arrangement gives, or why it does not: some compile and find no memory when they run."""
    try:
        return act()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return error


def _in_a_row(attend: Attend) -> Any:
    """Calls in one executable, each on operands of its own, after the one before: none is left out, nor done once."""

    @jax.jit
    def run(operands: list[list[jax.Array]]) -> list[jax.Array]:
        outs: list[jax.Array] = []
        for q, k, v in operands:
            if outs:
                q, outs[-1] = jax.lax.optimization_barrier((q, outs[-1]))
            outs.append(attend(q, k, v))
        return outs

    return run
