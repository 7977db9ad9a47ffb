"""The record knows the device code that it is of, keeps what it measured, and is refused off an H200."""

import itertools
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench import gpu_record, step_record
from bench.attention import Measured
from bench.gpu_record import OF_OTHERS, PARTS, Recorder, check, main
from bench.record_files import ROOT, read_rows
from bench.record_key import RecordKey, sources_sha
from bench.triton_record import triton_sha


@pytest.fixture
def code(tmp_path):
    """A root with device code."""
    package = tmp_path / "kernels" / "jattn_kernels"
    package.mkdir(parents=True)
    (package / "call.py").write_text("call")
    return tmp_path


@pytest.fixture
def record(tmp_path, code):
    """A complete one of that code."""
    folder = tmp_path / "record"
    for part in PARTS:
        Recorder(folder, {"kernels_sha": "abc", "triton_sha": triton_sha(code)}).write(part, [{"case": part}])
    RecordKey(kernels_sha="abc", sources_sha=sources_sha(code), jax="0", cases={"case": "1"}).write(folder)
    return folder


def test_check_passes_until_the_code_changes(code, record):
    assert check(record, code) is None
    (code / "kernels" / "jattn_kernels" / "call.py").write_text("changed")
    assert "only JAX 0 can tell" in check(record, code)


def test_check_needs_the_key(code, record):
    (record / "lowered.json").unlink()
    assert "has no lowered.json" in check(record, code)


@pytest.mark.parametrize("part", sorted({*PARTS} - {*OF_OTHERS}))
def test_check_names_a_part_that_is_missing(code, record, part):
    (record / f"{part}.jsonl").unlink()
    assert f"has no {part}.jsonl" in check(record, code)


@pytest.mark.parametrize("part", OF_OTHERS)
def test_check_leaves_out_what_is_not_of_the_code(code, record, part):
    (record / f"{part}.jsonl").unlink()
    assert check(record, code) is None


def test_check_of_tritons_rows_asks_for_their_code(code, record):
    file = code / "kernels" / "jattn_kernels" / "triton" / "fp8.py"
    file.parent.mkdir()
    file.write_text('"""Words."""\nx = 1  # one\n')
    assert "Triton's attention has changed since triton.jsonl" in check(record, code)
    before = triton_sha(code)
    file.write_text('"""Other words."""\n\nx = 1\n')
    assert triton_sha(code) == before
    file.write_text('"""Words."""\nx = 2  # one\n')
    assert triton_sha(code) != before


def test_check_reads_every_row(code, record):
    with (record / "decode.jsonl").open("a") as file:
        file.write(json.dumps({"kernels_sha": "0" * 64}) + "\n")
    assert "The rows of decode.jsonl are of other device code" in check(record, code)


def test_check_runs_as_a_file_on_the_standard_library_alone(code, record):
    (code / "bench" / "results").mkdir(parents=True)
    for name in ("__init__", "gpu_record", "parallel_record", "record_files", "record_key", "triton_record"):
        shutil.copy(ROOT / "bench" / f"{name}.py", code / "bench")
    record.rename(code / "bench" / "results" / "h200")
    command = [sys.executable, "-S", "-E", "bench/gpu_record.py", "--check"]
    done = subprocess.run(command, cwd=code, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == "The H200 record is of the device code as it is.\n"


@pytest.mark.parametrize("arguments", [[], ["--only", "decode"]])
def test_record_is_refused_off_an_h200(arguments, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "The record is of an NVIDIA H200, and JAX's default device here is 'cpu'.\n"
    assert not (tmp_path / "out").exists()


def test_quick_look_does_not_replace_the_record(capsys):
    with pytest.raises(SystemExit):
        main(["--quick"])
    assert "give `--out` another folder" in capsys.readouterr().err


def measured(**row):
    return SimpleNamespace(row={"impl": "jattn-xla", **row}, kernels=[{"kernel": "attend"}])


def refuse():
    raise NotImplementedError("`xla` does not do that.")


def fail():
    raise RuntimeError("ours")


def test_recorder_writes_rows_with_what_they_share(tmp_path, capsys):
    recorder = Recorder(tmp_path, {"device": "some"})
    recorder.measure("decode", [("one", lambda: measured(time_us=1)), ("two", refuse), ("three", lambda: measured())])
    rows = read_rows(tmp_path / "decode.jsonl")
    assert rows == [
        {"impl": "jattn-xla", "time_us": 1, "device": "some"},
        {"impl": "jattn-xla", "device": "some"},
    ]
    assert len(read_rows(tmp_path / "decode-kernels.jsonl")) == 2
    assert recorder.failures == []
    assert "two: left out. `xla` does not do that." in capsys.readouterr().out


def test_recorder_goes_on_after_a_failure_and_leaves_the_part_incomplete(tmp_path, capsys):
    recorder = Recorder(tmp_path, {})
    recorder.measure("decode", [("one", fail), ("two", lambda: measured())])
    assert recorder.failures == ["one"]
    assert not (tmp_path / "decode.jsonl").exists()
    assert len(read_rows(tmp_path / "decode.jsonl.part")) == 1
    recorder.measure("prefill", [("three", lambda: measured())])
    assert (tmp_path / "prefill.jsonl").exists()
    assert "RuntimeError: ours" in capsys.readouterr().err


def test_attention_record_runs_every_workload_once_for_the_first_implementation(tmp_path, monkeypatch):
    from bench import attention, named_workloads

    done = []

    def measured_once_compiled(workload, name, *, executables, **options):
        assert executables == (workload, name)
        done.append((workload, name))
        return measured()

    monkeypatch.setattr(attention, "compiled", lambda workload, name: (workload, name))
    monkeypatch.setattr(attention, "measured", measured_once_compiled)
    gpu_record.record_attention(Recorder(tmp_path, {}), "decode", quick=False, implementations=("mosaic", "xla"))
    assert [w for w, name in done if name == "mosaic"] == list(named_workloads.DECODE)
    assert {w.name for w, name in done if name == "xla"} < {w.name for w in named_workloads.DECODE}
    assert len(read_rows(tmp_path / "decode.jsonl")) == len(done)


@pytest.mark.parametrize(
    ("part", "families", "batches"),
    [
        ("decode_step", ["LlamaForCausalLM"], [1, 8, 64, 256]),
        ("decode_step_moe", ["Qwen3MoeForCausalLM"], [1, 8, 64, 256]),
        ("decode_step_latent", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"], [1, 8, 64]),
    ],
)
def test_steps_are_of_the_part_s_models(part, families, batches, tmp_path, monkeypatch):
    from bench import decode_step
    from bench.step_workload import LLAMA_3_8B
    from jattn_models.llama import LlamaForCausalLM

    monkeypatch.setattr(decode_step, "random_model", lambda shapes=LLAMA_3_8B, family=LlamaForCausalLM: family.__name__)
    monkeypatch.setattr(decode_step, "measured", lambda model, w: measured(model=w.model, family=model, batch=w.batch))
    step_record.record_steps(Recorder(tmp_path, {}), part, quick=False)
    rows = read_rows(tmp_path / f"{part}.jsonl")
    assert [(row["family"], row["batch"]) for row in rows] == list(itertools.product(families, batches))
    for row in rows:
        begin = row["family"].split("Moe")[0].split("For")[0].lower()
        assert row["model"].lower().replace("-", "").startswith(begin)


def test_mixtures_and_torch_s_are_of_the_same_table(tmp_path, monkeypatch):
    from bench import moe_layer, moe_layer_torch, named_workloads

    monkeypatch.setattr(moe_layer, "measured", lambda w, implementation, held: measured(of=w.name, by=implementation))
    monkeypatch.setattr(moe_layer_torch, "compiled", lambda w, name: (w, name))
    monkeypatch.setattr(
        moe_layer_torch, "measured", lambda w, held, *, executable, **options: measured(of=executable[0].name)
    )
    gpu_record.record_mixtures(Recorder(tmp_path, {}), "mosaic", quick=False)
    gpu_record.record_torch_mixtures(Recorder(tmp_path, {}), "mosaic")
    names = [workload.name for workload in named_workloads.MIXTURES]
    assert [(row["of"], row["by"]) for row in read_rows(tmp_path / "moe_layer.jsonl")] == [(n, "mosaic") for n in names]
    assert [row["of"] for row in read_rows(tmp_path / "moe_layer_torch.jsonl")] == names


def test_accuracy_is_recorded_without_kernels(tmp_path, monkeypatch):
    from bench import accuracy, named_workloads, record_key

    key = record_key.RecordKey(kernels_sha="abc", sources_sha="0", jax="0", cases={})
    monkeypatch.setattr(record_key, "current_key", lambda record, root: key)
    monkeypatch.setattr(gpu_record, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(accuracy, "measured", lambda workload, name: Measured({"of": workload.name, "impl": name}, []))
    (tmp_path / "accuracy-kernels.jsonl").write_text("{}\n")
    assert main(["--only", "accuracy", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "accuracy.jsonl")
    assert [row["of"] for row in rows] == [workload.name for workload in named_workloads.ACCURACY]
    assert {(row["impl"], row["kernels_sha"]) for row in rows} == {("mosaic", "abc")}
    assert record_key.RecordKey.read(tmp_path) == key
    assert not (tmp_path / "accuracy-kernels.jsonl").exists()


def test_record_tests_runs_the_files_that_hold_gpu_tests_and_takes_up_what_a_run_left(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(
        """
import pathlib, pytest
count = pathlib.Path(__file__).with_name("count")
def test_other(): assert False
@pytest.mark.gpu
def test_passes(): count.write_text(count.read_text() + "p")
@pytest.mark.gpu
def test_skips(): pytest.skip("refused")
@pytest.mark.gpu
def test_works_the_second_time():
    count.write_text(count.read_text() + "w")
    assert len(count.read_text()) > 2
"""
    )
    (tmp_path / "tests" / "test_two.py").write_text("import missing_on_a_gpu_machine")
    (tmp_path / "tests" / "count").write_text("")
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the others take seconds to import
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    recorder = Recorder(tmp_path / "out", {"kernels_sha": "abc"})
    gpu_record.record_tests(recorder, processes=1)
    assert recorder.failures == ["tests"]
    assert recorder.unfinished("tests").exists()
    outcomes = {row["name"].split("::")[1]: row["outcome"] for row in read_rows(tmp_path / "out" / "tests.jsonl.part")}
    assert outcomes == {"test_passes": "passed", "test_skips": "skipped", "test_works_the_second_time": "failed"}

    recorder = Recorder(tmp_path / "out", {"kernels_sha": "abc"})
    gpu_record.record_tests(recorder, processes=1)
    assert recorder.failures == []
    assert not recorder.unfinished("tests").exists()
    assert (tmp_path / "tests" / "count").read_text() == "pww"
    rows = read_rows(tmp_path / "out" / "tests.jsonl")
    assert [(row["name"].split("::")[1], row["outcome"], row.get("why")) for row in rows] == [
        ("test_passes", "passed", None),
        ("test_skips", "skipped", "Skipped: refused"),
        ("test_works_the_second_time", "passed", None),
    ]
    assert {row["kernels_sha"] for row in rows} == {"abc"}
    assert not recorder.unfinished("tests").exists()
