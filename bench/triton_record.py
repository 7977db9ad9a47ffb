"""The part of the record that is of Triton's kernels: rows like those of vLLM's and SGLang's, and decode steps.

What they are lowered to is known only where Triton compiles, so a row bears a hash of their code instead.
"""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.record_files import RECORD, ROOT, code_sha, read_rows

PACKAGE = Path("kernels", "jattn_kernels", "triton")
_ATTENTION = (
    "attention/*.py",
    "fp8.py",
    "launch.py",
    "short_calls.py",
    "gpus.py",
)  # all that most rows run, and nearly all of a step
_COMPILING_THREADS = 8
_STEP_BATCHES = (1, 64)


def triton_sha(root: Path = ROOT) -> str:
    """sha256 over the code of Triton's attention."""
    return code_sha((file for pattern in _ATTENTION for file in (root / PACKAGE).glob(pattern)), root)


def check(record: Path = RECORD, root: Path = ROOT) -> str | None:
    """How the rows differ from the code as it is, in a sentence, or None; also where there are none."""
    shas = {str(row.get("triton_sha")) for row in read_rows(record / "triton.jsonl")}
    if shas <= {triton_sha(root)}:
        return None
    return (
        "Triton's attention has changed since triton.jsonl: run `python -m bench.gpu_record --only triton` on an H200. "
        f"Got triton_sha {min(shas)[:12]}, not {triton_sha(root)[:12]}."
    )


def workloads() -> list[Any]:
    """Those of vLLM's and SGLang's Triton kernels, and absorbed latents."""
    from bench.latent_workload import LatentWorkload
    from bench.workloads import AttentionWorkload

    shapes = ((1, 8192), (8, 8192), (32, 4096), (64, 8192), (256, 1024))
    prompts = ((1, 8192), (4, 4096), (1, 32768))
    return [
        *(AttentionWorkload(batch=batch, ctx=ctx, page=page) for page in (16, 1) for batch, ctx in shapes),
        *(AttentionWorkload(batch=64, ctx=8192, kv="fp8_e4m3", page=page) for page in (16, 1)),
        *(
            AttentionWorkload(batch=batch, ctx=ctx, q_tokens=ctx, page=page)
            for page in (16, 1)
            for batch, ctx in prompts
        ),
        *(LatentWorkload(batch=batch, ctx=ctx, hq=hq) for hq in (16, 128) for batch, ctx in ((1, 8192), (64, 4096))),
    ]


def jobs(*, quick: bool) -> Iterator[tuple[str, Any]]:
    """Names and what measures them; attention is compiled before the first is timed."""
    from bench import attention, decode_step, named_workloads

    options: dict[str, Any] = {"repeats": 3, "seconds": 0.03} if quick else {}
    table = workloads()
    with ThreadPoolExecutor(_COMPILING_THREADS) as threads:
        compiled = [threads.submit(attention.compiled, workload, "triton") for workload in table]
    for workload, executables in zip(table, compiled, strict=True):
        yield (
            f"{workload.name} triton",
            lambda w=workload, e=executables: attention.measured(w, "triton", executables=e.result(), **options),
        )
    steps: dict[str, Any] = {"steps": 50, "repeats": 1} if quick else {"steps": 100}
    model = decode_step.random_model()
    for workload in (step for step in named_workloads.STEPS if step.batch in _STEP_BATCHES):
        for name in ("mosaic", "triton"):
            measure = functools.partial(decode_step.measured, model, workload, implementation=name, **steps)
            yield f"{workload.name} {name}", measure
