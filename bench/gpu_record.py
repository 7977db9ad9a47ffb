"""The record of an H200: runs the GPU tests and the tables, or says whether the device code is still what it was.

python -m bench.gpu_record [--only PART ...] [--quick] [--out DIR]    on an H200
python bench/gpu_record.py --check                                    anywhere; at once, unless files have changed
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import parallel_record, record_key, triton_record
from bench.record_files import RECORD, ROOT, Row, read_rows

# The check needs no installed package: whatever is not of the standard library is imported where it is used.
PARTS = (
    "tests",
    "decode",
    "decode_features",
    "prefill",
    "prefill_features",
    "prefill_dense",
    "latent",
    "decode_step",
    "decode_step_moe",
    "decode_step_latent",
    "decode_step_quantized",
    "decode_step_awq",
    "decode_step_moe_quantized",
    "moe_layer",
    "moe_layer_torch",
    "accuracy",
    "triton",
)
# Parts in which no kernel of ours runs: changes of the code leave them as they are.
OF_OTHERS = ("prefill_dense", "moe_layer_torch")
_COMPILING_THREADS = 8
_NOTHING_LEFT = 5  # pytest's exit code where no test was to be run

Job = tuple[str, Callable[[], Any]]  # a name, and what measures it


def check(record: Path = RECORD, root: Path = ROOT) -> str | None:
    """What is wrong with the record, in a sentence; None if it is of the code as it is."""
    key = record_key.RecordKey.read(record)
    if key is None:
        return f"The H200 record has no {record_key.FILE}: run `python -m bench.gpu_record` on an H200."
    for part in PARTS:
        if part in OF_OTHERS:
            continue
        file = record / f"{part}.jsonl"
        rows = read_rows(file)
        if not rows:
            return f"The H200 record has no {file.name}: run `python -m bench.gpu_record` on an H200."
        sha = key.sha_of(part)
        others = [str(row.get("kernels_sha")) for row in rows if row.get("kernels_sha") != sha]
        if others:
            return (
                f"The rows of {file.name} are of other device code than the rest: run `python -m bench.gpu_record` on "
                f"an H200. Got kernels_sha {others[0][:12]}, not {sha[:12]}."
            )
    return triton_record.check(record, root) or parallel_record.check(root) or record_key.difference(key, root)


def device_kind() -> str:
    """The default device's name, such as "NVIDIA H200"."""
    import jax

    return jax.devices()[0].device_kind


class Recorder:
    """Writes rows as they come, each with what all rows share; a file bears its name once its part is complete.

    Args:
        out: Folder of the files.
        shared: Fields of every row.
    """

    def __init__(self, out: Path, shared: Row):
        self._out, self._shared = out, shared
        self.failures: list[str] = []
        out.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, rows: Iterable[Row], *, complete: Callable[[], bool] = lambda: True) -> None:
        """Writes the file `name`; it stays `name`.part if an error or a time limit comes between."""
        partial = self._out / f"{name}.jsonl.part"
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, **self._shared}) + "\n")
                file.flush()
        if complete():
            partial.rename(self._out / f"{name}.jsonl")

    def with_fields(self, **fields: Any) -> "Recorder":
        """Another recorder into the same folder, with the same list of failures, whose rows have these too."""
        other = Recorder(self._out, self._shared | fields)
        other.failures = self.failures
        return other

    def unfinished(self, name: str) -> Path:
        """Where the beginning of a part is kept from run to run, while the device code stays as it is."""
        return self._out / f"{name}-{str(self._shared.get('kernels_sha', ''))[:12]}.unfinished"

    def measure(self, part: str, jobs: Iterable[Job]) -> None:
        """Writes a part's rows and, as PART-kernels, the kernels behind them, if any were profiled. A refused job is
        left out, with its sentence; one that fails is named, and the others go on."""
        kernels: list[Row] = []
        failed = len(self.failures)

        def rows() -> Iterator[Row]:
            for name, job in jobs:
                try:
                    measured = job()
                except NotImplementedError as error:
                    print(f"{name}: left out. {error}", flush=True)
                except Exception:
                    traceback.print_exc()
                    self.failures.append(name)
                    print(f"{name}: FAILED", flush=True)
                else:
                    kernels.extend(measured.kernels)
                    print(f"{name}: {summary(measured.row)}", flush=True)
                    yield measured.row

        self.write(part, rows(), complete=lambda: len(self.failures) == failed)
        if kernels:
            self.write(f"{part}-kernels", kernels)
        else:
            (self._out / f"{part}-kernels.jsonl").unlink(missing_ok=True)


def summary(row: Row) -> str:
    """A row's figures on one line."""
    names = ("time_us", "time_ms", "device_us", "device_ms", "GBps", "read_GBps", "TFLOPs", "roofline_share")
    more = ("busy_share", "compile_s", "temp_MB", "kernels", "error", "worst_error", "rounded_error", "lse_error")
    return f"{row['impl']}  " + "  ".join(f"{name} {row[name]}" for name in (*names, *more) if name in row)


def record_attention(recorder: Recorder, part: str, *, quick: bool, implementations: tuple[str, ...]) -> None:
    """A table of attention: every workload by the first implementation, those like the peers' by the others too."""
    from bench import attention, named_workloads

    tables = {
        "decode": named_workloads.DECODE,
        "decode_features": named_workloads.DECODE_FEATURES,
        "prefill": named_workloads.EXTEND,
        "prefill_features": named_workloads.EXTEND_FEATURES,
        "latent": named_workloads.LATENT,
    }
    table: tuple[Any, ...] = tables[part]
    of_peers = part in ("decode", "prefill")
    plain = [w for w in table if of_peers and (w.page, w.layout, w.hq, w.kv) == (16, "NHD", 32, "bf16")]
    first = implementations[0]
    short: dict[str, Any] = {"repeats": 3, "seconds": 0.03}
    calls = [(w, name) for name in implementations for w in (plain if quick or name != first else table)]

    def job(workload: Any, name: str, executables: Any) -> Any:
        options = short if quick or name != first else {}
        return attention.measured(workload, name, executables=executables, **options)

    recorder.measure(part, compiled_side_by_side(calls, attention.compiled, job))


def record_dense(recorder: Recorder) -> None:
    """JAX's own dense attention on what of the prefills has a dense equivalent."""
    from bench import comparison, dense, named_workloads

    table = [w for w in (*named_workloads.EXTEND, *named_workloads.EXTEND_FEATURES) if w.page == 16]
    peers = dense.implementations()
    calls = [(w, name) for name in peers for w in table if comparison.has_dense_equivalent(w.fields())]

    def job(workload: Any, name: str, executables: Any) -> Any:
        return dense.measured(workload, name, peers[name], executables=executables)

    jobs = compiled_side_by_side(calls, lambda workload, name: dense.compiled(workload, peers[name]), job)
    recorder.measure("prefill_dense", jobs)


def record_accuracy(recorder: Recorder, implementation: str) -> None:
    """How far results are from exact ones."""
    from bench import accuracy, named_workloads

    table = named_workloads.ACCURACY
    recorder.measure("accuracy", ((w.name, functools.partial(accuracy.measured, w, implementation)) for w in table))


def compiled_side_by_side(
    calls: Iterable[tuple[Any, str]], compile: Callable[[Any, str], Any], measure: Callable[[Any, str, Any], Any]
) -> list[Job]:
    """Jobs that measure workloads by implementations, all of them compiled before the first is timed.

    What a compiler does outside of Python's lock, threads can do at the same time; a timing they would disturb.
    """

    def job(workload: Any, name: str, executables: Future[Any]) -> Any:
        return measure(workload, name, executables.result())

    with ThreadPoolExecutor(max_workers=_COMPILING_THREADS) as threads:
        return [
            (f"{workload.name} {name}", functools.partial(job, workload, name, threads.submit(compile, workload, name)))
            for workload, name in calls
        ]


def record_mixtures(recorder: Recorder, implementation: str, *, quick: bool) -> None:
    """Layers of experts."""
    from bench import mixture_workload, moe_layer, named_workloads

    held, table = mixture_workload.HeldWeights(), named_workloads.MIXTURES
    options: dict[str, Any] = {"repeats": 3, "seconds": 0.03} if quick else {}
    measure = functools.partial(moe_layer.measured, implementation=implementation, held=held, **options)
    recorder.measure("moe_layer", ((w.name, functools.partial(measure, w)) for w in table))


def record_torch_mixtures(recorder: Recorder, implementation: str) -> None:
    """PyTorch's layers of experts, compared with what an implementation of ours gives."""
    from bench import mixture_workload, moe_layer_torch, named_workloads

    held, calls = mixture_workload.HeldWeights(), [(w, implementation) for w in named_workloads.MIXTURES]
    options: dict[str, Any] = {"repeats": 3, "seconds": 0.03}  # four arrangements of each

    def job(workload: Any, name: str, executable: Any) -> Any:
        return moe_layer_torch.measured(workload, held, executable=executable, **options)

    recorder.measure("moe_layer_torch", compiled_side_by_side(calls, moe_layer_torch.compiled, job))


def record_triton(recorder: Recorder, *, quick: bool) -> None:
    """What Triton's kernels do, beside whom they are measured."""
    of_triton = recorder.with_fields(triton_sha=triton_record.triton_sha())
    of_triton.measure("triton", triton_record.jobs(quick=quick))


def record_tests(recorder: Recorder, *, processes: int | None = None) -> None:
    """The GPU tests, in processes of their own. A run that is cut short is taken up by the next one.

    Args:
        processes: At a time; by default one less than there are processors.
    """
    from bench.outcomes import read_outcomes

    paths = os.pathsep.join([*(str(ROOT / place) for place in (".", "kernels", "models")), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Only the files that hold such tests are collected: the others may need what a GPU machine lacks.
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text()]
    outcomes = recorder.unfinished("tests")
    at_a_time = processes or max(1, (os.cpu_count() or 2) - 1)
    options = f"-q --tb=short -o addopts= -o filterwarnings=default -p no:cacheprovider -m gpu -n {at_a_time}"
    command = [sys.executable, "-m", "pytest", "-p", "bench.outcomes", "--outcomes", str(outcomes), *options.split()]
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment)
    rows = list(read_outcomes(outcomes).values())
    complete = done.returncode in (0, _NOTHING_LEFT) and bool(rows)
    if not complete:
        recorder.failures.append("tests")
    recorder.write("tests", rows, complete=lambda: complete)
    if complete:
        outcomes.unlink()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_record", description="Measures jattn on an H200.")
    parser.add_argument("--check", action="store_true", help="say whether the record is of the device code as it is")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part to run; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer rows and shorter spans, for a look")
    parser.add_argument("--out", type=Path, default=RECORD, help="folder of the files")
    parser.add_argument("--implementation", action="append", help="of the attention rows; mosaic, then xla by default")
    options = parser.parse_args(arguments)
    if options.check:
        problem = check()
        print(problem or "The H200 record is of the device code as it is.")
        for part in OF_OTHERS:
            if not (RECORD / f"{part}.jsonl").is_file():
                print(f"It has no {part}.jsonl, which is of others' code.")
        return 1 if problem else 0
    if options.quick and options.out.resolve() == RECORD:
        parser.error("`--quick` is for a look, not for the record: give `--out` another folder.")
    kind = device_kind()
    if "H200" not in kind:
        print(f"The record is of an NVIDIA H200, and JAX's default device here is {kind!r}.", file=sys.stderr)
        return 2
    key = record_key.current_key(RECORD, ROOT)
    key.write(options.out)
    of_all = Recorder(options.out, {"jax": key.jax, "device": kind})
    implementations = tuple(options.implementation or ("mosaic", "xla"))
    for part in options.only or PARTS:
        recorder = of_all.with_fields(kernels_sha=key.sha_of(part))
        if part == "tests":
            record_tests(recorder)
        elif part.startswith("decode_step"):
            from bench import step_record

            step_record.record_steps(recorder, part, quick=options.quick)
        elif part == "moe_layer":
            record_mixtures(recorder, implementations[0], quick=options.quick)
        elif part == "triton":
            record_triton(recorder, quick=options.quick)
        elif part == "moe_layer_torch":
            record_torch_mixtures(recorder, implementations[0])
        elif part == "prefill_dense":
            record_dense(recorder)
        elif part == "accuracy":
            record_accuracy(recorder, implementations[0])
        else:
            record_attention(recorder, part, quick=options.quick, implementations=implementations)
    if of_all.failures:
        print(f"Failed: {', '.join(of_all.failures)}.", file=sys.stderr)
    return 1 if of_all.failures else 0


if __name__ == "__main__":
    sys.exit(main())
