"""The record of two H200s of one host: what they take to exchange, and steps and prompts of a model that they share.

python -m bench.parallel_record [--only PART ...] [--out DIR]    on a machine of two H200s

A row bears a hash of the code of the kernels that exchange; the other kernels are those of the record of one H200. Each
step and prompt is measured on one of the GPUs too, in the same run.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.record_files import ROOT, Row, code_sha, read_rows

RECORD = ROOT / "bench" / "results" / "h200-x2"
_CODE = ("inbox.py", "triton/launch.py", "triton/peers/*.py")
_ROWS = [1, 64, 256, 2048, 8192]
_BATCHES = ((1, 1024), (8, 1024), (64, 2048), (256, 1024))
_PROMPT = 8192


def peers_sha(root: Path = ROOT) -> str:
    """sha256 over the code of the kernels that exchange."""
    package = root / "kernels" / "jattn_kernels"
    return code_sha((file for pattern in _CODE for file in package.glob(pattern)), root)


def check(root: Path = ROOT) -> str | None:
    """How the rows differ from the code as it is, in a sentence, or None; also where there are none."""
    record = root / RECORD.relative_to(ROOT)
    shas = {str(row.get("peers_sha")) for part in PARTS for row in read_rows(record / f"{part}.jsonl")}
    if shas <= {peers_sha(root)}:
        return None
    return (
        "Kernels that exchange have changed since the record of two H200s: run `python -m bench.parallel_record` on "
        f"two. Got peers_sha {min(shas - {peers_sha(root)})[:12]}, not {peers_sha(root)[:12]}."
    )


def _models() -> Iterator[Any]:
    """The model on one device and on two; one is gone before the next comes."""
    from bench.decode_step import random_model
    from bench.step_workload import LLAMA_3_8B
    from jattn.parallel import ONE_DEVICE, Parallel

    for parallel in (ONE_DEVICE, Parallel("tensor", 2)):
        yield random_model(LLAMA_3_8B | {"max_position_embeddings": 2 * _PROMPT}, parallel=parallel)


def _exchanges() -> Iterator[Row]:
    from bench.exchanges import rows
    from jattn.parallel import Parallel

    yield from rows(Parallel("tensor", 2), _ROWS)


def _steps() -> Iterator[Row]:
    from bench.decode_step import measured
    from bench.step_workload import StepWorkload

    for model in _models():
        for batch, ctx in _BATCHES:
            found = measured(model, StepWorkload(batch=batch, ctx=ctx, page=64), steps=100)
            yield {"tensor_parallel": model.parallel.size, **found.row}


def _prompts() -> Iterator[Row]:
    from bench.first_token import measured

    for model in _models():
        found = measured(model, prompt=_PROMPT, prefill_tokens=_PROMPT)
        yield {"tensor_parallel": model.parallel.size, **found}


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "exchanges": _exchanges,
    "decode_step": _steps,
    "first_token": _prompts,
}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.parallel_record", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated")
    parser.add_argument("--out", type=Path, default=RECORD, help="folder of the files")
    options = parser.parse_args(arguments)

    import jax

    from bench.gpu_record import Recorder

    kinds = [device.device_kind for device in jax.devices()]
    if len(kinds) < 2:
        parser.error(f"The record is of two GPUs. Got {len(kinds)}: {', '.join(kinds)}.")
    shared = {"gpu": kinds[0], "gpus": 2, "jax": jax.__version__, "peers_sha": peers_sha()}
    recorder = Recorder(options.out, shared)
    for part in options.only or PARTS:

        def shown(part: str = part) -> Iterator[Row]:
            for row in PARTS[part]():
                print(row, flush=True)
                yield row

        recorder.write(part, shown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
