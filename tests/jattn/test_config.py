"""EngineConfig's fields are LLM's knobs, and what config.json allows to check is said before a weight is read."""

import dataclasses
import inspect
import types

import jax
import pytest

import jattn
from jattn.checkpoint import Checkpoint
from jattn.kv_pool import KVGroupSpec, make_pool
from jattn.page_lists import AttentionSpan
from jattn.serving.config import EngineConfig, knobs
from jattn.serving.frontend import llm as llm_module
from jattn.serving.resolved_config import ResolvedConfig, bytes_of_pool, default_pages, resolved
from jattn_models.bundled import checkpoint_path
from jattn_models.llama import LlamaForCausalLM


@pytest.mark.parametrize(("name", "value"), [("page_size", True), ("num_pages", 1), ("max_chunk_tokens", 0)])
def test_sizes_that_are_no_whole_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", ["full_sampling", "greedy_steps", "mixed_steps", "debug_checks", "progress"])
def test_switches_that_are_neither_on_nor_off_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must be of type bool"):
        EngineConfig(**{name: 1})


@pytest.mark.parametrize("value", [5, "yarn", "[]", [], {}, {"factor": 4.0}, {"rope_type": 3}, '{"type": "yarn"'])
def test_rope_scaling_that_is_no_object_with_a_type_is_refused(value):
    with pytest.raises(ValueError, match=r"`rope_scaling` must be None, or an object such as .*, or its JSON. Got "):
        EngineConfig(rope_scaling=value)


def test_rope_scaling_is_the_same_as_an_object_and_as_json():
    configs = [
        EngineConfig(rope_scaling=given) for given in ({"type": "yarn", "factor": 4}, '{"factor":4,"type":"yarn"}')
    ]
    assert configs[0] == configs[1]
    assert len(set(configs)) == 1


def test_every_knob_says_what_it_is():
    assert all(knob.help.endswith(".") for _, knob in knobs().values())


def test_fields_are_the_keywords_of_llm():
    keywords = list(inspect.signature(jattn.LLM).parameters.values())[1:]
    expected = [(field.name, field.default) for field in dataclasses.fields(EngineConfig)]
    assert [(keyword.name, keyword.default) for keyword in keywords] == expected
    assert "page_size: Tokens in a page" in jattn.LLM.__init__.__doc__


def test_every_knob_reaches_the_engine(monkeypatch):
    given = {"prefill_tokens": 128, "max_chunk_tokens": 32, "full_sampling": False, "kv_cache_dtype": "fp8_e4m3"}
    given |= {"quantization": "fp8", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    configs = []

    def record(model, config, **_):
        assert model.config.rope.scaling.factor == 2.0
        assert model.layers[0].mlp.down_proj.kernel.dtype == "float8_e4m3fn"
        configs.append(config)
        raise InterruptedError

    monkeypatch.setattr(llm_module, "Engine", record)
    with pytest.raises(InterruptedError):
        jattn.LLM(checkpoint_path(), **given)
    assert configs == [EngineConfig(**given)]


@pytest.fixture
def no_engine(monkeypatch):
    """LLM stands before it makes its engine."""

    def stop(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(llm_module, "Engine", stop)


def test_weights_that_load_are_logged_off_a_terminal(no_engine, caplog):
    with caplog.at_level("INFO", "jattn"), pytest.raises(InterruptedError):
        jattn.LLM(checkpoint_path())
    assert [record.message.split(":")[0] for record in caplog.records][:1] == ["Loading weights"]
    caplog.clear()
    with caplog.at_level("INFO", "jattn"), pytest.raises(InterruptedError):
        jattn.LLM(checkpoint_path(), progress=False)
    assert not caplog.records


def test_what_jax_says_while_it_starts_is_a_warning_of_jattn(no_engine, monkeypatch, caplog):
    monkeypatch.setattr(llm_module, "started_devices", lambda: ([], ["A plug-in failed."]))
    with pytest.raises(InterruptedError):
        jattn.LLM(checkpoint_path())
    assert [(record.name, record.message) for record in caplog.records] == [("jattn", "A plug-in failed.")]


def test_unknown_knob_is_pythons_own_error():
    with pytest.raises(TypeError, match="max_num_seq"):
        jattn.LLM(checkpoint_path(), max_num_seq=1)


@pytest.mark.parametrize(
    ("knob", "sentence"),
    [
        ({"expert_parallel": True}, "`expert_parallel` must be False where one device has all experts"),
        ({"max_num_seqs": 0}, "`max_num_seqs` must be a whole number"),
        ({"page_size": 0}, "`page_size` must be a whole number"),
        ({"page_size": 10**9}, "`page_size` must be so small that 2 pages fit"),
        ({"num_pages": 10**9}, "`num_pages` must be lower"),
        ({"max_context_len": 2000}, "`max_context_len` must not exceed the model's 1024. Got 2000"),
        ({"prefill_tokens": 0}, "`prefill_tokens` must be a whole number"),
        ({"max_logprobs": -1}, "`max_logprobs` must be a whole number"),
        ({"dtype": "int8"}, "auto, float32, bfloat16, float16. Got 'int8'"),
        ({"kv_cache_dtype": "int8"}, "auto, fp8_ds_mla, a dtype or one of float32, .* Got 'int8'"),
        ({"kv_cache_dtype": "float16", "dtype": "float32"}, "`kv_cache_dtype` must be auto"),
        ({"backend": "int8"}, "flash_attention, flashinfer, paged. Got 'int8'"),
        ({"implementation": "int8"}, "`implementation` must be None or one of"),
        ({"implementation": "int8", "mixed_steps": True}, "`implementation` must be None or one of"),
        ({"speculative": jattn.NgramDrafting(num_draft_tokens=1024)}, "must be below `max_context_len`, 1024"),
        ({"speculative": jattn.DraftModel(num_layers=8)}, "`num_layers` must be at least 1 and at most"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_a_weight_is_read(monkeypatch, knob, sentence):
    def read(*_):
        raise AssertionError("A weight is read.")

    monkeypatch.setattr(Checkpoint, "read", read)
    with pytest.raises(ValueError, match=sentence):
        jattn.LLM(checkpoint_path(), **knob)


def test_models_without_a_description_are_loaded_all_the_same(monkeypatch):
    class Reached(Exception):
        pass

    def read(*_, **__):
        raise Reached

    monkeypatch.setattr(LlamaForCausalLM, "without_weights", None)
    monkeypatch.setattr(LlamaForCausalLM, "from_checkpoint", read)
    with pytest.raises(Reached):
        jattn.LLM(checkpoint_path(), max_context_len=2000)


GROUPS = (KVGroupSpec(name="all", num_layers=2, num_kv_heads=4, head_dim=8),)
PAGE_BYTES = 2 * 16 * 4 * (8 + 8) * 4


def test_open_sizes_follow_from_the_model(unchecked):
    model = types.SimpleNamespace(context_len=100, kv_groups=GROUPS)
    config = resolved(EngineConfig(max_num_seqs=3, speculative=jattn.NgramDrafting()), model, num_eos_ids=2)
    assert (config.max_context_len, config.prefill_seqs, config.max_stop_ids) == (100, 3, 10)
    assert config.num_pages == 3 * 7 + 1  # of 100 tokens and 4 drafted ones
    given = {"num_pages": 5, "max_context_len": 90, "prefill_seqs": 1, "max_stop_ids": 4, "dtype": "bfloat16"}
    assert resolved(EngineConfig(**given), model) == resolved(resolved(EngineConfig(**given), model), model)


@pytest.mark.parametrize(
    ("stats", "max_num_seqs", "pages"),
    [
        ({"bytes_limit": 120 * PAGE_BYTES, "bytes_in_use": 20 * PAGE_BYTES}, 10**9, 85),
        ({"bytes_limit": 120 * PAGE_BYTES, "bytes_in_use": 20 * PAGE_BYTES}, 3, 4),
        ({"bytes_limit": 10_000 * PAGE_BYTES, "bytes_in_use": 0}, 10**9, 64 * 132),
        ({"bytes_limit": 10_000 * PAGE_BYTES, "bytes_in_use": 40 * PAGE_BYTES}, 10**9, 64 * 132),
        (None, 10**9, 2**30 // PAGE_BYTES),
    ],
    ids=["share_of_the_free_memory", "what_requests_can_use", "many", "nearly_as_many", "no_stats"],
)
def test_default_pages_fit_the_device(monkeypatch, stats, max_num_seqs, pages):
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert default_pages(sizes(max_num_seqs=max_num_seqs), GROUPS) == pages


def sizes(**changes):
    given = {"num_pages": 2, "max_context_len": 16, "prefill_seqs": 1, "max_stop_ids": 1, "dtype": "float32"}
    return ResolvedConfig(**given | changes)


def test_page_size_of_which_no_two_fit_is_refused():
    with pytest.raises(ValueError, match=r"`page_size` must be so small that 2 pages fit .* Got 100000000"):
        default_pages(sizes(page_size=10**8), GROUPS)


WINDOW, CHUNK = AttentionSpan(window_left=31), AttentionSpan(chunk_size=64)
WITH_WINDOWS = (*GROUPS, *(dataclasses.replace(GROUPS[0], span=span) for span in (WINDOW, CHUNK, WINDOW)))
A_ROW = {WINDOW: 2 + 3, CHUNK: 2 + 5}  # pages of 16: keys and one more, on two edges


def windowed(**changes):
    """Sizes of a model with windows; 1 page is reserved, and 2 are those of a prefill."""
    given = {"windows": (WINDOW, CHUNK), "max_context_len": 4096, "prefill_tokens": 32, "max_num_seqs": 8}
    return sizes(**given | changes)


def test_spans_narrower_than_the_farthest_have_page_lists_of_their_own(unchecked):
    model = types.SimpleNamespace(context_len=100, kv_groups=WITH_WINDOWS)
    assert resolved(EngineConfig(num_pages=9), model).windows == (WINDOW, CHUNK)
    assert resolved(EngineConfig(num_pages=9, max_context_len=33), model).windows == (WINDOW,)
    assert resolved(EngineConfig(num_pages=9, max_context_len=32), model).windows == ()
    alone = types.SimpleNamespace(context_len=100, kv_groups=WITH_WINDOWS[1:])
    assert resolved(EngineConfig(num_pages=9), alone).windows == (WINDOW,)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_pages": 320, "enable_prefix_caching": False}, {span: 3 + 8 * row for span, row in A_ROW.items()}),
        ({"num_pages": 320}, {span: 3 + 8 * row for span, row in A_ROW.items()}),
        ({"num_pages": 3200}, dict.fromkeys(A_ROW, 400)),
        ({"num_pages": 60}, dict.fromkeys(A_ROW, 30)),
        ({"num_pages": 64, "max_context_len": 128}, dict.fromkeys(A_ROW, 32)),
        ({"num_pages": 65, "max_context_len": 128}, {span: 3 + 8 * row for span, row in A_ROW.items()}),
        ({"num_pages": 12}, {WINDOW: 8, CHUNK: 10}),
        ({"num_pages": 7}, {WINDOW: 7, CHUNK: 7}),
    ],
    ids=[
        "what_rows_see",
        "the_same_with_the_cache",
        "ends_of_texts",
        "half",
        "half_of_nearly_all",
        "all",
        "one_row",
        "no_more_than_all",
    ],
)
def test_lists_of_windows_have_what_rows_see(changes, expected):
    config = windowed(**changes)
    assert {window.span: window.num_pages for window in config.window_lists} == expected
    assert config.pages_of_lists == (config.num_pages, *expected.values())


def test_what_windows_do_not_need_goes_to_the_layers_that_see_all(monkeypatch):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000 * PAGE_BYTES, "bytes_in_use": 0})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    config = windowed(enable_prefix_caching=False)
    pages = default_pages(config, WITH_WINDOWS)
    # Groups of as many layers each: one that sees all, two of the window, one of the chunk.
    assert pages == 850 - 2 * (3 + 8 * A_ROW[WINDOW]) - (3 + 8 * A_ROW[CHUNK])
    assert default_pages(dataclasses.replace(config, windows=()), WITH_WINDOWS) == 850 // 4
    assert bytes_of_pool(WITH_WINDOWS, config, pages) == 850 * PAGE_BYTES
    pool = jax.eval_shape(lambda: make_pool(WITH_WINDOWS, num_pages=9, page_size=4, dtype="float32"))
    assert [group.page_list for group in pool.groups] == [0, 0, 0, 0]
