"""Where the seconds of a start go, the first time and the second: the command line, and an engine at full size.

python -m bench.startup [--only generate|engine] [--full-sampling] [--no-greedy-steps] [--compile-threads N]
    [--all-first] [--serve] [--background-threads N]

Each start is a process of its own over one new cache folder; `plain` ones, that nobody looks into, keep steps of their
own there. Seconds of tracing, lowering and loading are added up over threads, so they may exceed the span `steps` that
they fall into.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

_TOLD = "startup figures: "
_BEGUN = "STARTUP_BEGUN"
# Not -m bench.startup: what a script has patched no other process can be known to have, and its steps are not kept.
_CHILD = ["-c", "from bench import startup; startup.main()", "--child"]
_WARNING = re.compile(r"^[WEF]\d{4} |[Ww]arning|error:|Traceback")
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_ROWS, _PREFILL_TOKENS, _PROMPT, _DECODES = 256, 8192, 1000, 64


class Figures:
    """Seconds and counts by name."""

    def __init__(self):
        self.values: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds what is done inside."""
        start = time.perf_counter()
        yield
        self.values[name] += time.perf_counter() - start

    def timed(self, owner: Any, attribute: str, name: str) -> None:
        """Adds every call of a function from here on, and counts those that return something."""
        function = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                result = function(*args, **kwargs)
            if result is not None:
                self.values[f"{name} calls"] += 1
            return result

        setattr(owner, attribute, call)

    def listen(self) -> None:
        """Adds what JAX says of its tracing, lowering and compiling from here on."""
        import jax

        def heard(event: str, duration_secs: float, **kwargs: Any) -> None:
            if event in _EVENTS:
                self.values[_EVENTS[event]] += duration_secs
                self.values[f"{_EVENTS[event]} calls"] += 1

        jax.monitoring.register_event_duration_secs_listener(heard)


def begun() -> Figures:
    """The figures of this process so far: imports, and the device."""
    figures = Figures()
    figures.values["python"] = time.time() - float(os.environ[_BEGUN])
    with figures.span("import jax"):
        import jax
    with figures.span("import jattn"):
        from jattn import cli, step_cache
        from jattn.serving.executor import executor
        from jattn.serving.frontend import llm
        from jattn_models import llama

    del cli, llm, llama
    with figures.span("device"):
        jax.devices()
    with figures.span("first array"):
        jax.block_until_ready(jax.device_put(0.0))  # takes the pool of memory that all others come from
    figures.listen()
    figures.timed(executor, "compile_steps", "steps")
    figures.timed(step_cache.StepCache, "load", "load")
    figures.timed(step_cache.StepCache, "store", "store")
    return figures


def generate() -> None:
    """A child: `jattn generate` with the checkpoint that comes with the package."""
    figures = begun()
    from jattn.cli import app
    from jattn.serving.frontend import llm
    from jattn_models.llama import LlamaForCausalLM

    figures.timed(LlamaForCausalLM, "from_checkpoint", "weights")
    figures.timed(llm.LLM, "__init__", "LLM")
    figures.timed(llm.LLM, "_step", "serving")
    app(["generate", "--max-tokens", "32"], standalone_mode=False)
    tell(figures)


def engine(options: argparse.Namespace) -> None:
    """A child: an engine of Llama-3-8B shapes and random weights."""
    figures = begun()
    import jax
    import numpy as np
    from flax import nnx

    from bench.decode_step import random_model
    from jattn import step_cache, step_compilation
    from jattn.serving.config import EngineConfig
    from jattn.serving.engine import Engine
    from jattn.serving.executor import background
    from jattn.serving.request import SamplingParams

    if options.compile_threads:
        step_compilation.COMPILING_AT_ONCE = options.compile_threads
    if options.background_threads:
        background._AT_ONCE = options.background_threads
    step_cache.use_persistent_cache()
    with figures.span("weights"):
        model = random_model()
        jax.block_until_ready(model.weights)
    config = EngineConfig(
        dtype="bfloat16",
        max_num_seqs=_ROWS,
        prefill_tokens=_PREFILL_TOKENS,
        full_sampling=options.full_sampling,
        greedy_steps=not options.no_greedy_steps,
        compile_in_background=False if options.all_first else None,
    )
    with figures.span("engine"):
        served = Engine(nnx.merge(model.graph, model.weights), config)
    figures.values["pages"] = served.config.num_pages
    figures.values["steps left"] = served.executor.background.left
    params = SamplingParams(max_tokens=_DECODES, temperature=0.0, ignore_eos=True)
    requests = [
        served.make_request(np.random.default_rng(row).integers(model.config.vocab_size, size=_PROMPT), params)
        for row in range(8)
    ]
    with figures.span("first token"):
        served.add(requests[0])
        while not requests[0].generated:
            served.step()
    compiling = served.executor.background
    with figures.span("background"):
        while not compiling.wait(0.0 if options.serve else None) and options.serve:
            if not served.has_work:
                served.add(served.make_request(requests[0].prompt, params))
            served.step()
    while options.serve and served.has_work:
        served.step()
    figures.values["steps failed"] = len(compiling.failed)
    for request in requests[1:]:
        served.add(request)
    while not all(request.generated for request in requests):
        served.step()
    for _ in range(4):
        served.step()
    steps = 40
    with figures.span("decode ms"):
        for _ in range(steps):
            served.step()
    figures.values["decode ms"] *= 1e3 / steps
    tell(figures)


def tell(figures: Figures) -> None:
    """Hands the figures to the parent."""
    figures.values["total"] = time.time() - float(os.environ[_BEGUN])
    folder = Path(os.environ["XDG_CACHE_HOME"])
    figures.values["cache MB"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    print(f"\n{_TOLD}{json.dumps(figures.values)}", flush=True)


def started(command: list[str], cache: str) -> tuple[dict[str, float], list[str]]:
    """The figures of a child, and the warnings that it wrote."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(cache) / "path")])
    environment = os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPATH": path, _BEGUN: str(time.time())}
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    wall = time.time() - float(environment[_BEGUN])
    told = [line for line in run.stdout.splitlines() if line.startswith(_TOLD)]
    if run.returncode or (command[: len(_CHILD)] == _CHILD and not told):
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr[-4000:]}")
    figures = json.loads(told[0].removeprefix(_TOLD)) if told else {}
    return figures | {"process": wall}, [line for line in run.stderr.splitlines() if _WARNING.search(line)]


def announce(folder: Path) -> None:
    """Announces models and checkpoint to children as an installed package does, where the sources alone are there."""
    if any(entry_points(group="jattn.checkpoints")):
        return
    groups = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    metadata = folder / "path" / "jattn-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jattn\nVersion: 0\n", encoding="utf-8")
    lines = [
        line for group, names in groups.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def table(starts: list[dict[str, float]]) -> str:
    """A line for each name, a column for each start."""
    names = list(dict.fromkeys(name for start in starts for name in start))
    lines = [f"{'':16s}" + "".join(f"{title:>10s}" for title in ("first", "second", "plain", "again")[: len(starts)])]
    for name in names:
        lines.append(f"{name:16s}" + "".join(f"{start[name]:10.2f}" if name in start else " " * 10 for start in starts))
    return "\n".join(lines)


def report(title: str, children: list[list[str]]) -> None:
    """Runs children one after the other over a new cache, and prints what they told, or how one failed."""
    try:
        with tempfile.TemporaryDirectory() as cache:
            announce(Path(cache))
            found = [started(command, cache) for command in children]
    except RuntimeError as error:
        print(f"\n{title}\n{error}", flush=True)
        return
    print(f"\n{title}\n{table([figures for figures, _ in found])}")
    for number, (_, warnings) in enumerate(found, 1):
        print(f"start {number}: {len(warnings)} warnings on standard error")
        for text, count in collections.Counter(line[24:] or line for line in warnings).most_common(6):
            print(f"  {count} x {text[:200]}")
    sys.stdout.flush()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--only", choices=("generate", "engine"), help="one of the two")
    parser.add_argument("--full-sampling", action="store_true", help="steps for penalties and log-probabilities too")
    parser.add_argument("--no-greedy-steps", action="store_true", help="no steps for launches in which nobody draws")
    parser.add_argument("--compile-threads", type=int, metavar="N", help="steps that XLA compiles at once")
    parser.add_argument("--all-first", action="store_true", help="no step compiled while it serves")
    parser.add_argument("--serve", action="store_true", help="requests, one after the other, until all are compiled")
    parser.add_argument("--background-threads", type=int, metavar="N", help="steps compiled at once while it serves")
    parser.add_argument("--child", choices=("generate", "engine"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return generate() if options.child == "generate" else engine(options)
    if options.only in (None, "generate"):
        plain = ["-m", "jattn", "generate", "--max-tokens", "32"]
        report("jattn generate, the bundled checkpoint", [[*_CHILD, "generate"]] * 2 + [plain] * 2)
    if options.only in (None, "engine"):
        title = f"an engine of Llama-3-8B shapes, {_ROWS} rows, {_PREFILL_TOKENS:,} prefill tokens"
        report(title, [[*_CHILD, "engine", *sys.argv[1:]]] * 2)
    return None


if __name__ == "__main__":
    main()
