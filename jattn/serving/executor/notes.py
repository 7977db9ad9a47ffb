"""Notes: tokens that no launch computes, as the pool has their keys, and that must be on record all the same."""

import dataclasses
from collections.abc import Sequence

from jattn.serving.plan import Chunk
from jattn.serving.resolved_config import ResolvedConfig


def note_launches(chunks: Sequence[Chunk], config: ResolvedConfig) -> list[list[Chunk]]:
    """What prefills skip and drafting or penalties read, cut and packed into launches of `prefill_tokens`."""
    launches, room = [], 0
    for chunk in chunks:
        begin = chunk.begin if _needs_note(chunk, config) else chunk.start
        while begin < chunk.start:
            if not room:
                launches.append([])
                room = config.prefill_tokens
            stop = min(chunk.start, begin + room)
            launches[-1].append(Chunk(chunk.request, begin, begin, stop, is_last=False))
            room -= stop - begin
            begin = stop
    return launches


def behind_notes(chunks: Sequence[Chunk], config: ResolvedConfig) -> list[Chunk]:
    """The same chunks, once what they skip is on record: their rows have started anew."""
    return [dataclasses.replace(chunk, begin=chunk.start) if _needs_note(chunk, config) else chunk for chunk in chunks]


def _needs_note(chunk: Chunk, config: ResolvedConfig) -> bool:
    reads_record = config.speculative is not None or chunk.request.params.has_penalties
    return reads_record and chunk.begin < chunk.start
