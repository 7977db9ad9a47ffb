"""Writes tests/models/golden/: tiny random checkpoints and their logits by transformers, in float32 on CPU.

Needs torch and transformers, which the tests do not: `python tests/models/harness/make_golden.py`, and names of
cases if not all are wanted.
"""

import pathlib
import shutil
import sys
import tempfile

import in_mxfp4
import numpy as np
import torch
import transformers
from golden_cases import CASES
from golden_fields import BASE, DYNAMIC, VISION
from transformers import PreTrainedModel

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
PROMPT_LENS = (1, 8, 21)
DECODE_STEPS = 32
GREEDY_STEPS = 12


def randomise(model: PreTrainedModel) -> None:
    """Weights so large that attention is peaked and logits differ; norms that are not 1, biases that decide."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.5, 0.5)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3)


def golden(model: PreTrainedModel, twin: PreTrainedModel | None = None) -> dict[str, np.ndarray]:
    """For each prompt its tokens, those to decode included, and the logits after every one of them.

    Args:
        model: Computes in float32.
        twin: The same model in the dtype that its weights are stored in; its logits tell what rounding costs.
    """
    arrays, config = {}, model.config.get_text_config()
    for number, prompt_len in enumerate(PROMPT_LENS):
        tokens = torch.randint(config.vocab_size, (1, prompt_len + DECODE_STEPS))
        arrays[f"tokens_{number}"] = tokens[0].numpy().astype(np.int32)
        with torch.no_grad():
            arrays[f"logits_{number}"] = model(tokens).logits[0].numpy()
            if twin:
                arrays[f"twin_logits_{number}"] = twin(tokens).logits[0].float().numpy()
            if tokens.shape[1] + GREEDY_STEPS <= config.max_position_embeddings:
                arrays[f"greedy_{number}"] = greedy(model, tokens).numpy().astype(np.int32)
    decoder = model.get_decoder()
    rotary = getattr(decoder, "model", decoder).rotary_emb  # after long texts, on which they may depend
    if hasattr(rotary, "inv_freq"):
        arrays["frequencies"] = rotary.inv_freq.numpy().copy()
    else:
        arrays["frequencies"] = rotary.full_attention_inv_freq.numpy()
        arrays["local_frequencies"] = rotary.sliding_attention_inv_freq.numpy()
    if short := getattr(config, "original_max_position_embeddings", None):
        with torch.no_grad():
            arrays["short_logits"] = model(tokens[:, :short]).logits[0].numpy()
        arrays["short_frequencies"] = rotary.inv_freq.numpy()
    return arrays


def greedy(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens to follow, each from a pass over all before it."""
    for _ in range(GREEDY_STEPS):
        values, indices = model(tokens).logits[0, -1].topk(2)
        assert values[0] - values[1] > 1e-3, "too close for another order of summation"
        tokens = torch.cat([tokens, indices[None, :1]], dim=1)
    return tokens[0, -GREEDY_STEPS:]


def logits_in_mxfp4(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Those of the same model with its experts in mxfp4, dequantised by transformers."""
    with tempfile.TemporaryDirectory() as into:
        packed, _ = in_mxfp4.copies(folder, pathlib.Path(into))
        quantization = transformers.Mxfp4Config(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            packed, dtype=torch.float32, quantization_config=quantization, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


def with_dynamic_rope(model: PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The logits and frequencies of the same model where texts outgrow its context and its frequencies follow."""
    config = type(model.config)(**model.config.to_dict() | DYNAMIC)
    longer = type(model)._from_config(config, attn_implementation="eager").eval()
    longer.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = longer(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    return {"dynamic_logits": logits, "dynamic_frequencies": longer.get_decoder().rotary_emb.inv_freq.numpy()}


def main() -> None:
    for seed, (name, (family, changes)) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(seed)
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        if name.endswith("_wrapped"):
            model_class = getattr(transformers, f"{family}ForConditionalGeneration")
            config = getattr(transformers, f"{family}Config")(text_config=BASE | changes, vision_config=VISION)
        else:
            model_class = getattr(transformers, f"{family}ForCausalLM")
            of_text = getattr(transformers, f"{family}TextConfig", None)
            config = (of_text or getattr(transformers, f"{family}Config"))(**BASE | changes)
        model = model_class._from_config(config, attn_implementation="eager").eval()
        randomise(model)
        twin = None
        if name == "bfloat16":
            twin = model.to(torch.bfloat16)
            twin.save_pretrained(folder)
            model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        else:
            model.save_pretrained(folder, max_shard_size="70KB" if name == "sharded" else "1GB")
        arrays = golden(model, twin)
        if name == "gqa":
            arrays |= with_dynamic_rope(model, arrays[f"tokens_{len(PROMPT_LENS) - 1}"])
        if name == "gpt_oss":
            arrays["mxfp4_logits"] = logits_in_mxfp4(folder, arrays[f"tokens_{len(PROMPT_LENS) - 1}"])
        np.savez(folder / "golden.npz", **arrays)


if __name__ == "__main__":
    main()
