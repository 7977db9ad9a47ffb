"""Fields of a completion that say how to sample; and those that are known and cannot be served."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.server.bodies import shortened
from jattn.server.structured_fields import structured_outputs
from jattn.serving.sampling_params import SamplingParams

MOST_SEQUENCES = 128  # of a prompt; each is a request of its own

_SAMPLING = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)

# By field, the values that ask for nothing.
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "suffix": ("",),
    "use_beam_search": (False,),
}


def refuse_unserved(body: Mapping[str, Any]) -> None:
    """Says which known field asks for what there is not; fields that nobody knows are no one's affair.

    Raises:
        ValueError: One does.
    """
    for name, harmless in _NOT_SERVED.items():
        if name in body and body[name] not in harmless:
            raise ValueError(f"`{name}` is not served here: leave it out. Got {shortened(body[name])}.")
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise ValueError(f"`best_of` must be `n`: all sequences are given. Got {shortened(body['best_of'])}.")


def sampling_params(
    body: Mapping[str, Any], defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """What a body asks for, over the checkpoint's own defaults.

    Args:
        max_tokens, logprobs: As the endpoint has them.

    Raises:
        ValueError: A value is out of its range.
    """
    given = {name: body[name] for name in _SAMPLING if name in body}
    seed = body.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        given["seed"] = seed if seed == -1 else seed % 2**32  # clients send 64 bits
    elif seed is not None:
        raise ValueError(f"`seed` must be a whole number. Got {shortened(seed)}.")
    form = structured_outputs(dict(body))
    params = dataclasses.replace(defaults, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form, **given)
    if params.n > MOST_SEQUENCES:
        raise ValueError(f"`n` must be at most {MOST_SEQUENCES}. Got {params.n}.")
    return params
