"""What the tiny model's requests must give, recounted by the host from the model's own logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn.serving.steps.sampler import SamplingState, sample
from tests.jattn.harness import one_pass
from tests.jattn.harness.tiny import CONFIG, VOCAB, tiny_model

CONTEXT = CONFIG.max_context_len


def model_logits(tokens):
    """After each of `tokens`."""
    return one_pass.logits(tiny_model(), tokens, context=CONTEXT, page_size=CONFIG.page_size)


def ruled(logits, prompt, output, params):
    """The rules in NumPy, straight from their definition."""
    logits = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    if params.allowed_token_ids:
        logits[np.setdiff1d(np.arange(VOCAB), params.allowed_token_ids)] = -np.inf
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    for token in {*prompt, *output}:
        factor = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        penalty = params.frequency_penalty * output.count(token) + params.presence_penalty
        logits[token] -= np.float32(penalty)
    return logits


drawn = jax.jit(functools.partial(sample, greedy_only=False))


def expected_tokens(prompt, params, matcher=None):
    """The request's tokens, from a forward pass over the whole sequence for each.

    Args:
        matcher: llguidance's, at its beginning, if the request has a grammar.
    """
    output = []
    while len(output) < params.max_tokens and not set(output[-1:]) & set(params.stop_token_ids):
        tokens = prompt + output
        logits = ruled(model_logits(tokens)[-1], prompt, output, params)
        if matcher is not None:
            matcher.reset()
            assert matcher.consume_tokens(output)
            if matcher.is_stopped():
                break
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            logits[np.unpackbits(bits, bitorder="little")[:VOCAB] == 0] = -np.inf
        sampling = SamplingState(
            temperature=jnp.array([params.temperature], jnp.float32),
            top_k=jnp.array([params.top_k], jnp.int32),
            top_p=jnp.array([params.top_p], jnp.float32),
            min_p=jnp.array([params.min_p], jnp.float32),
            seed=jnp.array([params.seed or 0], jnp.uint32),
        )
        output.append(int(drawn(jnp.asarray(logits)[None], sampling, jnp.array([len(tokens)], jnp.int32))[0]))
    return output
