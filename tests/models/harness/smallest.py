"""The fewest fields that a model's config.json may have."""

SMALLEST = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
