"""What the kernels' arguments are called in vLLM."""

WORDS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "k_pages": "kv_cache",
    "slots": "slot_mapping",
    "page_table": "block_tables",
    "seq_lens": "seq_lens_tensor",
    "cu_q_lens": "query_start_loc",
    "cu_kv_lens": "seq_start_loc",
    "num_q_heads": "num_heads",
    "head_dim": "head_size",
    "q_scale": "layer._q_scale",
    "k_scale": "layer._k_scale",
    "v_scale": "layer._v_scale",
}
V1_WORDS = WORDS | {"page_table": "block_table", "seq_lens": "seq_lens"}

# In cross attention, where v0's own sentences speak of other fields, too.
_CROSS = {
    "seq_start_loc": "encoder_seq_start_loc",
    "slot_mapping": "cross_slot_mapping",
    "block_tables": "cross_block_tables",
    "seq_lens_tensor": "encoder_seq_lens_tensor",
}
CROSS_WORDS = {name: _CROSS.get(word, word) for name, word in WORDS.items()} | _CROSS
