"""A whole decode step as a workload: its model's shapes and the time that its bytes take."""

import dataclasses
from typing import Any

from bench.workloads import READ_GBPS
from jattn.kv_cache_dtype import stored_dtype

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}

# A dense layer and three sparse ones of sixty-one: what one GPU holds in bf16.
DEEPSEEK_V3_4_LAYERS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}


GPT_OSS_20B: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_local_experts": 32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWorkload:
    """A whole decode step: every row gets one more token, over `ctx` tokens on the average of the steps timed.

    Attributes:
        kv: What keys and values, or latents, are held in: a name that engines take for it.
    """

    batch: int
    ctx: int
    page: int = 16
    model: str = "Llama-3-8B shapes, random bf16"
    kv: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"decode_step_b{self.batch}_ctx{self.ctx}" + ("" if self.kv == "bfloat16" else f"_kv_{self.kv}")

    @property
    def stored(self) -> Any:
        """The dtype of its pool."""
        return stored_dtype(self.kv, "bfloat16", latents=True)

    def fields(self) -> dict[str, Any]:
        """What names this workload in a row of a record."""
        return {"case": "decode_step", "model": self.model, "batch": self.batch, "ctx": self.ctx, "page": self.page}

    def roofline_ms(self, *, weight_bytes: int, kv_bytes_per_token: float) -> float:
        """Time to read the weights, but for the embedding, and the keys and values that are seen once."""
        return (weight_bytes + self.batch * self.ctx * kv_bytes_per_token) / READ_GBPS / 1e6
