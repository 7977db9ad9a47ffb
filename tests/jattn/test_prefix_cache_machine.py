"""The prefix cache under everything that may happen to requests: no key of another text is read, no page is lost."""

import contextlib
import dataclasses
import random
from collections import Counter
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jattn.page_lists import AttentionSpan
from jattn.serving.config import EngineConfig
from jattn.serving.request import SamplingParams
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.drafting import NgramDrafting
from tests.jattn.harness.simulated_pool import simulated_engine

# Of window layers beside full ones.
SPANS = (
    (),
    (AttentionSpan(window_left=0),),
    (AttentionSpan(window_left=2),),
    (AttentionSpan(window_left=7),),
    (AttentionSpan(chunk_size=4),),
    (AttentionSpan(window_left=1), AttentionSpan(chunk_size=6)),
)
TOKENS = st.lists(st.integers(0, 2), max_size=9)


@contextlib.contextmanager
def scarce_windows():
    """Window lists have as few pages as one row needs."""
    window_lists = ResolvedConfig.window_lists_beside

    def of_one_row(self, num_pages):
        return window_lists(dataclasses.replace(self, max_num_seqs=1, enable_prefix_caching=False), num_pages)

    with mock.patch.object(ResolvedConfig, "window_lists_beside", of_one_row):
        yield


class PrefixCacheMachine(RuleBasedStateMachine):
    """An engine over a simulated pool, and whoever asks it for texts."""

    @initialize(
        sizes=st.fixed_dictionaries(
            {
                "page_size": st.integers(1, 4),
                "num_pages": st.integers(4, 25),
                "max_num_seqs": st.integers(1, 5),
                "prefill_tokens": st.integers(2, 12),
                "prefill_seqs": st.integers(1, 3),
                "max_chunk_tokens": st.sampled_from([None, None, 1, 3]),
                "mixed_steps": st.booleans(),
            }
        ),
        num_draft_tokens=st.sampled_from([0, 0, 1, 3]),
        spans=st.sampled_from(SPANS),
        is_scarce=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def make_engine(self, sizes, num_draft_tokens, spans, is_scarce, seed):
        drafter = NgramDrafting(num_draft_tokens=num_draft_tokens) if num_draft_tokens else None
        config = EngineConfig(**sizes, max_context_len=48, speculative=drafter)
        with scarce_windows() if is_scarce else contextlib.nullcontext():
            self.engine = simulated_engine(config, seed, spans)
        self.requests = []

    @property
    def live(self):
        return [request for request in self.requests if not request.finished]

    @rule(
        beginning=st.integers(0, 99),
        length=st.integers(0, 30),
        more=TOKENS,
        copies=st.sampled_from([1, 1, 2, 4]),
        salt=st.sampled_from([None, None, "a", "b"]),
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def ask(self, beginning, length, more, copies, salt, max_tokens, stops, prompt_logprobs):
        """A text of its own, or one that begins as another does."""
        prompt = list(more)
        if self.requests:
            prompt = self.requests[beginning % len(self.requests)].tokens[:length] + prompt
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=(2,) if stops else (), prompt_logprobs=prompt_logprobs
        )
        for _ in range(copies):
            try:
                request = self.engine.make_request(prompt, params, cache_salt=salt)
            except ValueError:
                return
            self.engine.add(request)
            self.requests.append(request)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            try:
                self.engine.step()
            except KeyboardInterrupt:
                return

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        self.engine.abort(self.live[which % len(self.live)])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def break_down(self, which):
        self.engine.executor.broken.add(self.live[which % len(self.live)])

    @precondition(lambda self: self.live)
    @rule(when=st.sampled_from(["before", "after"]))
    def interrupt(self, when):
        self.engine.executor.interrupt = when

    @rule()
    def reset(self):
        was_reset = self.engine.reset_prefix_cache()
        assert was_reset != any(request.pages for request in self.requests)
        if was_reset:
            assert not any(self.found(request) for request in self.requests)

    @invariant()
    def pages_are_free_or_owned(self):
        for number, pages in enumerate(self.engine.kv_cache._lists):
            lists = [request.page_lists[number] for request in self.live if request.page_lists]
            owned = Counter(page for own in lists for page in own if page)
            assert all(len(set(own) - {0}) == len(own) - own.count(0) for own in lists)
            assert len(owned) + pages.num_free == pages.num_pages
            assert number or not any(0 in own for own in lists)
        assert not any(request.page_lists for request in self.requests if request.finished)

    @invariant()
    def pages_on_record_hold_what_the_record_says(self):
        if self.engine._cut_short:  # the next step starts over first
            return
        page_size = self.engine.config.page_size
        for request in self.requests:
            texts = self.engine.executor.path(request, request.tokens)
            for i, found in enumerate(self.found(request)):
                for number, pages in enumerate(self.engine.kv_cache._lists):
                    entry = pages.find(found.id) if number else found
                    text = texts[i * page_size : (i + 1) * page_size]
                    assert entry is None or self.engine.executor.holds(entry.page, text, number)

    def found(self, request):
        kv_cache = self.engine.kv_cache
        contents = kv_cache._contents(request, 0, request.num_tokens // kv_cache.page_size)
        return kv_cache._lists[0].match([request.cache_salt], contents)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.executor.interrupt = None
        steps = 0
        while self.engine.has_work:
            self.engine.step()
            steps += 1
            assert steps < 2000
        self.check_texts()
        assert self.engine.reset_prefix_cache()
        assert not any(pages.num_entries for pages in self.engine.kv_cache._lists)
        assert all(len(pages._free) == pages.num_pages for pages in self.engine.kv_cache._lists)

    def check_texts(self):
        executor = self.engine.executor
        for request in self.requests:
            *_, text = executor.path(request, request.prompt)
            for token in request.generated:
                assert token == executor.following(text)
                text = executor.node(text, token)
            if request.finish_reason in ("stop", "length"):
                is_stopped = request.generated[-1] in request.stop_ids
                assert request.finish_reason == ("stop" if is_stopped else "length")
                assert is_stopped or request.num_tokens == request.limit


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(
    max_examples=30, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)


def test_random_traffic_hits_and_meets_everything_that_may_happen():
    """So that the machine is known to go where it can find something."""
    met, hits = Counter(), Counter()
    for seed in range(12):
        rng = random.Random(seed)
        machine = PrefixCacheMachine()
        sizes = {
            "page_size": rng.randint(1, 4),
            "num_pages": rng.randint(4, 25),
            "max_num_seqs": rng.randint(1, 5),
            "prefill_tokens": rng.randint(2, 12),
            "prefill_seqs": rng.randint(1, 3),
            "max_chunk_tokens": rng.choice([None, None, 1, 3]),
            "mixed_steps": rng.random() < 0.5,
        }
        machine.make_engine(sizes, rng.choice([0, 0, 1, 3]), SPANS[seed % len(SPANS)], seed % 4 > 1, seed)
        for _ in range(30):
            machine.ask(
                beginning=rng.randrange(99),
                length=rng.randrange(30),
                more=rng.choices(range(3), k=rng.randrange(9)),
                copies=rng.choice([1, 1, 2, 4]),
                salt=rng.choice([None, None, "a", "b"]),
                max_tokens=rng.randint(1, 12),
                stops=rng.random() < 0.5,
                prompt_logprobs=rng.choice([None, None, None, 0]),
            )
            machine.step(rng.randint(1, 6))
            if machine.live and rng.random() < 0.2:
                rng.choice([machine.abort, machine.break_down])(rng.randrange(99))
            if machine.live and rng.random() < 0.05:
                machine.interrupt(rng.choice(["before", "after"]))
            machine.pages_are_free_or_owned()
            machine.pages_on_record_hold_what_the_record_says()
        machine.teardown()
        stats = machine.engine.kv_cache.prefix_cache_stats
        hits.update(vars(stats))
        met.update(request.finish_reason for request in machine.requests)
        met["preempted"] += sum(request.num_preemptions for request in machine.requests)
    assert min(hits.values()) > 100
    assert min(met.values()) > 10
    assert hits["hits"] > hits["queries"] // 5
