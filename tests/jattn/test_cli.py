"""The command line hands on what it was told, prints text in order, and answers bad input with one sentence."""

import logging
import os
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jattn import cli
from jattn.cli import inputs, output
from jattn.progress import shown
from jattn.serving.config import EngineConfig
from jattn.serving.request import DraftCounts, SamplingParams
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import NgramDrafting
from tests.jattn.harness.fake_llm import Delta, Stats, generate, run


def test_version_is_the_packages():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"jattn {version('jattn')}\n"


@pytest.mark.parametrize("given", [None, "0.5"])
def test_command_takes_most_of_a_gpu_unless_it_is_told(monkeypatch, given):
    monkeypatch.setattr(os, "environ", {} if given is None else {"XLA_PYTHON_CLIENT_MEM_FRACTION": given})
    cli.main()
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == (given or "0.9")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["serve", "--help"]])
def test_help_imports_no_jax(arguments):
    program = (
        "import sys; from jattn.cli import app\n"
        f"try: app({arguments!r})\n"
        "finally: assert not {'jax', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert result.returncode == 0, result.stderr
    assert "--" in result.stdout


def test_generate_hands_on_the_defaults(llm):
    assert generate("--prompt", "x").exit_code == 0
    assert llm.path == Path("folder")
    assert llm.prompts == ["x"]
    assert EngineConfig(**llm.options) == EngineConfig(full_sampling=False, greedy_steps=False)
    assert llm.sampling_params == SamplingParams(temperature=0.8)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--speculative ngram", NgramDrafting(num_draft_tokens=4)),
        ("--speculative ngram --num-draft-tokens 7", NgramDrafting(num_draft_tokens=7)),
        ("--speculative draft-model --draft-layers 2", DraftModel(num_layers=2, num_draft_tokens=4)),
        ("--speculative draft-model --draft-model small", DraftModel(checkpoint=Path("small"), num_draft_tokens=4)),
    ],
)
def test_speculative_flags_make_the_drafter(llm, flags, expected):
    assert generate("--prompt", "x", *flags.split()).exit_code == 0
    assert llm.options["speculative"] == expected


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--draft-layers 2", "`--draft-model` and `--draft-layers` need `--speculative draft-model`."),
        ("--speculative ngram --draft-model x", "`--draft-layers` need `--speculative draft-model`."),
        ("--speculative draft-model", "needs `--draft-model`, `--draft-layers` or both."),
        ("--num-draft-tokens 4", "`--num-draft-tokens` needs `--speculative`."),
        ("--speculative ngram --num-draft-tokens 0", "`num_draft_tokens` must be a whole number of at least 1. Got 0."),
    ],
)
def test_speculative_flags_that_do_not_go_together_are_refused(llm, flags, sentence):
    result = generate("--prompt", "x", *flags.split())
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_summary_tells_what_drafting_gave(llm):
    llm.stats = Stats(drafts=DraftCounts(steps=1000, tokens=2340, drafted=4000, accepted=1340))
    lines = [" ".join(line.split()) for line in generate("--prompt", "x").stderr.splitlines()]
    assert "tokens a step 2.34" in lines
    assert "drafted tokens accepted 1,340 of 4,000" in lines
    llm.stats = Stats()
    assert "tokens a step" not in generate("--prompt", "x").stderr


def test_generate_hands_on_every_flag(llm):
    flags = "--max-tokens 5 --temperature 0.1 --top-k 3 --top-p 0.5 --seed 9 --ignore-eos --dtype bfloat16"
    flags += " --n 3 --min-tokens 2 --min-p 0.25 --repetition-penalty 1.5 --stop a --stop bc"
    flags += " --presence-penalty -0.5 --frequency-penalty 0.75 --kv-cache-dtype fp8_e5m2"
    flags += ' --quantization fp8 --rope-scaling {"type":"linear","factor":2}'
    sizes = "--page-size 8 --num-pages 20 --max-num-seqs 2 --max-context-len 64 --prefill-tokens 32"
    sizes += " --max-chunk-tokens 16 --no-mixed-steps --backend flashinfer --implementation xla --debug-checks"
    sizes += " --tensor-parallel 2 --expert-parallel"
    assert generate("--prompt", "x", *flags.split(), *sizes.split()).exit_code == 0
    assert EngineConfig(**llm.options) == EngineConfig(
        dtype="bfloat16",
        kv_cache_dtype="fp8_e5m2",
        quantization="fp8",
        rope_scaling={"factor": 2, "type": "linear"},
        page_size=8,
        num_pages=20,
        max_num_seqs=2,
        max_context_len=64,
        prefill_tokens=32,
        max_chunk_tokens=16,
        tensor_parallel=2,
        expert_parallel=True,
        mixed_steps=False,
        backend="flashinfer",
        implementation="xla",
        greedy_steps=False,
        debug_checks=True,
    )
    assert llm.sampling_params == SamplingParams(
        n=3,
        max_tokens=5,
        min_tokens=2,
        temperature=0.1,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        stop=("a", "bc"),
        seed=9,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20}, "", {"temperature": 0.7, "top_p": 0.9, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.7, "top_p": None}, "", {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 20}, "", {"temperature": 0.8}),
        ({"temperature": 0.7, "top_p": 0.9}, "--temperature 0", {"temperature": 0.0, "top_p": 0.9}),
        ({"top_p": 0.9, "top_k": 20}, "--top-p 1 --top-k 0", {"temperature": 0.8}),
        (
            {"repetition_penalty": 1.1, "min_p": 0.1},
            "--min-p 0.2",
            {"temperature": 0.8, "min_p": 0.2, "repetition_penalty": 1.1},
        ),
    ],
)
def test_generate_samples_as_the_checkpoint_says_unless_a_flag_is_given(llm, config, flags, expected):
    llm.generation_config = config
    assert generate("--prompt", "x", *flags.split()).exit_code == 0
    assert llm.sampling_params == SamplingParams(**expected)


@pytest.mark.parametrize("value", ["hot", True, [1]])
def test_generate_names_the_checkpoints_bad_sampling_value(llm, value):
    llm.generation_config = {"temperature": value}
    result = generate("--prompt", "x")
    assert result.exit_code == 2
    assert "generation_config.json must give a number as `temperature`. Got " in result.stderr
    assert not hasattr(llm, "path")


def test_generate_takes_prompts_then_those_of_the_file(llm, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("third \n\n  \n    vierté\n", encoding="utf-8")
    assert generate("--prompt-file", file, "--prompt", "first", "--prompt", "second\nline").exit_code == 0
    assert llm.prompts == ["first", "second\nline", "third ", "    vierté"]


def test_generate_takes_no_mark_of_an_encoding_for_a_prompt(llm, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("import os\r\nimport sys\r\n", encoding="utf-8-sig", newline="")
    assert generate("--prompt-file", file).exit_code == 0
    assert llm.prompts == ["import os", "import sys"]


def test_generate_without_prompt_uses_the_default_ones(llm):
    assert generate().exit_code == 0
    assert llm.prompts == list(inputs.DEFAULT_PROMPTS)


def test_generate_without_model_uses_the_announced_checkpoint(llm, monkeypatch):
    announced = types.SimpleNamespace(load=lambda: lambda: Path("bundled"))
    monkeypatch.setattr(inputs, "entry_points", lambda **named: [announced] * (named["name"] == "default"))
    assert run("generate").exit_code == 0
    assert llm.path == Path("bundled")


def test_generate_without_model_or_checkpoint_is_an_error(llm, monkeypatch):
    monkeypatch.setattr(inputs, "entry_points", lambda **_: [])
    result = run("generate")
    assert result.exit_code == 2
    assert result.stderr == "error: `--model` must be given: no installed package brings a default checkpoint.\n"


@pytest.mark.parametrize("last", [" two", " two\n", " \x1b[31m🙂\n"])
def test_generate_prints_a_single_text_raw(llm, last):
    llm.deltas = [Delta(0, "one"), Delta(0, ""), Delta(0, last), Delta(0, "", "length")]
    assert generate("--prompt", "x").stdout == "one" + last.removesuffix("\n") + "\n"


@pytest.mark.parametrize(
    "order",
    [
        [(0, "a"), (0, "b", "stop"), (1, "c"), (1, "d", "stop"), (2, "e\n"), (2, "", "stop")],
        [(2, "e\n"), (1, "c"), (2, "", "stop"), (1, "d", "stop"), (0, "a"), (0, "b", "stop")],
        [(1, "c"), (0, "a"), (2, "e\n"), (0, "b", "stop"), (2, "", "stop"), (1, "d", "stop")],
    ],
)
def test_generate_prints_several_texts_in_the_order_of_the_prompts(llm, order):
    llm.deltas = [Delta(*delta) for delta in order]
    assert generate("--prompt", "X:", "--prompt", "Y:", "--prompt", "Z:").stdout == (
        "==> 1 of 3 <==\nX:ab\n\n==> 2 of 3 <==\nY:cd\n\n==> 3 of 3 <==\nZ:e\n"
    )


def test_generate_prints_all_texts_of_a_prompt(llm):
    llm.deltas = [
        Delta(1, "d", "stop", output_index=1),
        Delta(0, "b", "stop", output_index=1),
        Delta(0, "a", "stop"),
        Delta(1, "c", "stop"),
    ]
    assert generate("--prompt", "X:", "--prompt", "Y:", "--n", 2).stdout == (
        "==> 1 of 4 <==\nX:a\n\n==> 2 of 4 <==\nX:b\n\n==> 3 of 4 <==\nY:c\n\n==> 4 of 4 <==\nY:d\n"
    )


def test_generate_prints_the_first_unfinished_text_live(llm, capsys):
    prompts = ["X:", "Y:"]
    shown = []

    def deltas():
        for delta in [Delta(1, "c"), Delta(0, "a"), Delta(0, "b", "stop"), Delta(1, "d"), Delta(1, "", "stop")]:
            yield delta
            shown.append(capsys.readouterr().out)

    output.print_text(deltas(), prompts)
    assert shown == ["==> 1 of 2 <==\nX:", "a", "b\n\n==> 2 of 2 <==\nY:c", "d", "\n"]


def test_generate_keeps_control_characters_from_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.print_text([Delta(0, "a\x1b[2J\x9b\r\tb\n", "stop")], ["x"])
    assert capsys.readouterr().out == "a\ufffd[2J\ufffd\ufffd\tb\n"


def test_generate_replaces_what_the_output_cannot_encode(llm):
    llm.deltas = [Delta(0, "né🙂", "stop")]
    result = CliRunner(charset="ascii").invoke(cli.app, ["generate", "--model", "folder", "--prompt", "x"])
    assert result.exit_code == 0
    assert result.stdout == "n??\n"


def test_generate_prints_the_summary_to_stderr(llm):
    result = generate("--prompt", "x")
    lines = [line.split() for line in result.stderr.splitlines() if line]
    assert lines == [
        ["requests", "3"],
        ["prompt", "tokens", "1,234"],
        ["generated", "tokens", "60"],
        ["tokens/s", "15.0"],
        ["time", "to", "first", "token", "0.250", "s"],
        ["pages", "used", "at", "peak", "7", "of", "99"],
    ]


def test_generate_tells_of_prompts_that_ended_by_an_error(llm):
    sentence = "The model's logits after 3 tokens are NaN or infinite."
    llm.deltas = [Delta(1, "two", "stop"), Delta(0, "one"), Delta(0, "", "error", (), sentence)]
    result = generate("--prompt", "x", "--prompt", "y")
    assert result.exit_code == 1
    assert result.stdout == "==> 1 of 2 <==\nxone\n\n==> 2 of 2 <==\nytwo\n"
    assert result.stderr.endswith(f"error: Prompt 1 of 2: {sentence}\n")


def test_generate_summary_bears_a_run_without_time(llm):
    llm.stats = Stats(generated_tokens=0, seconds=0.0)
    result = generate("--prompt", "x")
    assert result.exit_code == 0
    assert "tokens/s" in result.stderr


def test_generate_reads_prompts_from_standard_input(llm):
    arguments = ["generate", "--model", "folder", "--prompt-file", "-"]
    assert CliRunner().invoke(cli.app, arguments, input="first\n\nsecond\n").exit_code == 0
    assert llm.prompts == ["first", "second"]


def test_generate_logs_what_goes_on_off_a_terminal(llm):
    class Loading(llm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            with shown("Loading weights", 3, wanted=True):
                pass

    sys.modules["jattn.serving.frontend.llm"].LLM = Loading
    lines = generate("--prompt", "x").stderr.splitlines()
    assert lines[0] == "Loading weights: 3"
    assert lines[1].startswith("Loading weights took ")
    assert not logging.getLogger("jattn").handlers


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["serve", "--help"]])
def test_help_shows_no_value_for_a_flag_that_takes_none(arguments):
    result = run(*arguments)
    assert "--" in result.stdout
    assert "<bool>" not in result.stdout


@pytest.mark.parametrize("columns", ["80", "60"])
@pytest.mark.parametrize("command", [["generate"], ["serve"], ["compile"], ["bench", "serve"]])
def test_help_cuts_no_flags_name_off(monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", columns)
    page = run(*command, "--help").stdout
    assert "--[no-]enable-prefix-caching " in page
    assert "…" not in page


def test_help_leaves_the_command_as_it_is(llm):
    run("generate", "--help")
    assert generate("--prompt", "x", "--no-mixed-steps").exit_code == 0
    assert llm.options["mixed_steps"] is False


def test_module_runs_the_command():
    result = subprocess.run([sys.executable, "-m", "jattn", "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"jattn {version('jattn')}\n")
