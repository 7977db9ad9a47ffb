"""`jattn doctor` names what does not work together, and what serves each call, from facts that a test can make up."""

import io
import logging
import time
import types

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jattn import cli, devices, doctor
from jattn.doctor import Facts, clashes, gpu_of, parse_driver, served, show
from jattn.no_device import NoDeviceError
from jattn_kernels.call import Device

CUDA13 = {"jax": "0.11.2", "jax-cuda13-plugin": "0.11.2"}
CUDA12 = {"jax": "0.11.2", "jax-cuda12-plugin": "0.11.2"}
CPU, HOPPER = Device("cpu"), Device("gpu", (9, 0))


def facts(versions, driver=None, device=CPU, **more):
    return Facts(versions=versions, driver=driver, has_nvidia_gpu=driver is not None, device=device, **more)


@pytest.mark.parametrize(
    "fine",
    [
        facts({"jax": "0.11.2"}),
        facts({"jax": "0.11.2", "jax-triton": "0.4.1"}),
        facts({"jax": "0.12.0", "jax-triton": "0.4.2"}),
        facts({"jax": "0.11.2", "jax-triton": "0.3.0", "triton": "3.3.0"}),
        facts(CUDA13 | {"jax-triton": "0.4.1", "triton": "3.6.0"}, "580.65.06", HOPPER),
        facts(CUDA13 | {"triton": "3.3.0"}, "580.65.06", HOPPER),
        facts(CUDA13, "580.65.06", HOPPER),
        facts(CUDA12, "525.60.13", HOPPER),
        facts(CUDA13),
        Facts(versions=CUDA13, has_nvidia_gpu=True, device=HOPPER),
    ],
)
def test_clashes_finds_nothing_where_all_is_well(fine):
    assert clashes(fine) == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (facts({"jax": "0.12.0.1", "jax-triton": "0.4.1"}), "jax-triton 0.4.1 does not work with JAX 0.12.0.1"),
        (facts({"jax": "0.12.0rc1", "jax-triton": "0.4"}), "jax-triton 0.4 does not work with JAX 0.12.0rc1"),
        (facts({"jax": "1.0", "jax-triton": "0.3.0"}), "jax-triton 0.3.0 does not work with JAX 1.0"),
        (
            facts({"jax": "0.11.2"}, "580.65.06"),
            "no CUDA plug-in and will not use it: install the extra `jattn[cuda13]`",
        ),
        (facts({"jax": "0.11.2"}, "570.10"), "install the extra `jattn[cuda12]`"),
        (Facts(versions={}, has_nvidia_gpu=True, device=CPU), "install the extra `jattn[cuda13]`"),
        (
            facts(CUDA13, "579.99", HOPPER),
            "580 or newer: install a newer driver, or the extra `jattn[cuda12]` instead.",
        ),
        (facts(CUDA13, "520.10", HOPPER), "580 or newer: install a newer driver. Got 520.10."),
        (
            facts(CUDA13 | {"jax-triton": "0.3.1", "triton": "3.6.0"}, "580.1", HOPPER),
            "`triton` needs jax-triton 0.4.1 or newer, not 0.3.1: install",
        ),
        (
            facts(CUDA12 | {"jax-triton": "0.4.1", "triton": "3.5.1"}, "580.1", HOPPER),
            "`triton` needs triton 3.6 or newer, not 3.5.1: install",
        ),
        (facts(CUDA12, "524.9", HOPPER), "jax-cuda12-plugin needs an NVIDIA driver of version 525 or newer"),
        (facts(CUDA13, "580.1", jax_platforms="cpu"), "`JAX_PLATFORMS` is 'cpu'; its default device is cpu."),
        (facts(CUDA13, "580.1"), "although jax-cuda13-plugin is installed: `JAX_PLATFORMS` is not set"),
        (facts(CUDA13, "580.1", None, jax_error="JAX cannot start: no backend."), "JAX cannot start: no backend."),
        (facts(CUDA13, warnings=("jax_plugins.xla_cuda13 failed",)), "started: jax_plugins.xla_cuda13 failed"),
    ],
)
def test_clashes_names_a_clash_in_one_sentence(wrong, sentence):
    (found,) = clashes(wrong)
    assert sentence in found


def test_served_names_an_implementation_and_a_reason_for_every_call():
    rows = served(CPU)
    assert len({(row.operation, row.dtype) for row in rows}) == len(rows) == 27
    assert {row.implementation for row in rows} == {"xla"}
    assert all("`xla`" in row.reason for row in rows)


@pytest.mark.parametrize(
    ("device", "operation", "dtype", "implementation", "said"),
    [
        (HOPPER, "paged_decode", "bfloat16", "mosaic", "`mosaic` is the first choice"),
        (HOPPER, "rms_norm", "bfloat16", "mosaic", "`mosaic` is the first choice"),
        (HOPPER, "mixture_of_experts", "float16", "mosaic", "`mosaic` is the first choice"),
        (HOPPER, "paged_decode", "float32", "triton", "`mosaic` does not take float32"),
        (HOPPER, "mla_extend", "bfloat16", "mosaic", "`mosaic` is the first choice"),
        (HOPPER, "mixture_of_experts", "float32", "triton", "`mosaic` does not take float32 tokens"),
        (Device("gpu", (8, 9)), "mixture_of_experts", "bfloat16", "triton", "this is compute capability 8.9"),
        (Device("gpu", (8, 0)), "rotate_and_write", "bfloat16", "triton", "this is compute capability 8.0"),
        (Device("gpu", (12, 0)), "rms_norm", "float32", "triton", "this is compute capability 12.0"),
        (Device("gpu", (7, 5)), "paged_extend", "bfloat16", "xla", "this is compute capability 7.5"),
    ],
)
def test_served_follows_the_device(device, operation, dtype, implementation, said):
    chosen = {(row.operation, row.dtype): row for row in served(device)}[operation, dtype]
    assert chosen.implementation == implementation
    assert said in chosen.reason


def test_served_bears_a_call_that_nothing_serves(monkeypatch):
    def refuse(call):
        raise NotImplementedError("Nothing serves it.")

    monkeypatch.setattr(doctor, "choose", refuse)
    assert {(row.implementation, row.reason) for row in served(CPU)} == {(None, "Nothing serves it.")}


def shown(found, **options):
    console = Console(file=io.StringIO(), width=200, **options)
    return show(found, console), console.file.getvalue()


def test_show_is_plain_lines_in_a_pipe():
    well, text = shown(facts({"jax": "0.11.2"}, device_names=("cpu 0: cpu",)))
    lines = text.splitlines()
    assert well
    assert text.count("is the first choice") == 1
    assert {"devices\tcpu 0: cpu", "NVIDIA driver\tnone", "jax\t0.11.2", "jax-triton\tnot installed"} <= set(lines)
    calls = ", ".join([*doctor.OPERATIONS, "rms_norm", "mixture_of_experts"])
    assert any(line.startswith(f"{calls} of bfloat16, float16, float32\txla\t") for line in lines)
    assert lines[-1] == "No clash is known for this machine."


def test_show_tells_how_several_gpus_would_add_up(monkeypatch):
    monkeypatch.setattr("jattn.doctor.mailbox.refuses", lambda parallel: "They do not." if parallel.size == 8 else None)
    for count, words in ((1, None), (3, "2 GPUs with `tensor_parallel=2`: by kernels"), (9, "through XLA's")):
        sums = doctor._sums(count)
        assert sums is None if words is None else words in sums
    _, text = shown(facts({}, sums=doctor._sums(8)))
    expected = "8 GPUs with `tensor_parallel=8`: through XLA's collectives: They do not."
    assert f"sums of devices\t{expected}" in text.splitlines()


def test_show_is_tables_in_a_terminal():
    well, text = shown(facts(CUDA13, "580.1", HOPPER), force_terminal=True)
    assert well
    assert "compute capability" in text
    assert "9.0" in text
    assert "served by" in text
    assert "\t" not in text


def test_show_ends_with_the_clashes():
    well, text = shown(facts({"jax": "0.11.2"}, "570.1", None))
    assert not well
    assert text.splitlines()[-1].startswith("clash: This machine has an NVIDIA GPU, but")
    assert "served by" not in text


@pytest.mark.parametrize(
    ("text", "driver"),
    [("580.159.03\n580.159.03\n", "580.159.03"), ("570.10\n", "570.10"), ("No devices were found\n", None), ("", None)],
)
def test_parse_driver_takes_the_first_version(text, driver):
    assert parse_driver(text) == driver


def test_gather_finds_this_machine():
    found = doctor.gather()
    assert found.versions["jax"]
    assert found.device is not None
    assert found.device_names
    assert found.jax_error is None


def test_gather_bears_a_jax_that_cannot_start(monkeypatch):
    monkeypatch.setattr(devices.jax, "devices", raising(RuntimeError("Unable to initialize\n backend 'cuda'")))
    found = doctor.gather()
    assert found.jax_error == "JAX cannot start: Unable to initialize backend 'cuda'."
    assert found.device is None


def raising(error):
    def raise_it():
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("error", "reason"),
    [(AssertionError(), "no such device was found"), (RuntimeError("Unable to start."), "Unable to start")],
)
def test_jax_that_cannot_start_is_a_sentence(monkeypatch, error, reason):
    monkeypatch.setattr(devices.jax, "devices", raising(error))
    monkeypatch.setattr(devices.jax, "config", types.SimpleNamespace(jax_platforms="cuda"))
    with pytest.raises(NoDeviceError, match=f"^JAX cannot start with `JAX_PLATFORMS`='cuda': {reason}.$"):
        devices.started_devices()


def test_what_jax_says_while_it_starts_is_told_in_lines_of_its_own(monkeypatch, caplog):
    logger = logging.getLogger("jax._src.xla_bridge")

    def start():
        try:
            raise RuntimeError("no driver")
        except RuntimeError:
            logger.exception("Exception when calling initialize()")
        return []

    monkeypatch.setattr(devices.jax, "devices", start)
    assert devices.started_devices() == ([], ["Exception when calling initialize(): no driver"])
    assert not caplog.records
    logger.warning("Afterwards JAX is heard as before.")
    assert len(caplog.records) == 1


def test_devices_that_start_early_are_waited_for_and_tell_what_went_wrong_once(monkeypatch):
    logger = logging.getLogger("jax._src.xla_bridge")

    def take(_):
        time.sleep(0.2)
        logger.warning("A plug-in failed.")
        raise RuntimeError("No memory.")

    monkeypatch.setattr(devices.jax, "device_put", take)
    monkeypatch.setattr(devices.jax, "devices", lambda: logger.warning("A plug-in failed.") or ["a device"])
    devices.start_early()
    assert devices.started_devices() == (["a device"], ["A plug-in failed."])
    monkeypatch.setattr(devices.jax, "devices", lambda: ["a device"])
    assert devices.started_devices() == (["a device"], [])


@pytest.mark.parametrize(
    ("program", "driver"), [("echo 580.159.03", "580.159.03"), ("exit 9", None), ("echo ''", None)]
)
def test_gather_asks_nvidia_smi(monkeypatch, tmp_path, program, driver):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{program}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = doctor.gather()
    assert found.driver == driver
    if driver:
        assert found.has_nvidia_gpu


@pytest.mark.parametrize(("versions", "code"), [({"jax": "0.11.2"}, 0), ({"jax": "0.12.0", "jax-triton": "0.4.1"}, 1)])
def test_doctor_command_exits_by_the_clashes(monkeypatch, versions, code):
    monkeypatch.setattr(doctor, "gather", lambda: facts(versions))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == code
    assert ("clash: jax-triton" in result.stdout) == bool(code)


@pytest.mark.parametrize(("capability", "implementation"), [("8.9", "triton"), ("7.5", "xla")])
def test_doctor_command_tells_what_serves_another_gpu(monkeypatch, capability, implementation):
    monkeypatch.setattr(doctor, "gather", raising(AssertionError("It asks this machine.")))
    result = CliRunner().invoke(cli.app, ["doctor", "--capability", capability])
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("paged_decode")]
    _, served_by, reason = line.split("\t")
    assert served_by == implementation
    assert f"this is compute capability {capability}." in reason
    assert "NVIDIA driver" not in result.stdout


@pytest.mark.parametrize("capability", ["89", "", "8", "sm_89", "8.9.0", "8.9\n", "-8.9", "0.0", "8,9", "٨.٩"])
def test_doctor_command_refuses_what_is_no_compute_capability(capability):
    result = CliRunner().invoke(cli.app, ["doctor", f"--capability={capability}"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: `capability` must be an NVIDIA GPU's compute capability, such as 8.9. Got ")
    assert not result.stdout


def test_gpu_of_takes_the_newest():
    assert gpu_of("12.0") == Device("gpu", (12, 0))
