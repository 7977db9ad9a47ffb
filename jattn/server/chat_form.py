"""Answers of `/v1/chat/completions`, worded as OpenAI's."""

from collections.abc import Callable, Sequence
from typing import Any

from jattn.server import logprobs
from jattn.server.answers import Call
from jattn.server.tools.message import Message
from jattn.serving.frontend.outputs import Completion, Delta, RequestOutput
from jattn.serving.frontend.text import Tokenizer


class ChatForm:
    """Messages in choices; a streamed one is its role, then what it says, then why it ended.

    Args:
        new_message: Makes a choice's message, to be read from its text.
        logprobs: How many of the likeliest tokens each place has; None for no log-probabilities.
    """

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(
        self,
        call: Call,
        new_message: Callable[[], Message],
        tokenizer: Tokenizer,
        *,
        prompt: list[int],
        logprobs: int | None,
        gives_prompt_logprobs: bool,
    ):
        self._call = call
        self._new_message = new_message
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._logprobs = logprobs
        self._gives_prompt_logprobs = gives_prompt_logprobs
        self._messages: dict[int, Message] = {}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        index, choices = delta.output_index, []
        if index not in self._messages:
            self._messages[index] = self._new_message()
            choices.append(_chunk(index, {"role": "assistant", "content": ""}))
            if self._call.return_token_ids:
                choices[-1]["prompt_token_ids"] = self._prompt
        message = self._messages[index]
        deltas = message.push(delta.text, is_last=delta.finish_reason is not None)
        if not deltas and delta.token_ids and (self._logprobs is not None or self._call.return_token_ids):
            deltas = [{"content": ""}]
        for i, content in enumerate(deltas):
            choices.append(_chunk(index, content))
            if i == 0:  # all of the delta's tokens go with it
                choices[-1]["logprobs"] = self._found(delta)
                if self._call.return_token_ids:
                    choices[-1]["token_ids"] = list(delta.token_ids)
        if delta.finish_reason:
            reason = message.finish_reason(delta.finish_reason)
            choices.append(_chunk(index, {}) | {"finish_reason": reason, "stop_reason": delta.stop_reason})
        return choices

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            message = self._new_message()
            message.push(completion.text, is_last=True)
            choice = {
                "index": completion.index,
                "message": message.whole,
                "logprobs": self._found(completion),
                "finish_reason": message.finish_reason(completion.finish_reason),
                "stop_reason": completion.stop_reason,
            }
            if self._call.return_token_ids:
                choice["token_ids"] = list(completion.token_ids)
            choices.append(choice)
        answer: dict[str, Any] = {"choices": choices}
        if self._gives_prompt_logprobs:
            answer["prompt_logprobs"] = logprobs.for_prompt(output.prompt_logprobs)
        if self._call.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    def _found(self, part: Delta | Completion) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        as_ids = self._call.names_are_ids
        found = part.logprobs or ()
        return logprobs.for_chat(part.token_ids, found, self._logprobs, self._tokenizer, as_ids=as_ids)


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
