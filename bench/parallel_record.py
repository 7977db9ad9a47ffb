"""The record of two H200s of one host: what they take to exchange, and steps and prompts of a model that they share.

python -m bench.parallel_record [--only PART ...] [--out DIR]    on a machine of two H200s

A row bears a hash of the code of the kernels that exchange; the other kernels are those of the record of one H200. Each
step and prompt is measured on one of the GPUs too, in the same run.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.record_files import ROOT, Row, code_sha, read_rows

RECORD = ROOT / "bench" / "results" / "h200-x2"
_CODE = ("inbox.py", "triton/launch.py", "triton/peers/*.py")
_ROWS = [1, 64, 256, 2048, 8192]
_SIZES = (1, 2)  # devices that share the model
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


def _exchanges() -> Iterator[Row]:
    from bench.exchanges import rows
    from jattn.parallel import Parallel

    yield from rows(Parallel("tensor", 2), _ROWS)


def _steps() -> Iterator[Row]:
    from bench.tensor_parallel_step import steps

    yield from (found.row for found in steps(_SIZES, steps=100))


def _prompts() -> Iterator[Row]:
    from bench.decode_step import random_model
    from bench.first_token import measured
    from bench.step_workload import LLAMA_3_8B
    from jattn.serving.config import EngineConfig
    from jattn.serving.resolved_config import parallel_of

    for size in _SIZES:
        shapes = LLAMA_3_8B | {"max_position_embeddings": 2 * _PROMPT}
        model = random_model(shapes, parallel=parallel_of(EngineConfig(tensor_parallel=size)))
        yield {"tensor_parallel": size, **measured(model, prompt=_PROMPT, prefill_tokens=_PROMPT)}
        del model  # its memory is the next one's


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
