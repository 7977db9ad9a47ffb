"""A search for attention's best tiles on this GPU, for a file that an environment variable then names.

python -m bench.tune --out FILE [--only NAME ...]                            Hopper's decode: JATTN_DECODE_TILES=FILE
python -m bench.tune --implementation triton --out FILE [--only NAME ...]    Triton's attention: JATTN_TRITON_TILES=FILE

Each arrangement that fits is timed like a row of the record. What beats the rule's choice is written down, so that a
GPU that the rule was not made on gets its own.
"""

import argparse
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench import attention
from bench.workloads import DTYPES, AttentionWorkload
from jattn_kernels.call import AttentionCall
from jattn_kernels.lowering.tile_file import TileFile
from jattn_kernels.mosaic.sm90.decode import autotuned
from jattn_kernels.mosaic.sm90.decode import tile_sizes as decode_tiles

TUNED: tuple[AttentionWorkload, ...] = tuple(
    AttentionWorkload(batch=24, ctx=4096, d=d, kv=kv, verify=verify, rope=rope)  # too few for extend's kernel
    for kv, d, verify, rope in (
        *(("bf16", d, verify, False) for d in (64, 128, 256) for verify in (1, 4, 8, 16)),
        *(("fp8_e4m3", 128, verify, False) for verify in (1, 4, 16)),
        ("bf16", 128, 1, True),
    )
)
TUNED_BY_TRITON: tuple[AttentionWorkload, ...] = (
    *(AttentionWorkload(batch=64, ctx=8192, d=d, kv=kv) for kv, d in (("bf16", 128), ("bf16", 64), ("fp8_e4m3", 128))),
    AttentionWorkload(batch=64, ctx=8192, page=1),
    AttentionWorkload(batch=8, ctx=8192, verify=4),
    *(AttentionWorkload(batch=4, ctx=4096, q_tokens=4096, d=d) for d in (64, 128, 256)),
)
_LEAST_GAIN = 0.02  # of the time: less may be chance


class Choice(NamedTuple):
    """What there is to choose for a workload.

    Attributes:
        file: Where the choice is told.
        shape: What it depends on.
        rule: The heuristic's.
        others: All that fit.
    """

    file: TileFile
    shape: Any
    rule: Any
    others: Sequence[Any]


def decode_choice(workload: AttentionWorkload) -> Choice:
    """Of Hopper's decode kernel."""
    itemsize = jnp.dtype(DTYPES[workload.kv]).itemsize
    rule = decode_tiles.choose_decode_tiles(workload.spec, itemsize, workload.verify)
    return Choice(
        autotuned.TILES,
        decode_tiles.shape_of(workload.spec, itemsize, rule.block_rows),
        autotuned.Arrangement(rule.stages, rule.blocks_per_sm, rule.warpgroups),
        decode_tiles.arrangements(workload.spec, itemsize, rule.block_rows),
    )


def triton_choice(workload: AttentionWorkload) -> Choice:
    """Of Triton's attention kernel."""
    from jattn_kernels.triton.attention import tile_sizes

    call = AttentionCall(
        operation="paged_decode" if workload.q_tokens is None else "paged_extend",
        spec=workload.spec,
        q_dtype="bfloat16",
        kv_dtype=DTYPES[workload.kv],
        page_size=workload.page,
        num_tokens=workload.verify if workload.q_tokens is None else workload.q_tokens,
        num_seqs=len(workload.kv_lens),
    )
    others = tile_sizes.arrangements(call)
    return Choice(tile_sizes.TILES, tile_sizes.shape_of(call), tile_sizes.by_rule(call), others)


CHOICES: dict[str, tuple[tuple[AttentionWorkload, ...], Callable[[AttentionWorkload], Choice]]] = {
    "mosaic": (TUNED, decode_choice),
    "triton": (TUNED_BY_TRITON, triton_choice),
}


class Found(NamedTuple):
    """A shape's arrangements with their times in microseconds, the rule's first and then the fastest ones first."""

    workload: AttentionWorkload
    choice: Choice
    timed: list[tuple[Any, float]]

    @property
    def best(self) -> tuple[Any, float] | None:
        """What is faster than the rule's by more than chance."""
        (_, by_rule), *others = self.timed
        return others[0] if others and others[0][1] < (1 - _LEAST_GAIN) * by_rule else None

    def line(self, device: str) -> str | None:
        """What to keep of it, if anything."""
        if self.best is None:
            return None
        sizes, time_us = self.best
        return self.choice.file.line(self.choice.shape, sizes, device=device, time_us=round(time_us, 3))


def search(
    workload: AttentionWorkload,
    time_us: Callable[[AttentionWorkload], float],
    choice_of: Callable[[AttentionWorkload], Choice] = decode_choice,
) -> Found:
    """Times every arrangement of a workload's shape; one that does not compile is left out."""
    with _told(None):
        choice = choice_of(workload)
    timed = []
    for arrangement in choice.others:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tiles.jsonl"
            file.write_text(choice.file.line(choice.shape, arrangement), encoding="utf-8")
            try:
                with _told(file, choice.file.variable):
                    timed.append((arrangement, time_us(workload)))
            except (ValueError, jax.errors.JaxRuntimeError):
                if arrangement == choice.rule:
                    raise
    return Found(workload, choice, sorted(timed, key=lambda entry: (entry[0] != choice.rule, entry[1])))


@contextlib.contextmanager
def _told(file: Path | None, variable: str = "") -> Iterator[None]:
    """Sizes are told by a file, or by none."""
    variables = [autotuned.VARIABLE, "JATTN_TRITON_TILES"]
    before = {name: os.environ.pop(name) for name in variables if name in os.environ}
    if file is not None:
        os.environ[variable] = str(file)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        os.environ.update(before)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file; lines are added to it")
    parser.add_argument("--implementation", choices=list(CHOICES), default="mosaic", help="whose tiles")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of workloads")
    options = parser.parse_args(arguments)
    if not options.out.parent.is_dir():
        parser.error(f"there is no folder for `--out`. Got {options.out}.")
    tuned, choice_of = CHOICES[options.implementation]
    names = [workload.name for workload in tuned]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"`--only` must be names out of {', '.join(names)}. Got {', '.join(sorted(unknown))}.")
    time_us = functools.partial(_time_us, implementation=options.implementation)
    kept, device = [], jax.devices()[0].device_kind
    for workload in tuned:
        if options.only and workload.name not in options.only:
            continue
        found = search(workload, time_us, choice_of)
        line = found.line(device)
        print(sentence(found, kept=line is not None), flush=True)
        if line:
            kept.append(found.choice.file.variable)
            with options.out.open("a", encoding="utf-8") as file:  # of one shape the last line counts
                file.write(f"{line}\n")
    print(
        f"Set {kept[0]}={options.out} to use what was kept." if kept else "The rule's choices stand: nothing to keep."
    )


def _time_us(workload: AttentionWorkload, implementation: str = "mosaic") -> float:
    return attention.measured(workload, implementation, repeats=3, seconds=0.03).row["time_us"]


def sentence(found: Found, *, kept: bool) -> str:
    """What a search found, in words."""
    (own, own_us), *others = found.timed
    text = f"{found.workload.name}: by rule {_words(own)}, {own_us:.1f} us"
    if others:
        text += f"; the best other {_words(others[0][0])}, {others[0][1]:.1f} us{', kept' if kept else ''}"
    return text + "."


def _words(arrangement: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in arrangement._asdict().items())


if __name__ == "__main__":
    main()
