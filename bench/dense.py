"""What JAX has for dense attention, on the dense equivalents of prefills: rows beside ours, of the same run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.attention import Measured
from bench.timing import measure, profiled
from bench.workloads import DTYPES, AttentionWorkload, random_normal

_CALLS, _PROFILED_RUNS = 4, 2
_KEYS_A_TILE = (256, 128, 64)

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def implementations() -> dict[str, tuple[Attend, ...]]:
    """By name of the row, the arrangements of which the fastest counts."""
    # Imported only here: it wants a CUDA runtime.
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    tuned = (
        attention_mgpu.TuningConfig(block_q=64, block_kv=keys, max_concurrent_steps=2, causal=True)
        for keys in _KEYS_A_TILE
    )
    return {
        "jax-attention_mgpu": tuple(functools.partial(attention_mgpu.attention, config=config) for config in tuned),
        "jax-cudnn": (functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),),
    }


def is_dense(workload: AttentionWorkload) -> bool:
    """Whether a prefill has a dense equivalent: whole prompts of one length in bf16, every key before a token seen."""
    is_plain = workload.kv == "bf16" and not workload.rope and workload.window is None and workload.chunk is None
    return is_plain and workload.q_tokens == workload.ctx > 0


def compiled(workload: AttentionWorkload, arrangements: Sequence[Attend]) -> list[Any]:
    """Calls of each arrangement, compiled for the default device from shapes alone, or why it does not take them."""
    operands = [jax.ShapeDtypeStruct(*facts) for facts in _operands(workload)]
    return [_or_refusal(lambda a=attend: _in_a_row(a).lower(*operands).compile()) for attend in arrangements]


def measured(workload: AttentionWorkload, name: str, *, executables: Sequence[Any]) -> Measured:
    """Times the fastest of some arrangements on the default device.

    Args:
        executables: As `compiled` gives them.

    Raises:
        NotImplementedError: None of them takes the workload; the last one's reason.
    """
    operands = [random_normal(jax.random.key(i), *facts) for i, facts in enumerate(_operands(workload))]
    timed = []
    for executable in executables:
        if isinstance(executable, Exception):
            timed.append(executable)
        else:
            run = functools.partial(executable, *operands)
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
        "time_us": round(timing.time_us, 3),
        "min_us": round(timing.min_us, 3),
        **workload.rate(timing.time_us),
    }
    kernels = [{"of": workload.name, "impl": name, **kernel} for kernel in profile.rows(per=_PROFILED_RUNS * _CALLS)]
    return Measured(row, kernels)


def _operands(workload: AttentionWorkload) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of q, k and v."""
    assert isinstance(workload.batch, int)
    shape = (workload.batch, workload.ctx)
    return [((*shape, heads, workload.d), DTYPES[workload.kv]) for heads in (workload.hq, workload.hkv, workload.hkv)]


def _or_refusal[T](act: Callable[[], T]) -> T | Exception:
    """What an arrangement gives, or why it does not: some compile and find no memory when they run."""
    try:
        return act()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return error


def _in_a_row(attend: Attend) -> Any:
    """`_CALLS` calls in one executable, each after the one before."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jnp.zeros_like(q)
        for _ in range(_CALLS):
            q, _ = jax.lax.optimization_barrier((q, out))
            out = attend(q, k, v)
        return out

    return run
