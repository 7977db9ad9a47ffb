"""Prompts as a caller gives them: text, token ids, or vLLM's mapping that holds either; one or several."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, SupportsIndex, TypedDict

import jax
import numpy as np


class TextPrompt(TypedDict):
    """vLLM's mapping of a text."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """vLLM's mapping of token ids. With a `prompt` beside them the ids are served."""

    prompt_token_ids: Sequence[SupportsIndex]
    cache_salt: NotRequired[str | None]


TokenIds = Sequence[SupportsIndex] | np.ndarray | jax.Array
Prompt = str | TextPrompt | TokensPrompt | TokenIds

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Salted(NamedTuple):
    """A prompt.

    Attributes:
        prompt: Text or token ids; whether the ids are ids is for the engine to say.
        cache_salt: What the engine's `make_request` takes as such; likewise.
    """

    prompt: Any
    cache_salt: Any = None


def listed(prompts: Any) -> list[Salted]:
    """Each prompt, of one or several.

    Raises:
        ValueError: They are no prompts, or a mapping holds what cannot be served.
    """
    if isinstance(prompts, np.ndarray | jax.Array):
        prompts = np.asarray(prompts)
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [_of(prompts)]
    if not isinstance(prompts, Iterable) or np.ndim(prompts if isinstance(prompts, np.ndarray) else ()) == 0:
        raise ValueError(f"`prompts` must be texts or token ids, one or several. Got {prompts!r}.")
    found = list(prompts)
    return [Salted(found)] if found and _is_token(found[0]) else [_of(prompt) for prompt in found]


def _is_token(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, np.ndarray | jax.Array) and value.ndim == 0)


def _of(prompt: Any) -> Salted:
    if isinstance(prompt, jax.Array):
        return Salted(np.asarray(prompt))
    if not isinstance(prompt, Mapping):
        return Salted(prompt)
    given = {key: value for key, value in prompt.items() if value is not None}
    if unknown := [key for key in given if key not in _KEYS]:
        raise ValueError(f"A prompt that is a mapping may have the keys {', '.join(_KEYS)}. Got {unknown[0]!r}.")
    if "prompt_token_ids" in given:
        return Salted(_of(given["prompt_token_ids"]).prompt, given.get("cache_salt"))
    if not isinstance(given.get("prompt"), str):
        raise ValueError(
            "A prompt that is a mapping must have a text as `prompt`, or token ids as `prompt_token_ids`. "
            f"Got {prompt!r}."
        )
    return Salted(given["prompt"], given.get("cache_salt"))
