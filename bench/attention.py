"""One row of a record: an attention workload, timed."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.timing import measure, profiled
from bench.workloads import Arrays, AttentionWorkload

_POOLS_BYTES = 8e9
_CALLS_US = 3000  # of one executable, about, unless they are too many
_MOST_CALLS = 128
_PROFILED_RUNS = 2


class Measured(NamedTuple):
    """A row for the record, and a row for each kernel that ran."""

    row: dict[str, Any]
    kernels: list[dict[str, Any]]


def num_calls(workload: AttentionWorkload) -> int:
    """Calls unrolled in one executable."""
    return min(_MOST_CALLS, max(4, int(_CALLS_US / workload.roofline_us)))


def num_pools(workload: AttentionWorkload, calls: int) -> int:
    """One pool a call, or as many as fit: at least two, so that the L2 never holds what a call will read."""
    return min(calls, max(2, int(_POOLS_BYTES / workload.kv_bytes)))


def unrolled(workload: AttentionWorkload, implementation: str, *, calls: int, pools: int) -> Any:
    """`calls` calls in one executable, on one pool after the other, none starting before the last has ended.

    A captured graph of one stream runs so. Without the dependence XLA could run neighbours side by side. A decode call
    takes the output before it for its queries; an extend call, whose softmax must stay that of random queries, a page
    table made from it, which costs one small kernel. Of two passes each has such offsets too, as a pass over rows alone
    has, and every output is given: XLA would do the pass over rows once for all calls, and merge one number where
    nobody takes an output. That pass makes its own work list each time, which the others are given.

    Returns:
        The jitted function of `Arrays`, which gives the last output, last in a list.
    """
    # One traced function, so that the kernel is lowered once.
    call = jax.jit(functools.partial(workload.call, implementation=implementation))

    def run(arrays: Arrays) -> list[jax.Array]:
        outs = []
        for i in range(calls):
            out = call(arrays, jnp.int32(i % pools))
            outs.append(out)
            if workload.q_tokens is None:
                arrays = arrays._replace(q=out.astype(arrays.q.dtype))
            else:
                wrong = (~jnp.isfinite(out[0, 0, 0])).astype(jnp.int32)
                of_before = {name: getattr(arrays, name) for name in workload.chained}
                arrays = arrays._replace(
                    **{name: array + wrong.reshape((1,) * array.ndim) for name, array in of_before.items()}
                )
        return outs if "cu_q_lens" in workload.chained else outs[-1:]

    return jax.jit(run)


class Executables(NamedTuple):
    """A workload, compiled.

    Attributes:
        arrays: Makes the arguments.
        run: Calls of them, `num_calls` in a row.
    """

    arrays: Any
    run: Any


def compiled(workload: AttentionWorkload, implementation: str) -> Executables:
    """Compiles a workload for the default device, from shapes alone: several can be compiled side by side.

    Raises:
        NotImplementedError: The implementation refuses it.
    """
    calls = num_calls(workload)
    pools = num_pools(workload, calls)
    arrays = jax.jit(functools.partial(workload.arrays, pools, implementation))
    run = unrolled(workload, implementation, calls=calls, pools=pools).lower(jax.eval_shape(arrays)).compile()
    return Executables(arrays.lower().compile(), run)


def measured(
    workload: AttentionWorkload,
    implementation: str,
    *,
    executables: Executables | None = None,
    repeats: int = 7,
    seconds: float = 0.1,
) -> Measured:
    """Times a workload on the default device.

    Args:
        executables: If it is compiled already.

    Raises:
        NotImplementedError: The implementation refuses it.
        FloatingPointError: The output is not finite.
    """
    calls = num_calls(workload)
    executables = executables or compiled(workload, implementation)
    run = functools.partial(executables.run, executables.arrays())
    if not bool(jnp.all(jnp.isfinite(run()[-1]))):
        raise FloatingPointError(f"{workload.name}: `{implementation}` gives numbers that are not finite.")
    timing = measure(run, calls=calls, repeats=repeats, seconds=seconds)
    profile = profiled(run, runs=_PROFILED_RUNS)
    row = {
        **workload.fields(),
        "impl": f"jattn-{implementation}",
        "time_us": round(timing.time_us, 3),
        "min_us": round(timing.min_us, 3),
        **workload.rate(timing.time_us),
        "roofline_share": round(workload.roofline_us / timing.time_us, 4),
    }
    if profile.kernel_us:
        row["device_us"] = round(sum(profile.kernel_us.values()) / (_PROFILED_RUNS * calls), 3)
    kernels = [
        {"of": workload.name, "impl": row["impl"], **kernel} for kernel in profile.rows(per=_PROFILED_RUNS * calls)
    ]
    return Measured(row, kernels)
