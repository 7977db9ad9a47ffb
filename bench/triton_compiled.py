"""What Triton's compiler makes of the kernels for every GPU they are for: on a CPU, by the wheel's own ptxas.

python -m bench.triton_compiled [--only NAME ...] [--capability 8.6 ...] [--out FILE] [--table]

Each row has a case, a compute capability, and of the kernel that takes most the shared memory in bytes beside what that
GPU has, registers a thread, and bytes that spill out of them.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jattn_kernels.call import Device
from jattn_kernels.triton import launch
from jattn_kernels.triton.gpus import SHARED_MEMORY

RESULTS = Path(__file__).parent / "results" / "triton-compiled.jsonl"
_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
    "uint32": "u32",
}
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")

Capability = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Launched:
    """A kernel as it would be launched.

    Attributes:
        signature: By parameter a pointer's type, or "constexpr".
        constants: Of those.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel's needs: bytes of shared memory and of spills, and registers of a thread."""

    kernel: str
    shared: int
    registers: int
    spilled: int


def launches(call: Callable[..., Any], *args: Any, capability: Capability, **kwargs: Any) -> list[Launched]:
    """The kernels that a call launches on a GPU; arrays may be shapes."""
    found: list[Launched] = []

    def record(*arrays: Any, kernel: Any, out_type: Any, num_warps: int, C: Any, **_: Any) -> list[jax.Array]:
        every = [*arrays, *out_type]
        pointers = dict(zip(kernel.arg_names, every, strict=False))
        signature = {name: "constexpr" if given is None else _pointer(given) for name, given in pointers.items()}
        constants = {name: None for name, given in pointers.items() if given is None} | {"C": C}
        found.append(Launched(kernel, signature | {"C": "constexpr"}, constants, num_warps))
        return [jnp.zeros(out.shape, out.dtype) for out in out_type]

    with _on(capability), mock.patch.object(launch, "_triton_call", return_value=record):
        jax.eval_shape(functools.partial(call, **kwargs), *args)
    return found


def _pointer(array: Any) -> str:
    return f"*{_TYPES[jnp.dtype(array.dtype).name]}"


@contextlib.contextmanager
def _on(capability: Capability) -> Iterator[None]:
    device = Device("gpu", capability)
    modules = [module for name, module in sys.modules.items() if name.startswith("jattn_kernels")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if "default_device" in vars(module):
                stack.enter_context(mock.patch.object(module, "default_device", return_value=device))
        yield


def compiled(launched: Launched, capability: Capability) -> Compiled:
    """What ptxas made of a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(launched.signature.values()) if kind[0] == "*"
    }
    source = ASTSource(launched.kernel, launched.signature, launched.constants, attributes)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    options = {"num_warps": launched.warps, "enable_fp_fusion": True}
    with mock.patch.dict(os.environ, {"TRITON_ALWAYS_COMPILE": "1"}):  # kernels' properties are in no key of its cache
        binary = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = _RESOURCES.search(text.stdout)
    assert found is not None, text.stdout
    registers, stack, _, local = map(int, found.groups())
    return Compiled(launched.kernel.fn.__name__, binary.metadata.shared, registers, stack + local)


def row_of(name: str, capability: Capability) -> dict[str, Any] | None:
    """A row of the results; None where `triton` refuses the case."""
    from bench.triton_cases import triton_cases

    version = "{}.{}".format(*capability)
    try:
        found = [compiled(each, capability) for each in launches(triton_cases()[name], capability=capability)]
    except NotImplementedError:
        return None
    most = max(found, key=lambda each: each.shared)
    facts = {"case": name, "capability": version, **dataclasses.asdict(most), "limit": SHARED_MEMORY[capability]}
    return facts | {"spilled": max(each.spilled for each in found)}


def rows(
    names: Sequence[str], capabilities: Sequence[Capability], processes: int | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each case and capability, as they come."""
    jobs = [(name, capability) for name in names for capability in capabilities]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=context) as pool:
        for row in pool.map(row_of, *zip(*jobs, strict=True)):
            if row is not None:
                yield row


def main() -> int:
    """The command line; returns the exit code."""
    from bench.triton_cases import MAIN, triton_cases

    parser = argparse.ArgumentParser(prog="python -m bench.triton_compiled")
    parser.add_argument("--only", action="append", help="part of a case's name; may be repeated")
    parser.add_argument("--main", action="store_true", help="the main configurations alone")
    parser.add_argument("--capability", action="append", help="such as 8.6; may be repeated")
    parser.add_argument("--out", type=Path, help="file to write")
    options = parser.parse_args()
    names = MAIN if options.main else triton_cases()
    names = [name for name in names if not options.only or any(part in name for part in options.only)]
    wanted = [c for c in SHARED_MEMORY if not options.capability or "{}.{}".format(*c) in options.capability]
    found = []
    for row in rows(names, wanted):
        found.append(row)
        short = "" if row["shared"] <= row["limit"] else "  TOO MUCH"
        print(
            f"{row['capability']:>5} {row['case']:<44} {row['shared'] / 1024:6.1f} of {row['limit'] // 1024:3} KiB "
            f"{row['registers']:4} registers {row['spilled']:5} spilled{short}",
            flush=True,
        )
    if options.out is not None:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return 1 if any(row["shared"] > row["limit"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
