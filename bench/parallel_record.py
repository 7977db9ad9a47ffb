"""The record of several H200s of one host: what they take to exchange, and steps and prompts of a model they share.

python -m bench.parallel_record [--only PART ...] [--out DIR]    on a machine of two H200s, or of four or eight

A row bears a hash of the code of the kernels that exchange; the other kernels are those of the record of one H200. Each
step and prompt is measured on one of the GPUs too, in the same run; of more than two also on two, and so on.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.record_files import ROOT, Row, code_sha, read_rows

_RESULTS = ROOT / "bench" / "results"
_CODE = ("inbox.py", "triton/launch.py", "triton/short_calls.py", "triton/peers/*.py")
_ROWS = [1, 64, 256, 2048, 8192]
_SIZES = (2, 4, 8)  # devices that share the model; the largest is all
_PROMPT = 8192


def peers_sha(root: Path = ROOT) -> str:
    """sha256 over the code of the kernels that exchange."""
    package = root / "kernels" / "jattn_kernels"
    return code_sha((file for pattern in _CODE for file in package.glob(pattern)), root)


def check(root: Path = ROOT) -> str | None:
    """How the rows differ from the code as it is, in a sentence, or None; also where there are none."""
    for gpus in _SIZES:
        record = root / record_of(gpus).relative_to(ROOT)
        shas = {str(row.get("peers_sha")) for part in PARTS for row in read_rows(record / f"{part}.jsonl")}
        if others := shas - {peers_sha(root)}:
            return (
                f"Kernels that exchange have changed since the record of {gpus} H200s: run "
                f"`python -m bench.parallel_record` on {gpus}. Got peers_sha {min(others)[:12]}, not "
                f"{peers_sha(root)[:12]}."
            )
    return None


def record_of(gpus: int) -> Path:
    """The folder of what so many GPUs have measured."""
    return _RESULTS / f"h200-x{gpus}"


def _exchanges(gpus: int) -> Iterator[Row]:
    from bench.exchanges import rows
    from jattn.parallel import Parallel

    yield from rows(Parallel("tensor", gpus), _ROWS)


def _steps(gpus: int) -> Iterator[Row]:
    from bench.tensor_parallel_step import steps

    yield from (found.row for found in steps(_shared_by(gpus), steps=100))


def _prompts(gpus: int) -> Iterator[Row]:
    from bench.decode_step import random_model
    from bench.first_token import measured
    from bench.step_workload import LLAMA_3_8B
    from jattn.serving.config import EngineConfig
    from jattn.serving.resolved_config import parallel_of

    for size in _shared_by(gpus):
        shapes = LLAMA_3_8B | {"max_position_embeddings": 2 * _PROMPT}
        model = random_model(shapes, parallel=parallel_of(EngineConfig(tensor_parallel=size)))
        yield {"tensor_parallel": size, **measured(model, prompt=_PROMPT, prefill_tokens=_PROMPT)}
        del model  # its memory is the next one's


def _shared_by(gpus: int) -> list[int]:
    return [1, *(size for size in _SIZES if size <= gpus)]


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "exchanges": _exchanges,
    "decode_step": _steps,
    "first_token": _prompts,
}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.parallel_record", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated")
    parser.add_argument("--out", type=Path, help="folder of the files; by default that of as many GPUs")
    options = parser.parse_args(arguments)

    import jax

    from bench.gpu_record import Recorder

    kinds = [device.device_kind for device in jax.devices()]
    gpus = len(kinds)
    if gpus not in _SIZES:
        parser.error(f"The record is of {', '.join(map(str, _SIZES))} GPUs. Got {gpus}: {', '.join(kinds)}.")
    shared = {"gpu": kinds[0], "gpus": gpus, "jax": jax.__version__, "peers_sha": peers_sha()}
    recorder = Recorder(options.out or record_of(gpus), shared)
    for part in options.only or PARTS:

        def shown(part: str = part) -> Iterator[Row]:
            for row in PARTS[part](gpus):
                print(row, flush=True)
                yield row

        recorder.write(part, shown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
