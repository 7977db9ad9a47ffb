"""The checkpoint that comes with the package is small, whole, and as good as its card says."""

import importlib.metadata
import json
import pathlib
import runpy
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jattn.checkpoint import Checkpoint
from jattn.flash_attention import FlashAttentionBackend, FlashAttentionConfig
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import make_pool
from jattn_models.bundled import checkpoint_path
from jattn_models.llama import LlamaForCausalLM
from tests.often import often, slow

FOLDER = checkpoint_path()
SCRIPT = pathlib.Path(__file__).parents[2] / "models" / "train_checkpoint.py"
WINDOW = 1024
PAGE_SIZE = 16
NUM_PAGES = WINDOW // PAGE_SIZE + 1


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def evaluation():
    return json.loads((FOLDER / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def window_nats():
    return nats_of(LlamaForCausalLM.from_checkpoint(Checkpoint(FOLDER), dtype=jnp.float32))


def nats_of(model):
    """A function: the summed loss of at most WINDOW + 1 tokens, through shuffled pages and a padded bucket."""
    backend = FlashAttentionBackend(FlashAttentionConfig(max_context_len=WINDOW, page_size=PAGE_SIZE))
    table = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES, dtype=np.int32))
    places = np.arange(WINDOW, dtype=np.int32)
    slots = table[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE

    @jax.jit
    def log_probabilities(batch, pool):
        hidden, _ = model(batch, backend.init_forward_metadata(batch), backend, pool)
        return jax.nn.log_softmax(model.compute_logits(hidden))

    def nats(tokens):
        count = len(tokens) - 1
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=jnp.asarray(np.pad(tokens[:-1], (0, WINDOW - count)), jnp.int32),
            positions=jnp.asarray(np.where(places < count, places, 0), jnp.int32),
            seq_lens=jnp.array([count], jnp.int32),
            cu_q_lens=jnp.array([0, count], jnp.int32),
            out_cache_loc=(jnp.asarray(np.where(places < count, slots, np.iinfo(np.int32).max), jnp.int32),),
            page_tables=(jnp.asarray(table[None], jnp.int32),),
        )
        pool = make_pool(model.kv_groups, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32)
        found = np.asarray(log_probabilities(batch, pool))
        return -found[np.arange(count), tokens[1:]].sum()

    return nats


def test_bundled_checkpoint_is_the_default():
    (point,) = importlib.metadata.entry_points(group="jattn.checkpoints", name="default")
    assert point.load()() == FOLDER


def test_bundled_files_are_whole_and_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sorted(sizes) == [
        "README.md",
        "config.json",
        "evaluation.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sum(sizes.values()) <= 6_000_000


@given(text=st.text())
def test_bundled_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bundled_tokenizer_begins_as_a_document(tokenizer):
    ids = tokenizer.encode("import os").ids
    assert tokenizer.get_vocab_size() == 2048
    assert ids[0] == tokenizer.token_to_id("<|endoftext|>") == 0
    assert 0 not in ids[1:]


HELD_OUT = ("bisect.py", "curses/ascii.py", "secrets.py", "xml/sax/__init__.py")


def held_out(name, tokenizer):
    """A file's tokens as the windows that they are read in, and how many of them are foretold."""
    text = (pathlib.Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
    tokens = np.array([0, *tokenizer.encode(text, add_special_tokens=False).ids, 0], np.int32)
    return [tokens[start : start + WINDOW + 1] for start in range(0, len(tokens) - 1, WINDOW)], len(tokens) - 1


@pytest.mark.parametrize("name", often(HELD_OUT, ("bisect.py", "xml/sax/__init__.py")))
def test_bundled_loss_is_as_stated_and_beats_the_bigram(name, tokenizer, evaluation, window_nats):
    stated = evaluation["held_out_files"][name]
    pieces, count = held_out(name, tokenizer)
    nats = sum(map(window_nats, pieces)) / count
    # The file itself differs a little between versions of Python.
    same_text = count == stated["tokens"]
    assert nats == pytest.approx(stated["nats_per_token"], abs=0.002 if same_text else 0.15)
    assert nats < stated["bigram_nats_per_token"] - 0.5


@pytest.mark.parametrize(
    ("names", "quantization", "within"),
    [
        (("secrets.py",), "fp8", 0.01),
        slow(HELD_OUT, "fp8", 0.01),
        slow(HELD_OUT, "int4", 0.03),
    ],
)
def test_bundled_perplexity_in_few_bits_is_near_its_own(tokenizer, window_nats, names, quantization, within):
    checkpoint = Checkpoint(FOLDER).quantized(quantization)
    in_few_bits = nats_of(LlamaForCausalLM.from_checkpoint(checkpoint, dtype=jnp.float32))
    files = [held_out(name, tokenizer) for name in names]
    more = sum(in_few_bits(piece) - window_nats(piece) for pieces, _ in files for piece in pieces)
    ratio = np.exp(more / sum(count for _, count in files))
    assert ratio == pytest.approx(1, abs=within)
    assert ratio != 1


def test_bundled_card_states_the_evaluation(evaluation):
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"**{evaluation['held_out']['nats_per_token']:.3f}**" in card
    assert f"{evaluation['baselines']['bigram']['nats_per_token']:.3f}" in card
    assert evaluation["held_out"]["nats_per_token"] < evaluation["baselines"]["bigram"]["nats_per_token"] - 1


@pytest.mark.slow
def test_train_checkpoint_smoke_writes_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--smoke", "--out", str(tmp_path)])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as where it runs by itself
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FOLDER.iterdir()}
    model = LlamaForCausalLM.from_checkpoint(Checkpoint(tmp_path), dtype=jnp.float32)
    assert model.vocab_size == 2048
