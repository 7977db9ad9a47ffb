"""`jattn doctor`: which device there is, what serves attention on it and why, versions, and known clashes."""

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jattn import mailbox
from jattn.devices import started_devices
from jattn.no_device import NoDeviceError
from jattn.parallel import Parallel
from jattn_kernels.call import AttentionCall, Call, Device, ExpertsCall, NormCall, Operation, default_device
from jattn_kernels.dispatch import choose, implementations
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton.implementation import unmet

PLUGINS = {"jax-cuda13-plugin": 13, "jax-cuda12-plugin": 12}
PACKAGES = ("jattn", "jax", "jaxlib", "flax", *PLUGINS, "triton", "jax-triton")
OLDEST_DRIVER = {13: 580, 12: 525}  # that NVIDIA's CUDA of this major version runs with
EXAMPLE = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
MLA_EXAMPLE = AttentionSpec(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, sm_scale=192**-0.5)
EXAMPLE_PAGE_SIZE = 16
EXAMPLE_TOKENS = 64
EXAMPLE_COLUMNS = 4096  # of a norm
EXAMPLE_EXPERTS: dict[str, Any] = {"per_token": 8, "num_experts": 128, "hidden_size": 2048, "units": 768}
DTYPES = ("bfloat16", "float16", "float32")
# Who serves no `projected_decode` turns heads and attends in two calls, which are there.
OPERATIONS = tuple(operation for operation in get_args(Operation) if operation != "projected_decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found on a machine.

    Attributes:
        versions: Of the packages in `PACKAGES` that are installed.
        has_nvidia_gpu: Whether the system has an NVIDIA GPU, seen by JAX or not.
        driver: Version of NVIDIA's driver; None if unknown.
        device_names: Of JAX's devices.
        device: JAX's default device; None if JAX cannot start.
        jax_error: Why JAX cannot start.
        warnings: What it said while it started.
        jax_platforms: What JAX was told to run on; empty if nothing.
        sums: How several GPUs that share a model would add up; None of fewer than two.
    """

    versions: Mapping[str, str]
    has_nvidia_gpu: bool = False
    driver: str | None = None
    device_names: tuple[str, ...] = ()
    device: Device | None = None
    jax_error: str | None = None
    warnings: tuple[str, ...] = ()
    jax_platforms: str = ""
    sums: str | None = None


@dataclasses.dataclass(frozen=True)
class Served:
    """Which implementation serves a kind of call, and why; the name is None if none does."""

    operation: str
    dtype: str
    implementation: str | None
    reason: str


def clashes(facts: Facts) -> list[str]:
    """A sentence for everything that is known not to work together."""
    found = []
    versions = facts.versions
    if (
        _at_least(versions.get("jax"), 0, 12)
        and "jax-triton" in versions
        and not _above(versions["jax-triton"], 0, 4, 1)
    ):
        found.append(
            f"jax-triton {versions['jax-triton']} does not work with JAX {versions['jax']}: install `jax<0.12`, as "
            "jattn asks for."
        )
    # On a machine without them nothing is amiss: the table tells what serves instead.
    if facts.has_nvidia_gpu and {"triton", "jax-triton"} <= versions.keys() and (sentence := unmet(versions)):
        found.append(sentence)
    plugins = {name: cuda for name, cuda in PLUGINS.items() if name in versions}
    driver = _numbers(facts.driver)[:1]
    if facts.has_nvidia_gpu and not plugins:
        extra = "cuda12" if driver and driver[0] < OLDEST_DRIVER[13] else "cuda13"
        found.append(
            f"This machine has an NVIDIA GPU, but JAX has no CUDA plug-in and will not use it: install the extra "
            f"`jattn[{extra}]`."
        )
    for name, cuda in plugins.items():
        if facts.has_nvidia_gpu and driver and driver[0] < OLDEST_DRIVER[cuda]:
            older = driver[0] >= OLDEST_DRIVER[12]
            advice = "install a newer driver" + (", or the extra `jattn[cuda12]` instead" if older else "")
            found.append(
                f"{name} needs an NVIDIA driver of version {OLDEST_DRIVER[cuda]} or newer: {advice}. "
                f"Got {facts.driver}."
            )
    if facts.jax_error:
        found.append(facts.jax_error)
    elif facts.has_nvidia_gpu and plugins and facts.device and facts.device.platform != "gpu":
        told = f"`JAX_PLATFORMS` is {facts.jax_platforms!r}" if facts.jax_platforms else "`JAX_PLATFORMS` is not set"
        found.append(
            f"JAX does not use the NVIDIA GPU, although {' and '.join(plugins)} is installed: {told}; "
            f"its default device is {facts.device.platform}."
        )
    return found + [f"JAX said while it started: {warning}" for warning in facts.warnings]


def served(device: Device) -> list[Served]:
    """What dispatch chooses for a common layer, for each kind of call and dtype."""
    found = []
    for dtype in DTYPES:
        for call in _examples(dtype, device):
            try:
                choice = choose(call)
            except NotImplementedError as refusal:
                found.append(Served(call.operation, dtype, None, str(refusal)))
            else:
                name = choice.implementation.name
                found.append(Served(call.operation, dtype, name, choice.reason + _if_asked(call, name)))
    return found


def _if_asked(call: Call, chosen: str) -> str:
    """A sentence on those that serve a call only if `implementation` names them."""
    others = [f"`{entry.name}`" for entry in implementations() if entry.name != chosen and entry.refuses(call) is None]
    return f" If asked for: {', '.join(others)}." if others else ""


def _examples(dtype: str, device: Device) -> Iterator[Call]:
    """A call of each kind."""
    for operation in OPERATIONS:
        yield AttentionCall(
            operation=operation,
            spec=MLA_EXAMPLE if operation.startswith("mla") else EXAMPLE,
            q_dtype=dtype,
            kv_dtype=dtype,
            page_size=None if operation == "ragged_extend" else EXAMPLE_PAGE_SIZE,
            features=frozenset({"layer_index"}),
            device=device,
        )
    yield NormCall(
        num_rows=EXAMPLE_TOKENS,
        columns=EXAMPLE_COLUMNS,
        dtype=dtype,
        scale_dtype=dtype,
        eps=1e-6,
        offset=0.0,
        device=device,
    )
    yield ExpertsCall(
        num_tokens=EXAMPLE_TOKENS,
        **EXAMPLE_EXPERTS,
        dtype=dtype,
        kernel_dtype=dtype,
        activation=jnp.multiply,
        device=device,
    )


def by_reason(rows: list[Served]) -> list[tuple[str, str, str]]:
    """The calls that are served alike, in one row: which they are, by what, and why."""
    alike: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        operations = alike.setdefault((row.implementation or "none", row.reason), {})
        operations.setdefault(row.operation, []).append(row.dtype)
    found = []
    for (implementation, reason), operations in alike.items():
        by_dtypes: dict[str, list[str]] = {}
        for operation, dtypes in operations.items():
            by_dtypes.setdefault(", ".join(dtypes), []).append(operation)
        calls = "; ".join(f"{', '.join(names)} of {dtypes}" for dtypes, names in by_dtypes.items())
        found.append((calls, implementation, reason))
    return found


def gather() -> Facts:
    """The facts of this machine."""
    driver = _driver()
    found = Facts(
        versions={name: got for name in PACKAGES if (got := _version(name)) is not None},
        has_nvidia_gpu=driver is not None or any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidia0"))),
        driver=driver,
        jax_platforms=jax.config.jax_platforms or "",
    )
    try:
        devices, warnings = started_devices()
    except NoDeviceError as error:
        return dataclasses.replace(found, jax_error=str(error))
    names = tuple(f"{device.platform} {device.id}: {device.device_kind}" for device in devices)
    device = default_device()
    sums = _sums(len(devices)) if device.compute_capability else None
    return dataclasses.replace(found, device_names=names, device=device, warnings=tuple(warnings), sums=sums)


def _sums(num_gpus: int) -> str | None:
    """How GPUs would add up, as many as an even share of a model takes."""
    if num_gpus < 2:
        return None
    sharing = 2 ** (num_gpus.bit_length() - 1)
    sentence = mailbox.refuses(Parallel("tensor", sharing))
    how = "by kernels, in a step's CUDA graph" if sentence is None else f"through XLA's collectives: {sentence}"
    return f"{sharing} GPUs with `tensor_parallel={sharing}`: {how}"


def show(facts: Facts, console: Console) -> bool:
    """Prints a report: tables in a terminal, lines of fields between tabs elsewhere; returns whether all is well."""
    found = clashes(facts)
    names = ", ".join(facts.device_names) or "none"
    lines = [("devices", names)]
    if facts.device and facts.device.compute_capability:
        lines.append(("compute capability", "{}.{}".format(*facts.device.compute_capability)))
    if facts.sums:
        lines.append(("sums of devices", facts.sums))
    lines.append(("NVIDIA driver", facts.driver or ("unknown" if facts.has_nvidia_gpu else "none")))
    lines += [(name, facts.versions.get(name, "not installed")) for name in PACKAGES]
    _print_rows(console, "", ("", ""), lines)
    if facts.device:
        show_served(facts.device, console)
    for sentence in found:
        console.print(f"clash: {sentence}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if not found:
        console.print("No clash is known for this machine.", style="green", highlight=False)
    return not found


def show_served(device: Device, console: Console) -> None:
    """Prints what serves calls on a kind of device and why, as `show` prints."""
    experts = EXAMPLE_EXPERTS
    caption = (
        f"Attention with {EXAMPLE.num_q_heads} query and {EXAMPLE.num_kv_heads} KV heads of width "
        f"{EXAMPLE.head_dim}, or latent rows of {MLA_EXAMPLE.head_dim}, pages of {EXAMPLE_PAGE_SIZE} tokens; norms of "
        f"{EXAMPLE_COLUMNS:,} columns; mixtures of {experts['num_experts']} experts of {experts['units']} units"
    )
    _print_rows(console, caption, ("calls", "served by", "why"), by_reason(served(device)))


def gpu_of(capability: str) -> Device:
    """An NVIDIA GPU of a compute capability.

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"([1-9][0-9]?)\.([0-9])", capability)
    if match is None:
        raise ValueError(f"`capability` must be an NVIDIA GPU's compute capability, such as 8.9. Got {capability!r}.")
    return Device("gpu", (int(match.group(1)), int(match.group(2))))


def _print_rows(console: Console, caption: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if not console.is_terminal:
        for row in rows:
            console.file.write("\t".join(row) + "\n")
        return
    table = Table(*head, title=caption or None, title_justify="left", show_header=any(head), title_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """What NVIDIA's own tools say; None without them or without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return parse_driver(done.stdout) if done.returncode == 0 else None
    told = Path("/sys/module/nvidia/version")
    return parse_driver(told.read_text()) if told.is_file() else None


def parse_driver(text: str) -> str | None:
    """The first thing in a tool's output that is a driver's version."""
    match = re.search(r"^\s*(\d+\.\d+(?:\.\d+)?)\s*$", text, re.MULTILINE)
    return match.group(1) if match else None


def _numbers(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: those of 0.12.0rc1 are 0, 12, 0."""
    match = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(map(int, match.group().split("."))) if match else ()


def _at_least(text: str | None, *numbers: int) -> bool:
    return _numbers(text)[: len(numbers)] >= numbers


def _above(text: str | None, *numbers: int) -> bool:
    return _numbers(text)[: len(numbers)] > numbers
