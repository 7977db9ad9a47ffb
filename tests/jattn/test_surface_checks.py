"""What SGLang's and pymllm's backends both say of a layer's call."""

import dataclasses

import jax.numpy as jnp
import pytest

from jattn.attention.layer import AttentionLayer
from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import KVGroupSpec, KVPool, make_pool
from jattn.surfaces.checks import checked_rows

pytestmark = pytest.mark.usefixtures("unchecked")

LAYER = AttentionLayer(
    layer_id=0, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, head_dim=8, v_head_dim=8, scaling=0.3
)
GROUP = KVGroupSpec(name="layers", num_layers=1, num_kv_heads=2, head_dim=8)
NUMBERS = jnp.ones(2, jnp.int32)
BATCH = ForwardBatch(
    forward_mode=ForwardMode.DECODE,
    input_ids=NUMBERS,
    positions=NUMBERS,
    seq_lens=NUMBERS,
    cu_q_lens=None,
    out_cache_loc=(NUMBERS,),
    page_tables=(),
)
CALL = {
    "q": jnp.ones((2, 4, 8)),
    "k": jnp.ones((2, 2, 8)),
    "v": jnp.ones((2, 2, 8)),
    "layer": LAYER,
    "forward_batch": BATCH,
    "pool": make_pool((GROUP,), num_pages=2, page_size=4, dtype="float32"),
}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"layer": None}, "`layer` must be of type AttentionLayer"),
        ({"forward_batch": None}, "`forward_batch` must be of type ForwardBatch"),
        ({"pool": None}, "`pool` must be of type KVPool"),
        ({"pool": KVPool(())}, "`layer.group` must be one of the 0 groups of `pool`. Got 0"),
        ({"layer": dataclasses.replace(LAYER, group=1)}, "`layer.group` must be one of the 1 groups of `pool`. Got 1"),
        ({"q": None}, r"`q` must be an array \[tokens, heads, head_dim\]"),
        ({"q": jnp.ones((2, 3, 8))}, r"`q` must be \[tokens, 4, 8\], the layer's heads. Got q.shape=\(2, 3, 8\)"),
        ({"k": jnp.ones((2, 8))}, r"`k` must be an array \[tokens, heads, head_dim\]"),
    ],
)
def test_call_of_a_layer_says_what_it_cannot_use(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        checked_rows(**(CALL | arguments))
