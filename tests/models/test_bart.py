"""An encoder-decoder against transformers: its encoder's keys in pages, read across; see make_golden_cross.py."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.backend import BackendOptions, backend_class
from jattn.checkpoint import Checkpoint
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import make_pool
from jattn_models.bart import BartConfig, BartForConditionalGeneration
from tests.models.harness.goldens import assert_golden
from tests.models.harness.vllm_backends import OVER_VLLM, in_one_array
from tests.often import slow

FOLDER = pathlib.Path(__file__).parent / "golden_cross" / "bart"
PROMPT_LENS = (1, 8, 21)
DECODE_STEPS = 32
PAGE_SIZE = 16
MAX_CONTEXT = 64
ROWS = 4  # the last one is padding
NOWHERE = np.iinfo(np.int32).max
FIELDS = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


@functools.partial(jax.jit, static_argnames=("graph", "backend"))
def step(graph, state, backend, pool, batch, encoder_tokens):
    model = nnx.merge(graph, state)
    encoded = None if encoder_tokens is None else model.encode(*encoder_tokens)
    hidden, pool = model(batch, backend.init_forward_metadata(batch), backend, pool, encoded)
    return model.compute_logits(hidden), pool


def int32(values, length, fill):
    values = np.asarray(values)
    return jnp.asarray(np.concatenate([values, np.full(length - len(values), fill)]), jnp.int32)


def slots(table, spans):
    """Of each row's positions in its span."""
    return np.concatenate([table[row, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for row, at in enumerate(spans)])


OPTIONS = BackendOptions(max_context_len=MAX_CONTEXT, page_size=PAGE_SIZE, max_num_seqs=ROWS, dtype="float32")


@pytest.mark.parametrize("surface", ["flash_attention", *(slow(name) for name in ("flashinfer", "vllm_v0"))])
def test_paged_logits_match_transformers(surface):
    """Prompts with their encoders in one ragged pass, then a token at a time."""
    model = BartForConditionalGeneration.from_checkpoint(Checkpoint(FOLDER), dtype=jnp.float32)
    graph, state = nnx.split(model)
    with np.load(FOLDER / "golden.npz") as arrays:
        encoders, tokens, expected = (
            [arrays[f"{kind}_{number}"] for number in range(3)] for kind in ("encoder_tokens", "tokens", "logits")
        )
    of_surface = OVER_VLLM.get(surface) or backend_class(surface)
    backend = of_surface.for_model(model.attention_layers, OPTIONS)
    width = MAX_CONTEXT // PAGE_SIZE
    num_pages = 1 + ROWS * width
    pool = make_pool(model.kv_groups, num_pages=num_pages, page_size=PAGE_SIZE, dtype=jnp.float32)
    pool = in_one_array(pool) if surface in OVER_VLLM else pool
    pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
    rng = np.random.default_rng(0)
    own, across = (rng.permutation(np.arange(1, num_pages)).reshape(ROWS, width) for _ in range(2))
    encoder_lens = np.array([len(row) for row in encoders])

    def run(mode, new, starts, *, padded, **encoder):
        lens = np.array([len(row) for row in new])
        spans = [np.arange(start, start + length) for start, length in zip(starts, lens, strict=True)]
        cu_q_lens = np.arange(ROWS + 1) if mode.is_decode() else np.cumsum([0, *lens, 0])
        batch = ForwardBatch(
            forward_mode=mode,
            input_ids=int32(np.concatenate(new), padded, 0),
            positions=int32(np.concatenate(spans), padded, 0),
            seq_lens=int32(starts + lens, ROWS, 0),
            cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
            out_cache_loc=(int32(slots(own, spans), padded, NOWHERE),),
            page_tables=(jnp.asarray(own, jnp.int32),),
            encoder_lens=int32(encoder_lens, ROWS, 0),
            encoder_page_table=jnp.asarray(across, jnp.int32),
            encoder_out_cache_loc=encoder.get("places"),
        )
        return step(graph, state, backend, pool, batch, encoder.get("tokens"))

    places = int32(slots(across, [np.arange(length) for length in encoder_lens]), 28, NOWHERE)
    encoder_tokens = int32(np.concatenate(encoders), 28, 0), jnp.asarray(np.cumsum([0, *encoder_lens]), jnp.int32)
    prompts = [row[:length] for row, length in zip(tokens, PROMPT_LENS, strict=True)]
    logits, pool = run(ForwardMode.EXTEND, prompts, np.zeros(3, int), padded=33, places=places, tokens=encoder_tokens)
    ends = np.cumsum(PROMPT_LENS)
    for row, end, length in zip(expected, ends, PROMPT_LENS, strict=True):
        assert_golden(logits[end - length : end], row[:length])
    for number in range(DECODE_STEPS):
        at = np.array(PROMPT_LENS) + number
        new = [row[i : i + 1] for row, i in zip(tokens, at, strict=True)]
        logits, pool = run(ForwardMode.DECODE, new, at, padded=ROWS)
        assert_golden(logits[:3], np.stack([row[i] for row, i in zip(expected, at, strict=True)]))


def test_cross_attention_through_vllm_v1_is_refused():
    model = BartForConditionalGeneration(BartConfig.from_dict(FIELDS), dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match=r"v1 has decoders only: use `jattn.vllm.v0`"):
        OVER_VLLM["vllm_v1"].for_model(model.attention_layers, OPTIONS)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"d_model": None}, ValueError, "`d_model` .* must be an integer above 0. Got None"),
        ({"decoder_attention_heads": 3}, ValueError, "multiple of `decoder_attention_heads`. Got 32 and 3"),
        ({"scale_embedding": "false"}, ValueError, "`scale_embedding` .* must be true or false. Got 'false'"),
        ({"activation_function": "relu"}, NotImplementedError, "`activation_function` must be 'gelu'. Got 'relu'"),
        ({"tie_word_embeddings": False}, NotImplementedError, "`tie_word_embeddings` must be true. Got false"),
    ],
)
def test_unfit_field_is_named(fields, error, message):
    with pytest.raises(error, match=message):
        BartConfig.from_dict(FIELDS | fields)


@pytest.mark.parametrize(("scaled", "factor"), [(True, 32**0.5), (False, 1.0), (None, 1.0)])
def test_embeddings_are_scaled_as_configured(scaled, factor):
    assert BartConfig.from_dict(FIELDS | {"scale_embedding": scaled}).embedding_scale == factor
