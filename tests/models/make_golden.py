"""Writes golden/: tiny random Llama checkpoints and their logits as transformers computes them, in float32 on CPU.

Needs torch and transformers, which the tests do not: `python tests/models/make_golden.py`.
"""

import pathlib
import shutil

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = pathlib.Path(__file__).parent / "golden"
PROMPT_LENS = (1, 8, 21)
DECODE_STEPS = 32

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
CASES = {
    "mha": {},
    "gqa": {"num_hidden_layers": 3, **GQA},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {**GQA, "rope_parameters": LLAMA3},
    "sharded": GQA,
    "bfloat16": GQA,
}


def randomise(model: LlamaForCausalLM) -> None:
    """Weights so large that attention is peaked and logits differ; norms that are not 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3)


def golden(model: LlamaForCausalLM, twin: LlamaForCausalLM | None = None) -> dict[str, np.ndarray]:
    """For each prompt its tokens, those to decode included, and the logits after every one of them.

    Args:
        model: Computes in float32.
        twin: The same model in the dtype that its weights are stored in; its logits tell what rounding costs.
    """
    arrays = {"frequencies": model.model.rotary_emb.inv_freq.numpy()}
    for number, prompt_len in enumerate(PROMPT_LENS):
        tokens = torch.randint(model.config.vocab_size, (1, prompt_len + DECODE_STEPS))
        arrays[f"tokens_{number}"] = tokens[0].numpy().astype(np.int32)
        with torch.no_grad():
            arrays[f"logits_{number}"] = model(tokens).logits[0].numpy()
            if twin:
                arrays[f"twin_logits_{number}"] = twin(tokens).logits[0].float().numpy()
    return arrays


def main() -> None:
    for seed, (name, changes) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        model = LlamaForCausalLM._from_config(LlamaConfig(**BASE | changes), attn_implementation="eager").eval()
        randomise(model)
        twin = None
        if name == "bfloat16":
            twin = model.to(torch.bfloat16)
            twin.save_pretrained(folder)
            model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        else:
            model.save_pretrained(folder, max_shard_size="70KB" if name == "sharded" else "1GB")
        np.savez(folder / "golden.npz", **golden(model, twin))


if __name__ == "__main__":
    main()
