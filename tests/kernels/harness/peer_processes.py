"""Processes in the place of GPUs: each runs the kernels in Triton's interpreter, and stores into the others' inboxes.

python -m tests.kernels.harness.peer_processes PATH DEVICES RANK CALLS    (started by `run_on_all`)
"""

# isort: off
from tests.kernels.harness.triton_interpreter import interpreted
# isort: on

import pathlib
import subprocess
import sys
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels.call import NormCall
from jattn_kernels.inbox import EMPTY, HEADER, Inbox
from jattn_kernels.operands import NormOperands
from jattn_kernels.splits import Splits
from jattn_kernels.triton.peers import add_norm as norms
from jattn_kernels.triton.peers import all_reduce as sums
from jattn_kernels.triton.peers.add_norm import add_norm
from jattn_kernels.triton.peers.all_reduce import all_gather, all_reduce

LANE_WORDS = 512  # two KB: long arrays take several rounds
TILE = 32  # pieces: a lane takes several
BLOCKS = 4
EPS = 1e-5
DTYPES = ("bfloat16", "float16", "float32")


def run_on_all(devices: int, folder: pathlib.Path, *, calls: int) -> None:
    """Runs so many calls, of each kind in turn, in as many processes as devices, and raises what one finds wrong.

    Args:
        folder: For the memory that they share.
    """
    inbox, path = Inbox(devices, LANE_WORDS), folder / "inboxes"
    words = _inboxes(path, inbox, mode="w+")
    words[:, :HEADER], words[:, HEADER:] = 0, EMPTY
    command = [sys.executable, "-m", "tests.kernels.harness.peer_processes", str(path), str(devices)]
    processes = [
        subprocess.Popen([*command, str(rank), str(calls)], stderr=subprocess.PIPE, text=True)
        for rank in range(devices)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)
    assert (words[:, HEADER:] == EMPTY).all()
    assert len(np.unique(words[:, :HEADER], axis=0)) == 1  # all have done as many exchanges


def _inboxes(path: pathlib.Path, inbox: Inbox, mode: Literal["r+", "w+"]) -> np.ndarray:
    return np.memmap(path, np.uint32, mode, shape=(inbox.devices, inbox.words))


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers, some of them 0.0 and -0.0."""
    numbers = rng.standard_normal(shape) * rng.choice([1.0, 0.0, -0.0], shape, p=[0.8, 0.1, 0.1])
    return numbers.astype(jnp.dtype(dtype))


def _sum(parts: list[np.ndarray]) -> np.ndarray:
    """In float32, in the order of the devices, rounded once."""
    total = np.zeros(parts[0].shape, np.float32)
    for part in parts:
        total = total + part.astype(np.float32)
    return total.astype(parts[0].dtype)


def _same(found: jax.Array, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), wanted.astype(np.float32))


def _check_sum(rng: np.random.Generator, rank: int, table: jax.Array, inbox: Inbox) -> None:
    dtype, shots = str(rng.choice(DTYPES)), int(rng.integers(1, 3)) if inbox.devices > 2 else 1
    size = 8 * int(rng.integers(1, 400))
    parts = [drawn(rng, (size,), dtype) for _ in range(inbox.devices)]
    with interpreted():
        out = all_reduce(jnp.asarray(parts[rank]), table, inbox, shots=shots)
    _same(out, _sum(parts))


def _check_long_sum(rng: np.random.Generator, rank: int, table: jax.Array, inbox: Inbox) -> None:
    """More than a lane of all blocks."""
    parts = [drawn(rng, (3 * BLOCKS * LANE_WORDS,), "float32") for _ in range(inbox.devices)]
    with interpreted():
        out = all_reduce(jnp.asarray(parts[rank]), table, inbox, shots=1)
    _same(out, _sum(parts))


def _check_gather(rng: np.random.Generator, rank: int, table: jax.Array, inbox: Inbox) -> None:
    parts = rng.integers(-5, 1 << 30, (inbox.devices, 4 * int(rng.integers(1, 300))), dtype=np.int32)
    with interpreted():
        out = all_gather(jnp.asarray(parts[rank]), table, inbox)
    np.testing.assert_array_equal(np.asarray(out), parts)


def _check_norm(rng: np.random.Generator, rank: int, table: jax.Array, inbox: Inbox) -> None:
    dtype, rows = str(rng.choice(DTYPES)), int(rng.integers(1, 6))
    columns = 8 * int(rng.integers(1, 60))
    if rng.integers(3) == 0:
        rows, columns = 50, 96  # some of a block's rows are of one exchange, others of the next
    num_splits = int(rng.integers(0, 3))
    x, scale = drawn(rng, (rows, columns), dtype), drawn(rng, (2, columns), dtype)
    shape = (num_splits, -(-rows // 4) * 4, columns) if num_splits else (rows, columns)
    parts = [drawn(rng, shape, "float32" if num_splits else dtype) for _ in range(inbox.devices)]
    own = jnp.asarray(parts[rank])
    addition = Splits(parts=own, num_rows=rows, dtype=jnp.dtype(dtype)) if num_splits else own
    if num_splits:
        parts = [part.sum(axis=0)[:rows].astype(dtype) for part in parts]
    operands = NormOperands(x=jnp.asarray(x), scale=jnp.asarray(scale), layer_index=jnp.int32(1))
    call = NormCall(num_rows=rows, columns=columns, dtype=dtype, scale_dtype=dtype, eps=EPS, offset=1.0)
    with interpreted():
        total, normed = add_norm(call, operands, addition, table, inbox)
    wanted = (x.astype(np.float32) + _sum(parts).astype(np.float32)).astype(dtype)
    _same(total, wanted)
    wide = wanted.astype(np.float64)
    wide *= (np.mean(wide**2, axis=-1, keepdims=True) + EPS) ** -0.5 * (scale[1].astype(np.float64) + 1)
    close = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(np.asarray(normed).astype(np.float64), wide, rtol=close, atol=close)


CHECKS = (_check_sum, _check_norm, _check_gather, _check_norm, _check_sum)


def main(path: str, devices: int, rank: int, calls: int) -> None:
    """One device's part."""
    inbox = Inbox(devices, LANE_WORDS)
    sums._MOST_TILE, sums.MOST_BLOCKS, norms.MOST_BLOCKS = TILE, BLOCKS, BLOCKS
    words = _inboxes(pathlib.Path(path), inbox, "r+")
    table = jnp.asarray(inbox.table([row.ctypes.data for row in words])[rank])
    rng = np.random.default_rng(devices)  # the same on all
    _check_long_sum(rng, rank, table, inbox)
    for number in range(calls):
        CHECKS[number % len(CHECKS)](rng, rank, table, inbox)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
