"""An executor without a device: each slot of its pool holds which text wrote it, and every row checks what it reads.

Of a page list of a window a row reads what its first query sees and what comes after it.

Launches run when they are submitted and are read later, as on a device that keeps up. In a launch all keys are written
before any is read.
"""

import dataclasses
import random
from collections import deque
from copy import deepcopy
from unittest import mock

from jattn.page_lists import ALL_KEYS
from jattn.serving import engine as engine_module
from jattn.serving.engine import Engine
from jattn.serving.executor.idle_time import IdleTime
from jattn.serving.executor.launch import Given
from tests.jattn.harness.simulated_device import Sizes


@dataclasses.dataclass
class Row:
    """A row of the loop state: the text that the device has of it, and its page tables."""

    request: object
    tokens: list
    page_lists: list
    finished: bool = False


class Launch(list):
    """What it gives each request."""

    def prompt_logprobs(self):
        return ()

    def given(self):
        return [given for given in self if not given.request.finished]


class SimulatedPool:
    """Stands for the `Executor`.

    Attributes:
        broken: Requests whose next token is not finite.
        interrupt: Whether the next launch is cut short; "before" it runs or "after".
    """

    def __init__(self, config, rng):
        self.in_flight, self.idle_time = deque(), IdleTime()
        self.broken, self.interrupt = set(), None
        self.config, self._rng = config, rng
        self._nodes = {}
        self._forget_all()

    def node(self, text, token):
        """A number for `text` and the token after it; a text is its last number."""
        return self._nodes.setdefault((text, token), len(self._nodes))

    def following(self, text):
        """The token that the model chooses after a text."""
        return text * 2654435761 // 128 % 3

    def path(self, request, tokens):
        """The texts that end with each of the tokens; other salts have other texts."""
        texts = [("salt", request.cache_salt)]
        for token in tokens:
            texts.append(self.node(texts[-1], token))
        return texts[1:]

    def holds(self, page, texts, page_list=0):
        """Whether the keys of a page are those of these texts, one a slot."""
        slots = range(page * self.config.page_size, (page + 1) * self.config.page_size)
        return all([pool.get((page_list, slot)) for slot in slots] == texts for pool in self._pools)

    def may_mix(self, decoding):
        return self.config.mixed_steps and len(decoding) <= self.config.prefill_tokens // 2

    def submit(self, plan):
        if self.interrupt == "before":
            raise KeyboardInterrupt
        launch = Launch()
        reading = [self._begin_chunk(chunk) for chunk in plan.chunks]
        runs = [run for request in plan.decoding if (run := self._begin_decode(request))]
        for row, texts, first in reading:
            for pool in self._pools:
                self._read(pool, row, texts, first)
        for row, texts, drafts in runs:
            self._read(self._pools[0], row, texts, len(texts) - len(drafts) - 1)
        for chunk, (row, texts, _) in zip(plan.chunks, reading, strict=True):
            if chunk.is_last:
                launch.append(self._given(row, texts, drafts=None))
        launch += [self._given(row, texts, drafts) for row, texts, drafts in runs]
        self.in_flight.append(launch)
        if self.interrupt == "after":
            raise KeyboardInterrupt
        return launch

    def sample(self):
        return []

    def read(self, keep):
        while len(self.in_flight) > keep:
            yield self.in_flight.popleft()

    def restart(self):
        self.in_flight.clear()
        self.interrupt = None
        self._forget_all()

    def _forget_all(self):
        drafts = bool(self.config.num_draft_tokens)
        self._pools = [{} for _ in range(1 + drafts)]  # the second one is a draft model's
        self._rows = {}

    def _begin_chunk(self, chunk):
        request = chunk.request
        before = self._rows.get(request.row)
        if chunk.begin:
            assert before.request is request
            assert len(before.tokens) == chunk.begin
        assert chunk.begin <= chunk.start < chunk.stop <= request.num_tokens
        row = self._rows[request.row] = Row(request, request.tokens[: chunk.stop], deepcopy(request.page_lists))
        texts = self.path(request, row.tokens)
        for pool in self._pools:
            self._write(pool, row, texts, range(chunk.start, chunk.stop))
        return row, texts, chunk.start

    def _begin_decode(self, request):
        row, num_drafts = self._rows[request.row], self.config.num_draft_tokens
        assert row.request is request
        if row.finished:
            return None
        row.page_lists = deepcopy(request.page_lists)
        newest, drafts = len(row.tokens) - 1, []
        texts = self.path(request, row.tokens)
        for _ in range(num_drafts):
            is_right = self._rng.random() < 0.6
            drafts.append(self.following(texts[-1]) if is_right else 7)
            texts.append(self.node(texts[-1], drafts[-1]))
        if drafts:
            self._write(self._pools[1], row, texts, range(max(0, newest - 1), newest + num_drafts))
            self._read(self._pools[1], row, texts[: newest + num_drafts], max(0, newest - 1))
        self._write(self._pools[0], row, texts, range(newest, newest + 1 + num_drafts))
        return row, texts, drafts

    def _given(self, row, texts, drafts):
        """The tokens chosen at each place, as long as the drafted ones before it are the chosen ones."""
        request, tokens = row.request, []
        for i, text in enumerate(texts[len(texts) - len(drafts or ()) - 1 :]):
            token = self.following(text)
            is_broken = request in self.broken
            tokens.append(None if is_broken else token)
            row.tokens.append(token)
            row.finished = is_broken or token in request.stop_ids or len(row.tokens) >= request.limit
            if row.finished or not drafts or i == len(drafts) or drafts[i] != token:
                break
        return Given(request, tokens, None, *(() if drafts is None else (len(drafts), len(tokens) - 1)))

    def _write(self, pool, row, texts, places):
        for number in range(len(row.page_lists)):
            for place in places:
                pool[self._slot(row, number, place)] = texts[place]

    def _read(self, pool, row, texts, first):
        """What queries from a place on see."""
        for number, span in enumerate((ALL_KEYS, *self.config.windows)):
            begin = max(0, first - min(first, span.most_keys - 1))
            if span.chunk_size is not None:
                begin = first - first % span.chunk_size
            for place in range(int(begin), len(texts)):
                found = pool.get(self._slot(row, number, place))
                assert found == texts[place], f"the key at {place} of list {number} is not of this text"

    def _slot(self, row, number, place):
        page, offset = divmod(place, self.config.page_size)
        assert row.page_lists[number][page], f"page {page} of list {number} went back too early"
        return number, row.page_lists[number][page] * self.config.page_size + offset


def simulated_engine(config, seed, spans=()):
    """An engine over a simulated pool.

    Args:
        spans: Of window layers that the model has beside full ones.
    """
    model = Sizes()
    model.kv_groups = tuple(dataclasses.replace(Sizes.kv_groups[0], span=span) for span in (ALL_KEYS, *spans))
    with mock.patch.object(
        engine_module, "Executor", lambda model, config, **_: SimulatedPool(config, random.Random(seed))
    ):
        return Engine(model, config)
