"""Writes tests/models/golden_cross/: a tiny random BART and its logits by transformers, in float32 on CPU.

Needs torch and transformers, which the tests do not: `python tests/models/harness/make_golden_cross.py`.
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parents[1] / "golden_cross" / "bart"
ENCODER_LENS = (17, 1, 6)
DECODER_LENS = (1 + 32, 8 + 32, 21 + 32)


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(FOLDER, ignore_errors=True)
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        scale_embedding=True,
        pad_token_id=None,
    )
    model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3)
        model.final_logits_bias.normal_(0.0, 0.3)
    model.save_pretrained(FOLDER)
    arrays = {}
    for number, lens in enumerate(zip(ENCODER_LENS, DECODER_LENS, strict=True)):
        encoder, decoder = (torch.randint(config.vocab_size, (1, length)) for length in lens)
        arrays[f"encoder_tokens_{number}"] = encoder[0].numpy().astype(np.int32)
        arrays[f"tokens_{number}"] = decoder[0].numpy().astype(np.int32)
        with torch.no_grad():
            arrays[f"logits_{number}"] = model(input_ids=encoder, decoder_input_ids=decoder).logits[0].numpy()
    np.savez(FOLDER / "golden.npz", **arrays)


if __name__ == "__main__":
    main()
