"""`jattn serve` hands on what it was told; nothing is loaded, and nothing listens."""

import types
from pathlib import Path

import pytest

from jattn.cli import serve_command
from jattn.server import run as run_module
from jattn.server.run import Lifetime
from jattn.serving.config import EngineConfig
from tests.jattn.harness.fake_llm import run


@pytest.fixture
def served(llm, monkeypatch):
    """The arguments of `run`."""
    given = {"ended_well": True}

    def record(llm, options, listening, lifetime, on_ready):
        listening.close()
        on_ready()
        given.update(llm=llm, options=options, lifetime=lifetime)
        return given["ended_well"]

    monkeypatch.setattr(run_module, "run", record)
    return given


def serve(*arguments):
    return run("serve", "--port", 0, *arguments)


def test_serve_hands_on_the_defaults(llm, served):
    result = serve("folder")
    assert result.exit_code == 0, result.stderr
    assert EngineConfig(**llm.options) == EngineConfig(compile_in_background=True)  # sizes of a CPU
    options = served["options"]
    assert (llm.path, options.model_names, options.api_keys) == (Path("folder"), ("folder",), ())
    assert (options.max_queued, options.max_body_bytes) == (4096, 32 * 2**20)
    assert served["lifetime"] == Lifetime(drain_seconds=30.0, watchdog_seconds=300.0)
    assert result.stderr.splitlines()[-1].startswith("Serving folder at http://127.0.0.1:")


def test_serve_has_larger_sizes_on_a_gpu(llm, served, monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr("jattn.devices.started_devices", lambda: ([gpu], []))
    assert serve("folder").exit_code == 0
    assert EngineConfig(**llm.options) == EngineConfig(
        max_num_seqs=256, prefill_tokens=2048, compile_in_background=True
    )
    assert serve("folder", "--max-num-seqs", 7).exit_code == 0
    assert EngineConfig(**llm.options) == EngineConfig(max_num_seqs=7, prefill_tokens=2048, compile_in_background=True)


def test_serve_hands_on_every_flag(llm, served, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    flags = "--api-key one --api-key two --served-model-name a --served-model-name b --max-queued 3 --max-body-mib 0.5"
    flags += " --drain-seconds 2 --watchdog-seconds 9 --max-num-seqs 2 --prefill-tokens 32 --no-enable-prefix-caching"
    flags += " --no-compile-in-background"
    assert serve("folder", "--chat-template", template, *flags.split()).exit_code == 0
    options = served["options"]
    assert (options.model_names, options.api_keys) == (("a", "b"), ("one", "two"))
    assert (options.max_queued, options.max_body_bytes, options.chat_template) == (3, 2**19, "{{ messages }}")
    assert served["lifetime"] == Lifetime(drain_seconds=2.0, watchdog_seconds=9.0)
    assert EngineConfig(**llm.options) == EngineConfig(
        max_num_seqs=2, prefill_tokens=32, enable_prefix_caching=False, compile_in_background=False
    )


def test_serve_takes_a_template_as_it_stands(llm, served):
    assert serve("folder", "--chat-template", "{{ messages }}\n").exit_code == 0
    assert served["options"].chat_template == "{{ messages }}\n"


def test_serve_takes_the_key_from_the_environment(llm, served, monkeypatch):
    monkeypatch.setenv("JATTN_API_KEY", "secret")
    assert serve("folder").exit_code == 0
    assert served["options"].api_keys == ("secret",)


@pytest.mark.parametrize("listens", [True, False])
def test_serve_tells_before_it_loads_that_the_port_is_taken(llm, served, listens):
    taken = run_module.bound_socket("127.0.0.1", 0)
    if listens:
        taken.listen()
    port = taken.getsockname()[1]
    result = run("serve", "folder", "--port", port)
    taken.close()
    assert result.exit_code == 2
    assert result.stderr.startswith("error: `--host` and `--port` must be an address to be had: Address already in use")
    assert not hasattr(llm, "path")


@pytest.mark.parametrize("key", ["", " ", "secret "])
def test_serve_refuses_a_key_that_guards_nothing_or_never_fits(llm, served, key):
    result = serve("folder", "--api-key", "fits", "--api-key", key)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: `--api-key` must have text")
    assert not hasattr(llm, "path")


def test_serve_takes_bodies_without_a_limit(llm, served):
    assert serve("folder", "--max-body-mib", "inf").exit_code == 0
    assert served["options"].max_body_bytes > 2**60


@pytest.mark.parametrize(
    "arguments",
    [
        ("--host", "no such host"),
        ("--port", "99999"),
        ("--port", "-1"),
        ("--chat-template", "missing.jinja"),
        ("--chat-template", ""),
        ("--chat-template", "a\0"),
    ],
)
def test_serve_refuses_in_a_sentence(llm, served, arguments):
    result = serve("folder", *arguments)
    assert result.exit_code == 2
    assert "must be" in result.stderr


def test_serve_leaves_with_a_code_if_the_engine_cannot_go_on(llm, served, monkeypatch):
    left = []
    monkeypatch.setattr(serve_command, "_leave", lambda: left.append(True))
    served["ended_well"] = False
    assert serve("folder").exit_code == 0
    assert left == [True]


def test_serve_tells_which_steps_there_are_and_how_many_follow(llm, served):
    lines = serve("folder").stderr.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["steps", "variant", "sizes", "on", "disk", "seconds"],
        ["decode", "greedy", "4,", "8", "1", "of", "2", "1.8"],
    ]
    assert "Memory: all of it" in lines
    assert "Steps that are compiled while the server serves: 3" in lines


def test_compile_tells_what_it_has_kept(llm, monkeypatch):
    result = run("compile", "folder", "--max-num-seqs", 7)
    assert result.exit_code == 0, result.stderr
    assert EngineConfig(**llm.options) == EngineConfig(max_num_seqs=7, compile_in_background=False)
    assert "1 of 2" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Kept in ")
