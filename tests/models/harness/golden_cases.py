"""The models that make_golden.py makes: family, and what configures it. New ones at the end: seeds go by place."""

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
GQA = {"num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
# What turns "gqa" into a model whose texts outgrow its context.
DYNAMIC = {
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
# Of attention, and the mixtures behind it.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
WINDOW = {"sliding_window": 8}
# Of the architectures but Llama: small, and long enough for the greedy tokens.
SMALL = {
    "vocab_size": 64,
    "intermediate_size": 40,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Of what sees, beside a text model: never used.
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
ALTERNATING = ["full_attention", "sliding_attention"] * 2
CASES = {
    "mha": ("Llama", {}),
    "gqa": ("Llama", {"num_hidden_layers": 3, **GQA}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("Llama", {**GQA, "rope_parameters": LLAMA3}),
    "sharded": ("Llama", GQA),
    "bfloat16": ("Llama", GQA),
    "mistral": ("Mistral", {**SMALL, **WINDOW}),
    "qwen2": (
        "Qwen2",
        {**SMALL, **WINDOW, "num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": (
        "Qwen3",
        {
            **SMALL,
            **WINDOW,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "layer_types": ALTERNATING,
        },
    ),
    "phi3": ("Phi3", {**SMALL, **WINDOW, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "phi3_longrope": (
        "Phi3",
        {
            **SMALL,
            "hidden_size": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONGROPE,
        },
    ),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SMALL,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **SMALL,
            **WINDOW,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 16,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 1, 2],
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0},
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **SMALL,
            **WINDOW,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            **SMALL,
            "intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "clip_qkv": 1.0,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **SMALL,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **SMALL,
            **LATENT,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SMALL,
            **LATENT,
            "num_hidden_layers": 3,
            "q_lora_rank": 20,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "yarn": ("Llama", {**GQA, "rope_parameters": YARN}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **SMALL,
            **LATENT,
            "num_hidden_layers": 3,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 20,
            "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {"rope_theta": 500.0},
        },
    ),
    "biased": ("Llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "gemma3_wrapped": (
        "Gemma3",
        {
            **SMALL,
            **WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "sliding_window_pattern": 2,
            "rope_parameters": None,
        },
    ),
    "llama4_wrapped": (
        "Llama4",
        {
            **SMALL,
            "head_dim": 16,
            "attention_bias": True,
            "intermediate_size": 16,
            "intermediate_size_mlp": 40,
            "num_local_experts": 2,
            "moe_layers": [1],
        },
    ),
    "mistral3_wrapped": ("Mistral3", {**SMALL, "model_type": "mistral", "sliding_window": None}),
    "gemma2": (
        "Gemma2",
        {
            **SMALL,
            **WINDOW,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {**SMALL, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            **SMALL,
            **WINDOW,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            **SMALL,
            "mlp_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            **SMALL,
            **WINDOW,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "use_sliding_window": True,
            "no_rope_layer_interval": 2,
        },
    ),
    "ministral": ("Ministral", {**SMALL, **WINDOW, "num_hidden_layers": 4, "head_dim": 16, "layer_types": ALTERNATING}),
    "ministral3": (
        "Ministral3",
        {
            **SMALL,
            "head_dim": 16,
            "rope_parameters": YARN
            | {
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
                "max_position_embeddings": 96,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "ministral3_wrapped": (
        "Mistral3",
        {**SMALL, "model_type": "ministral3", "rope_parameters": None, "tie_word_embeddings": True},
    ),
    "glm4": (
        "Glm4",
        {
            **SMALL,
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "starcoder2": ("Starcoder2", {**SMALL, **WINDOW}),
    "gpt_oss": (
        "GptOss",
        {
            **SMALL,
            **WINDOW,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}
