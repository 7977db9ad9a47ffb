"""Log-probabilities in the forms that the endpoints give them."""

from collections.abc import Sequence
from typing import Any

from jattn.serving.frontend.outputs import Logprobs
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.steps.logprobs import Logprob

_LEAST = -9999.0  # JSON has no infinity


def for_completion(
    tokens: Sequence[int], found: Sequence[Logprobs | None], offset: int, tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any]:
    """Of `/v1/completions`.

    Args:
        tokens: Each of those that `found` is of.
        found: None for a token that follows nothing.
        offset: Characters before the first of them.
        as_ids: Whether tokens are named by their ids ("token_id:7"), not by their texts, which several may share.
    """
    names = [
        _name(token, logprobs or {token: Logprob(0.0, 1, tokenizer.decode([token], False))}, as_ids)
        for token, logprobs in zip(tokens, found, strict=True)
    ]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "text_offset": offsets,
        "token_logprobs": [logprobs and _value(logprobs[t]) for t, logprobs in zip(tokens, found, strict=True)],
        "tokens": names,
        "top_logprobs": [
            logprobs and {_name(token, logprobs, as_ids): _value(logprob) for token, logprob in logprobs.items()}
            for logprobs in found
        ],
    }


def for_chat(
    tokens: Sequence[int], found: Sequence[Logprobs], top: int, tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any]:
    """Of `/v1/chat/completions`, with the `top` likeliest tokens at each place."""
    content = []
    for token, logprobs in zip(tokens, found, strict=True):
        ranked = sorted(logprobs, key=lambda other: logprobs[other].rank)
        likeliest = [_entry(other, logprobs, tokenizer, as_ids) for other in ranked if logprobs[other].rank <= top]
        content.append(_entry(token, logprobs, tokenizer, as_ids) | {"top_logprobs": likeliest})
    return {"content": content}


def for_prompt(found: Sequence[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """Of `prompt_logprobs`, by token id."""
    if found is None:
        return None
    return [
        None if logprobs is None else {str(token): _ranked(logprobs[token]) for token in logprobs} for logprobs in found
    ]


def _ranked(logprob: Logprob) -> dict[str, Any]:
    return {"logprob": _value(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _entry(token: int, logprobs: Logprobs, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    name = _name(token, logprobs, as_ids)
    spelled = name.encode() if as_ids else _spelled(token, name, tokenizer)
    return {"token": name, "logprob": _value(logprobs[token]), "bytes": list(spelled)}


def _spelled(token: int, text: str, tokenizer: Tokenizer) -> bytes:
    """A token's own bytes, which may be a part of a character, where its text is U+FFFD."""
    if tokenizer.is_byte_level:
        return tokenizer.bytes_of(token)
    byte = tokenizer.byte(token)
    return text.encode() if byte is None else bytes([byte])


def _name(token: int, logprobs: Logprobs, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else logprobs[token].decoded_token or ""


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)
