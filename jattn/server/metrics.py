"""Metrics under vLLM's names, so that dashboards, autoscalers and load generators made for it read them unchanged."""

import dataclasses
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jattn.serving.engine import Engine
from jattn.serving.engine_thread import EngineThread, Progress, StepReport
from jattn.serving.request import Request

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.0075),  # finer than vLLM's, which begin at 10 ms: steps take 4 to 9
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 60.0)

_COUNTERS = {
    "prompt_tokens": "Tokens of prompts, cached ones included.",
    "prompt_tokens_cached": "Tokens of prompts whose keys were there before.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the prefix cache.",
    "prefix_cache_hits": "Those of them that were found.",
    "num_preemptions": "Requests that lost their pages to earlier ones.",
    "corrupted_requests": "Requests that ended by an error, as NaN in the logits.",
    "spec_decode_num_drafts": "Steps of a request that verified drafted tokens.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two deliveries of tokens of a request.", _BETWEEN_TOKENS),
    "request_time_per_output_token_seconds": ("Mean time of a token after a request's first.", _BETWEEN_TOKENS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _LATENCY),
    "request_queue_time_seconds": ("From arrival to the first launch.", _LATENCY),
    "request_prefill_time_seconds": ("From the first launch to the first token.", _LATENCY),
    "request_decode_time_seconds": ("From the first token to the last.", _LATENCY),
    "request_inference_time_seconds": ("From the first launch to the last token.", _LATENCY),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Tokens of a request's prompt that were computed.", _TOKENS),
    "request_params_n": ("Sequences asked for of a prompt.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("`max_tokens` of a request, as far as the context goes.", _TOKENS),
    "request_num_preemptions": ("How often a request lost its pages.", (0, 1, 2, 5, 10)),
    "iteration_tokens_total": ("Tokens read after a step.", _STEP_TOKENS),
}
_OWN_COUNTERS = {
    "launches": "Steps that were enqueued on the device.",
    "launches_found_idle": "Those that found the device idle amid work: the host was late.",
    "device_idle_seconds_at_least": "The device had nothing to do amid work, as the host saw.",
    "device_idle_seconds_at_most": "Likewise, the time included since the host had last seen it at work.",
    "host_seconds": "Steps on the host, without its waits for the device.",
}
_LABELS = ("model_name", "engine")


@dataclasses.dataclass
class _Times:
    """Of one request, in seconds of the monotonic clock; 0 before."""

    arrived: float
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0


class Metrics:
    """Counts what happens to requests; for the event loop's thread alone.

    Args:
        model_name: A label.
        engine, thread: Gauges are read off them when somebody asks.

    Attributes:
        compiled: Counts what JAX compiles; from any thread.
    """

    def __init__(self, model_name: str, engine: Engine, thread: EngineThread):
        self._registry = registry = CollectorRegistry()
        self._values = values = (model_name, "0")
        self._times: dict[Request, _Times] = {}
        self._counters = {
            name: Counter(f"vllm:{name}", text, _LABELS, registry=registry).labels(*values)
            for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry).labels(*values)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._step = Histogram(
            "jattn:step_seconds", "A step on the host.", _LABELS, buckets=_STEP, registry=registry
        ).labels(*values)
        self.compiled = Counter("jattn:compiles", "Compilations since the start.", _LABELS, registry=registry).labels(
            *values
        )
        self._own = {
            name: Counter(f"jattn:{name}", text, _LABELS, registry=registry).labels(*values)
            for name, text in _OWN_COUNTERS.items()
        }
        self._own_totals: dict[str, float] = {}
        self._executor = engine.executor
        self._success = Counter(
            "vllm:request_success", "Requests that have ended.", (*_LABELS, "finished_reason"), registry=registry
        )
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused for load.", (*_LABELS, "reason"), registry=registry
        )
        pool = self._pool = engine.kv_cache
        self._cache_queries = self._cache_hits = 0
        gauges = {
            "num_requests_waiting": ("Requests without a row.", lambda: thread.count()[0]),
            "num_requests_running": ("Requests with a row.", lambda: thread.count()[1]),
            "kv_cache_usage_perc": (
                "Share of the pool's pages in use, of the list that has fewest left; 1 is all.",
                lambda: pool.usage,
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"vllm:{name}", text, _LABELS, registry=registry).labels(*values).set_function(read)
        background = engine.executor.background
        for name, text, read in (
            ("steps_to_compile", "Steps that are still compiled in the background.", lambda: background.left),
            ("steps_not_compiled", "Steps of which that failed.", lambda: len(background.failed)),
        ):
            Gauge(f"jattn:{name}", text, _LABELS, registry=registry).labels(*values).set_function(read)
        Gauge(
            "vllm:cache_config_info", "The pool.", (*_LABELS, "block_size", "num_gpu_blocks"), registry=registry
        ).labels(*values, pool.page_size, pool.num_pages).set(1)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(*self._values, reason).inc()

    def arrived(self, of_prompt: Sequence[Request]) -> None:
        """Requests of one prompt."""
        self._observe("request_params_n", len(of_prompt))
        for request in of_prompt:
            self._times[request] = _Times(time.monotonic())
            if request.params.max_tokens is not None:
                self._observe("request_params_max_tokens", request.limit - len(request.prompt))

    def stepped(self, report: StepReport, now: float) -> None:
        self._step.observe(report.seconds)
        if report.num_tokens:
            self._observe("iteration_tokens_total", report.num_tokens)
        for request in report.started:
            if request not in self._times:
                continue
            times = self._times[request]
            times.started = now - report.seconds
            self._observe("request_queue_time_seconds", max(0.0, times.started - times.arrived))
        self._own["host_seconds"].inc(report.host_seconds)
        self._count_launches()
        cache = self._pool.prefix_cache_stats
        self._count("prefix_cache_queries", cache.queries - self._cache_queries)
        self._count("prefix_cache_hits", cache.hits - self._cache_hits)
        self._cache_queries, self._cache_hits = cache.queries, cache.hits

    def _count_launches(self) -> None:
        stats, idle = self._executor.stats, self._executor.idle_time
        totals: dict[str, float] = {
            "launches": stats.launches,
            "launches_found_idle": stats.found_idle,
            "device_idle_seconds_at_least": idle.at_least,
            "device_idle_seconds_at_most": idle.at_most,
        }
        for name, total in totals.items():
            self._own[name].inc(total - self._own_totals.get(name, 0))
        self._own_totals = totals

    def progressed(self, progress: Progress, now: float) -> None:
        request, times = progress.request, self._times[progress.request]
        num_new = progress.num_tokens - times.num_tokens
        if not num_new:
            return
        if not times.num_tokens:
            times.first = now
            self._count("prompt_tokens", len(request.prompt))
            self._count("prompt_tokens_cached", request.num_cached_tokens)
            self._observe("request_prefill_kv_computed_tokens", len(request.prompt) - request.num_cached_tokens)
            self._observe("time_to_first_token_seconds", now - times.arrived)
            self._observe("request_prefill_time_seconds", now - times.started)
        else:
            self._observe("inter_token_latency_seconds", now - times.last)
        self._count("generation_tokens", num_new)
        times.num_tokens, times.last = progress.num_tokens, now

    def ended(self, request: Request, reason: str) -> None:
        times, now = self._times.pop(request), time.monotonic()
        self._success.labels(*self._values, reason).inc()
        self._count("num_preemptions", request.num_preemptions)
        self._count("spec_decode_num_drafts", request.drafts.steps)
        self._count("spec_decode_num_draft_tokens", request.drafts.drafted)
        self._count("spec_decode_num_accepted_tokens", request.drafts.accepted)
        if reason == "error":
            self._count("corrupted_requests", 1)
        self._observe("request_num_preemptions", request.num_preemptions)
        self._observe("request_prompt_tokens", len(request.prompt))
        self._observe("request_generation_tokens", times.num_tokens)
        self._observe("e2e_request_latency_seconds", now - times.arrived)
        if times.num_tokens:
            self._observe("request_decode_time_seconds", times.last - times.first)
            self._observe("request_inference_time_seconds", times.last - times.started)
        if times.num_tokens > 1:
            per_token = (times.last - times.first) / (times.num_tokens - 1)
            self._observe("request_time_per_output_token_seconds", per_token)

    def _count(self, name: str, amount: int | float) -> None:
        if amount:
            self._counters[name].inc(amount)

    def _observe(self, name: str, value: int | float) -> None:
        self._histograms[name].observe(value)
