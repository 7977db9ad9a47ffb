"""A search for decode's best tiles on this GPU: `python -m bench.tune --out FILE`, and then JATTN_DECODE_TILES=FILE.

python -m bench.tune --out FILE [--only NAME ...]

Each arrangement that fits is timed like a row of the record. What beats the rule's choice is written down, so that a
GPU that the rule was not made on gets its own.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bench import attention
from bench.workloads import DTYPES, AttentionWorkload
from jattn_kernels.mosaic.sm90.decode.autotuned import VARIABLE, Arrangement, Shape, line
from jattn_kernels.mosaic.sm90.decode.tile_sizes import arrangements, choose_decode_tiles, shape_of

TUNED: tuple[AttentionWorkload, ...] = tuple(
    AttentionWorkload(batch=24, ctx=4096, d=d, kv=kv, verify=verify, rope=rope)  # too few for extend's kernel
    for kv, d, verify, rope in (
        *(("bf16", d, verify, False) for d in (64, 128, 256) for verify in (1, 4, 8, 16)),
        *(("fp8_e4m3", 128, verify, False) for verify in (1, 4, 16)),
        ("bf16", 128, 1, True),
    )
)
_LEAST_GAIN = 0.02  # of the time: less may be chance


class Found(NamedTuple):
    """A shape's arrangements with their times in microseconds, the rule's first and then the fastest ones first."""

    workload: AttentionWorkload
    shape: Shape
    timed: list[tuple[Arrangement, float]]

    @property
    def best(self) -> tuple[Arrangement, float] | None:
        """What is faster than the rule's by more than chance."""
        (_, by_rule), *others = self.timed
        return others[0] if others and others[0][1] < (1 - _LEAST_GAIN) * by_rule else None


def search(workload: AttentionWorkload, time_us: Callable[[AttentionWorkload], float]) -> Found:
    """Times every arrangement of a workload's shape; one that does not compile is left out."""
    kv_itemsize = jnp.dtype(DTYPES[workload.kv]).itemsize
    with _told(None):
        rule = choose_decode_tiles(workload.spec, kv_itemsize, workload.verify)
    own = Arrangement(rule.stages, rule.blocks_per_sm, rule.warpgroups)
    shape = shape_of(workload.spec, kv_itemsize, rule.block_rows)
    timed = []
    for arrangement in arrangements(workload.spec, kv_itemsize, rule.block_rows):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tiles.jsonl"
            file.write_text(line(shape, arrangement), encoding="utf-8")
            try:
                with _told(file):
                    timed.append((arrangement, time_us(workload)))
            except (ValueError, jax.errors.JaxRuntimeError):
                if arrangement == own:
                    raise
    return Found(workload, shape, sorted(timed, key=lambda entry: (entry[0] != own, entry[1])))


@contextlib.contextmanager
def _told(file: Path | None) -> Iterator[None]:
    """Sizes are told by a file, or by none."""
    before = os.environ.pop(VARIABLE, None)
    if file is not None:
        os.environ[VARIABLE] = str(file)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def tune(
    workloads: Sequence[AttentionWorkload], time_us: Callable[[AttentionWorkload], float], device: str
) -> Iterator[tuple[Found, str | None]]:
    """Each workload's search, and the line to keep of it, if any."""
    for workload in workloads:
        found = search(workload, time_us)
        best = found.best
        keep = None if best is None else line(found.shape, best[0], device=device, time_us=round(best[1], 3))
        yield found, keep


def _time_us(workload: AttentionWorkload) -> float:
    return attention.measured(workload, "mosaic", repeats=3, seconds=0.03).row["time_us"]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="the file that JATTN_DECODE_TILES shall name; lines are added to it"
    )
    names = [workload.name for workload in TUNED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    options = parser.parse_args(arguments)
    if not options.out.parent.is_dir():
        parser.error(f"there is no folder for `--out`. Got {options.out}.")
    kept = 0
    workloads = [workload for workload in TUNED if workload.name in options.only]
    for found, keep in tune(workloads, _time_us, jax.devices()[0].device_kind):
        print(sentence(found, kept=keep is not None), flush=True)
        if keep:
            kept += 1
            with options.out.open("a", encoding="utf-8") as file:  # of one shape the last line counts
                file.write(f"{keep}\n")
    print(
        f"Set {VARIABLE}={options.out} to use what was kept." if kept else "The rule's choices stand: nothing to keep."
    )


def sentence(found: Found, *, kept: bool) -> str:
    """What a search found, in words."""
    (own, own_us), *others = found.timed
    text = f"{found.workload.name}: by rule {_words(own)}, {own_us:.1f} us"
    if others:
        text += f"; the best other {_words(others[0][0])}, {others[0][1]:.1f} us{', kept' if kept else ''}"
    return text + "."


def _words(arrangement: Arrangement) -> str:
    return f"{arrangement.stages} stages, {arrangement.warpgroups} warpgroups, {arrangement.blocks_per_sm} a SM"


if __name__ == "__main__":
    main()
