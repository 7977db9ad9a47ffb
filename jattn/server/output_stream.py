"""OutputStream: what the engine has made for an answer and the client has not been sent yet."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence

from jattn.server.errors import ApiError
from jattn.server.overdue import Overdue
from jattn.serving.engine_thread import Progress
from jattn.serving.frontend.outputs import Delta, SequenceReader
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.request import Request


class OutputStream:
    """The deltas of an answer's sequences. What waits here is bounded by what may be generated.

    Args:
        of_prompts: For each prompt the requests of its sequences.
    """

    def __init__(self, of_prompts: Sequence[Sequence[Request]], tokenizer: Tokenizer):
        self.of_prompts = of_prompts
        self._readers = {
            request: SequenceReader(request, tokenizer, index=index, output_index=output_index)
            for index, of_prompt in enumerate(of_prompts)
            for output_index, request in enumerate(of_prompt)
        }
        self._waiting: list[Delta] = []
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        self._late: Overdue | None = None

    @property
    def unfinished(self) -> list[Request]:
        return [request for request, reader in self._readers.items() if not reader.finished]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(of_prompt[0].prompt) for of_prompt in self.of_prompts)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts whose keys were there before; each prompt's first sequence counts."""
        return sum(of_prompt[0].num_cached_tokens for of_prompt in self.of_prompts)

    def take(self, progress: Progress) -> bool:
        """Takes what is new of a sequence.

        Returns:
            Whether it ends there by a stop string, which the engine knows nothing of.
        """
        reader = self._readers[progress.request]
        reason = None if progress.error is not None else progress.finish_reason
        self._waiting += reader.read_to(progress.num_tokens, reason)
        self._news.set()
        if progress.error is not None:
            self.fail(ApiError(500, progress.error))
        return reader.finished and progress.finish_reason is None

    def fail(self, error: ApiError) -> None:
        """Ends the answer with an error, after what waits."""
        self._error = error
        self._news.set()

    async def next(self, timeout: float | None = None) -> list[Delta] | None:
        """All deltas that wait, once there are some; none after the last, and None if nothing came for `timeout`.

        Args:
            timeout: Seconds; the first call's is that of all.

        Raises:
            ApiError: The answer has failed.
        """
        if self._late is None:
            self._late = Overdue(timeout, self._news.set)
        self._late.acted = False
        self._late.begin()
        while not self._waiting and self._error is None and self.unfinished and not self._late.acted:
            self._news.clear()
            await self._news.wait()
        self._late.end()
        deltas, self._waiting = self._waiting, []
        if not deltas and self._error is not None:
            raise self._error
        return None if not deltas and self._late.acted else deltas

    def close(self) -> None:
        """Nobody waits for it any more."""
        if self._late is not None:
            self._late.close()

    async def all(self) -> AsyncIterator[Delta]:
        while deltas := await self.next():
            for delta in deltas:
                yield delta


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """One delta for each sequence, as its deltas come to."""
    deltas = list(deltas)
    if len(deltas) == 1:  # so it is with most tokens
        return deltas
    of_sequences: dict[tuple[int, int], list[Delta]] = {}
    for delta in deltas:
        of_sequences.setdefault((delta.index, delta.output_index), []).append(delta)
    return [_merged(several) for several in of_sequences.values()]


def _merged(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    asked = first.logprobs is not None
    return dataclasses.replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(found for delta in deltas for found in delta.logprobs or ()) if asked else None,
        prompt_logprobs=first.prompt_logprobs,
    )
