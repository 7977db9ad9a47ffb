"""The checkpoint's files in Hugging Face format: configuration, first weights, and what is written to disk."""

import json
import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer

from .bpe import END_OF_TEXT, END_OF_TEXT_ID, VOCAB_SIZE

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.05,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
GENERATION_CONFIG = {
    "bos_token_id": END_OF_TEXT_ID,
    "do_sample": True,
    "eos_token_id": END_OF_TEXT_ID,
    "temperature": 0.7,
    "top_p": 0.9,
}
TOKENIZER_CONFIG = {
    "bos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "eos_token": END_OF_TEXT,
    "model_max_length": CONFIG["max_position_embeddings"],
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint; a projection is [outputs, inputs]."""
    hidden, width = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    return {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], hidden),
        **{
            f"model.layers.{number}.{name}.weight": shape
            for number in range(CONFIG["num_hidden_layers"])
            for name, shape in layer.items()
        },
        "model.norm.weight": (hidden,),
    }


def first_weights(seed: int) -> dict[str, np.ndarray]:
    """Norms of one, the rest normal; projections onto the residual stream are smaller by sqrt(2 * layers)."""
    rng = np.random.default_rng(seed)
    residual = (2 * CONFIG["num_hidden_layers"]) ** -0.5

    def first(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        scale = CONFIG["initializer_range"] * (residual if "o_proj" in name or "down_proj" in name else 1.0)
        return rng.normal(0.0, scale, shape).astype(np.float32)

    return {name: first(name, shape) for name, shape in tensor_shapes().items()}


def write_checkpoint(folder: pathlib.Path, tokenizer: Tokenizer, weights: dict[str, np.ndarray], dtype=None) -> None:
    """All files but the model card; weights are rounded to `dtype`, bfloat16 if None."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    rounded = {name: np.ascontiguousarray(weights[name], dtype or ml_dtypes.bfloat16) for name in tensor_shapes()}
    (folder / "model.safetensors").write_bytes(save(rounded, metadata={"format": "pt"}))
