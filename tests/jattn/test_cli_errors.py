"""What the command line cannot do it says in one sentence, and exits with 2; our own bugs keep their tracebacks."""

import subprocess
import sys
from pathlib import Path

import pytest

import jattn.checkpoint
from jattn.cli import inputs
from jattn.no_device import NoDeviceError
from tests.jattn.harness.fake_llm import generate, run

CHECK_FOLDER = jattn.checkpoint.check_folder


@pytest.mark.parametrize("where", ["init_error", "stream_error"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("The prompt is\n  too long."),
        FileNotFoundError("The prompt is too long."),
        NotImplementedError("The prompt is too long."),
        PermissionError("The prompt is too long."),
    ],
)
def test_generate_bad_input_is_one_sentence(llm, where, error):
    setattr(llm, where, error)
    result = generate("--prompt", "x")
    assert result.exit_code == 2
    assert result.stderr == "error: The prompt is too long.\n"


def test_generate_error_without_a_message_is_named(llm):
    llm.init_error = NotImplementedError()
    assert generate().stderr == "error: NotImplementedError\n"


def test_generate_bug_keeps_its_traceback(llm):
    llm.init_error = TypeError("ours")
    assert generate().exception is llm.init_error


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (">/dev/full", "error: Standard output cannot be written: No space left on device.\n"),
        (">&-", "error: Standard output must be open.\n"),
    ],
)
def test_output_that_takes_no_text_is_one_sentence(output, sentence):
    program = (
        "import sys, typer; from jattn.cli import output, sentences\n"
        "try:\n"
        "    with sentences.sentences_for_errors(): output.check_output(); output._write('text')\n"
        "except typer.Exit as exit: sys.exit(exit.exit_code)"
    )
    shell = ["sh", "-c", f'exec "$0" -c "$1" {output}', sys.executable, program]
    result = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, sentence)


@pytest.mark.parametrize("flag", ["--model", "--prompt-file"])
def test_generate_empty_path_is_bad_usage(llm, flag):
    result = generate("--prompt", "x", flag, "")
    assert result.exit_code == 2
    assert f"'{flag}': must not be empty" in result.stderr
    assert not hasattr(llm, "path")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe", "`--prompt-file` must be UTF-8 text"),
        (b" \n\n", "`--prompt-file` must hold at least one prompt"),
        (None, "`--prompt-file` must be a file, or - for standard input"),
    ],
)
def test_generate_bad_prompt_file_is_named(llm, tmp_path, content, sentence):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    result = generate("--prompt-file", file)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert "prompts.txt" in result.stderr
    assert not hasattr(llm, "path")


def test_generate_prompt_file_that_cannot_be_read_is_named(llm, tmp_path):
    result = generate("--prompt-file", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: `--prompt-file` must be a file that can be read: Is a directory. Got {tmp_path}.\n"
    )


def test_generate_prompts_from_a_closed_standard_input_are_refused(llm, monkeypatch):
    monkeypatch.setattr(inputs.sys, "stdin", None)
    with pytest.raises(ValueError, match=r"^Standard input must be open, for `--prompt-file -`\.$"):
        inputs.read_prompts(Path("-"))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--temperature -1", "temperature"),
        ("--temperature nan", "temperature"),
        ("--max-tokens 0", "max_tokens"),
        ("--top-k -2", "top_k"),
        ("--top-p 1.5", "top_p"),
        ("--seed -2", "seed"),
        ("--n 0", "n"),
        ("--min-p 1.5", "min_p"),
        ("--min-tokens 500", "min_tokens"),
        ("--repetition-penalty 0", "repetition_penalty"),
        ("--presence-penalty 3", "presence_penalty"),
        ("--frequency-penalty -3", "frequency_penalty"),
    ],
)
def test_generate_bad_sampling_flag_is_refused_before_the_model_loads(llm, flags, name):
    result = generate("--prompt", "x", *flags.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: `{name}` must be ")
    assert not hasattr(llm, "path")


@pytest.mark.parametrize("arguments", [["--dtype", "int8"], ["--max-tokens", "many"], ["--nonsense"]])
def test_generate_bad_usage_exits_2(llm, arguments):
    assert generate(*arguments).exit_code == 2


@pytest.mark.parametrize("flag", ["--model", "--draft-model"])
def test_generate_tells_how_to_get_a_model_that_is_a_name(llm, monkeypatch, flag):
    monkeypatch.setattr(jattn.checkpoint, "check_folder", CHECK_FOLDER)
    draft = ["--model", Path(__file__).parent, "--speculative", "draft-model"] if flag == "--draft-model" else []
    result = run("generate", *draft, flag, "someone/some-model")
    assert result.exit_code == 2
    assert f"error: `{flag}` must be a checkpoint folder" in result.stderr
    assert "`hf download someone/some-model --local-dir some-model`" in result.stderr
    assert not hasattr(llm, "path")


def test_generate_on_a_machine_without_a_device_is_one_sentence(llm):
    llm.init_error = NoDeviceError("JAX cannot start.")
    assert generate("--prompt", "x").stderr == "error: JAX cannot start.\n"
