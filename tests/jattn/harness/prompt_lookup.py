"""Prompt lookup by its definition, and a count of the steps in which a known text comes."""

import numpy as np

from jattn.serving.request import DraftCounts


def prompt_lookup(text, num_draft_tokens=4, max_ngram=3, min_ngram=1):
    """What followed the last few tokens where they stood last; none if they stood nowhere."""
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(np.array(text), size)
        places = np.flatnonzero((windows[:-1] == windows[-1]).all(axis=1))
        if len(places):
            after = text[places[-1] + size :]
            return [after[i % len(after)] for i in range(num_draft_tokens)]
    return []


def counted(prompt, output, propose):
    """The steps in which `output` comes after `prompt`, its first token by the prefill."""
    counts, done = DraftCounts(), 1
    while done < len(output):
        drafts, left = propose(prompt + output[:done]), output[done:]
        right = 0
        while right < min(len(drafts), len(left)) and drafts[right] == left[right]:
            right += 1
        given = min(right + 1, len(left))
        counts.note_step(given, len(drafts), right)
        done += given
    return counts
