"""Writes tests/jattn/golden/sampling.npz: logits before and after transformers' logits processors, in float32 on CPU.

Needs torch and transformers, which the tests do not: `python tests/jattn/harness/make_sampling_golden.py`.
"""

import pathlib

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FILE = pathlib.Path(__file__).parents[1] / "golden" / "sampling.npz"
BATCH, VOCAB, PROMPT, OUTPUT = 3, 100, 12, 5

NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "stop_ids": [7, 90],
    "bias_ids": [0],
    "bias": [0.0],
}
BIAS = {"bias_ids": [3, 7, 99, 20], "bias": [2.5, -4.0, 8.0, -100.0]}
CASES = {
    "temperature": {"temperature": 0.6},
    "min_p": {"min_p": 0.05, "temperature": 1.3},
    "min_p_of_one": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 30, "top_p": 0.8},
    "min_p_top_k_top_p": {"min_p": 0.02, "top_k": 25, "top_p": 0.7, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.4},
    "repetition_reward": {"repetition_penalty": 0.7, "top_p": 0.9},
    "bias": BIAS,
    "min_tokens": {"min_tokens": OUTPUT + 1},
    "min_tokens_reached": {"min_tokens": OUTPUT},
    "everything": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.85,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "min_tokens": OUTPUT + 3,
        **BIAS,
    },
}


def golden(case: dict) -> dict[str, np.ndarray]:
    """Everything of a case: what it asks, the tokens so far, the logits raw, under the rules, and as drawn from."""
    prompt, output = torch.randint(VOCAB, (BATCH, PROMPT)), torch.randint(VOCAB, (BATCH, OUTPUT))
    logits = 3 * torch.randn(BATCH, VOCAB)
    stop_ids = torch.tensor(case["stop_ids"])
    sequence_bias = [[[token], bias] for token, bias in zip(case["bias_ids"], case["bias"], strict=True)]
    rules = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor(sequence_bias),
            MinNewTokensLengthLogitsProcessor(PROMPT, case["min_tokens"], stop_ids, device="cpu"),
            RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]),
        ]
    )
    warpers = LogitsProcessorList([TemperatureLogitsWarper(case["temperature"])])
    if case["min_p"]:
        warpers.append(MinPLogitsWarper(case["min_p"]))
    if case["top_k"]:
        warpers.append(TopKLogitsWarper(case["top_k"]))
    if case["top_p"] < 1:
        warpers.append(TopPLogitsWarper(case["top_p"]))
    tokens = torch.cat([prompt, output], dim=1)
    ruled = rules(tokens, logits.clone())
    drawn = warpers(tokens, ruled.clone())
    arrays = {"prompt": prompt.int(), "output": output.int(), "logits": logits, "ruled": ruled, "drawn": drawn}
    return {name: array.numpy() for name, array in arrays.items()} | {
        name: np.asarray(value, np.int32 if isinstance(np.asarray(value).flat[0], np.integer) else np.float32)
        for name, value in case.items()
    }


def main() -> None:
    torch.manual_seed(0)
    FILE.parent.mkdir(exist_ok=True)
    cases = {name: golden(NEUTRAL | changes) for name, changes in CASES.items()}
    np.savez_compressed(FILE, **{f"{case}/{name}": a for case, arrays in cases.items() for name, a in arrays.items()})


if __name__ == "__main__":
    main()
