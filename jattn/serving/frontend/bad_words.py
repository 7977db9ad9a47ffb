"""Words that may not come, as a bias against their tokens."""

import dataclasses

from jattn.serving.frontend.text import Tokenizer
from jattn.serving.sampling_params import SamplingParams

_NEVER = -3.4028234e38  # of float32; infinite biases are refused


def without_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same request in terms of tokens: a word's own and, as in vLLM, the one that it has after a space.

    Raises:
        ValueError: A word is several tokens.
    """
    if not params.bad_words:
        return params
    banned = {}
    for word in params.bad_words:
        forms = [tokenizer.encode(form, add_special_tokens=False) for form in (word.lstrip(), f" {word.lstrip()}")]
        if len(forms[0]) != 1:
            raise ValueError(
                "`bad_words` must be words of one token each: a run of tokens is not looked for yet. "
                f"Got {word!r}, of {len(forms[0])} tokens."
            )
        banned |= {form[0]: _NEVER for form in forms if len(form) == 1}
    return dataclasses.replace(params, bad_words=(), logit_bias=(params.logit_bias or {}) | banned)
