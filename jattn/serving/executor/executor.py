"""The executor: compiled steps, and all that they work on; it runs plans on the device, in order."""

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax

from jattn.compiled_steps import CompiledSteps, StepPlan, described, smallest_bucket
from jattn.device_mesh import held_by_all, spans_processes
from jattn.lowering import LoweringProcesses, processes_for
from jattn.mailbox import mailbox_of
from jattn.model import CausalLM
from jattn.parallel import NO_TOKEN
from jattn.serving.executor.background import BackgroundCompilation
from jattn.serving.executor.batches import decode_batch, prefill_batch
from jattn.serving.executor.checks import check_decode, check_prefill
from jattn.serving.executor.first_runs import FirstRuns
from jattn.serving.executor.idle_time import IdleTime
from jattn.serving.executor.last_sent import LastSent
from jattn.serving.executor.launch import Forward, Launch, LaunchStats, wait_for_all
from jattn.serving.executor.masks import masks_of
from jattn.serving.executor.memory import MemoryUse, memory_use
from jattn.serving.executor.mixing import LONGEST_MIXED
from jattn.serving.executor.notes import behind_notes, note_launches
from jattn.serving.executor.pool_memory import fitting_pool
from jattn.serving.executor.pool_size import beside_steps
from jattn.serving.executor.scores import scores_of
from jattn.serving.executor.served_model import check_loaded, served_model
from jattn.serving.executor.state import made_state
from jattn.serving.executor.step_plans import (
    StepKey,
    in_order_of_need,
    largest_steps,
    note_key,
    score_key,
    step_key,
    step_keys,
    step_plans,
)
from jattn.serving.executor.structured_plans import forward_key, sample_key, structured_plans
from jattn.serving.plan import Plan
from jattn.serving.request import Request
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.steps.packing import packed
from jattn.step_compilation import COMPILING_AT_ONCE, compile_steps
from jattn_kernels.call import default_device


class Executor:
    """Runs plans with one model: `submit` enqueues a launch, `read` waits for the oldest ones.

    Of a launch that gives tokens to requests with a grammar, `submit` enqueues the forward pass alone, and `sample` the
    choice of tokens, once all launches before it are read and the grammars have followed.

    A call that raises may have consumed pool and loop state: `restart` makes new ones, without any request's keys.

    Args:
        model: The model; its weights stay on the device.
        config: Sizes.
        draft_model: The one that a `DraftModel` drafts with; else None.
        fit_pool: Whether the pool has as many pages as fit beside the steps, in place of the configured number,
            unless several processes share the model.

    Raises:
        ValueError: Pool or loop state do not fit the memory, or the model is not shared by as many devices.

    Attributes:
        config: Sizes, with the pool's.
        stats: Counts of launches.
        idle_time: What the device waited for the host amid work.
        background: What is compiled while others serve; until it is, a launch takes the next larger step.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ResolvedConfig,
        *,
        draft_model: CausalLM | None = None,
        fit_pool: bool = False,
    ):
        served = served_model(model, config, draft_model=draft_model)
        self.weights, steps, self._mixed_rows = served.weights, served.steps, served.mixed_rows
        check_loaded(self.weights, config)
        in_background = compiles_in_background(config)
        have, processes = CompiledSteps({}), LoweringProcesses(_num_processes(config, in_background))
        if fit_pool and not spans_processes(config.parallel):  # where it does, each would find another number
            config, have = beside_steps(served, config, model.vocab_size, processes)
        self.config = config
        self._make_pool = functools.partial(fitting_pool, served.kv_groups, config)
        self._make_state = functools.partial(made_state, config, model.vocab_size)
        self.state = self._make_state()
        # While steps are compiled the pool's memory is free again: XLA tries their products there.
        shapes = jax.tree.map(described, (self.weights, self.state, self._make_pool()))
        plans = step_plans(steps, shapes, config, self._mixed_rows)
        arguments = (steps, shapes, config, self._mixed_rows, model.vocab_size)
        self._structured_plans = functools.partial(structured_plans, *arguments)
        self._vocab_size = model.vocab_size
        self._preparing = threading.Lock()
        self._is_prepared = config.structured_steps
        plans |= self._structured_plans() if config.structured_steps else {}
        self._merging = threading.Lock()
        self._mailbox = mailbox_of(config.parallel)
        self._turn = contextlib.nullcontext() if self._mailbox is None else self._mailbox.turn
        self._emptied = 0 if self._mailbox is None else self._mailbox.emptied
        self._first_runs = None if self._mailbox is None else FirstRuns(self._mailbox)
        self._expect_first_runs(plans)
        self.compiled_steps, later = _compiled(plans, config, have, processes, in_background)
        self.pool = self._make_pool()
        self._run_first(plans)
        self.background = BackgroundCompilation(len(later))
        if later:
            # Without a reference to the executor, which may go while steps are compiled for it.
            self.background.start(later, functools.partial(_add_steps, weakref.ref(self)), processes)
            weakref.finalize(self, self.background.stop)
        else:
            processes.close()
        self.in_flight: deque[Launch] = deque()
        self._forwards: deque[Forward] = deque()
        self.stats, self.idle_time = LaunchStats(), IdleTime()
        self._on_device = self._nothing_sent()  # a row's last pages are the same for `page_size` steps
        # Also at exit: the interpreter dies if it takes down what a launch still uses.
        self._finalizer = weakref.finalize(self, wait_for_all, self.in_flight, self._forwards)

    def may_mix(self, decoding: Sequence[Request]) -> bool:
        """Whether one launch can decode these requests beside prompts, and gains by it."""
        return len(decoding) <= self._mixed_rows and all(request.num_tokens <= LONGEST_MIXED for request in decoding)

    def prepare_structured(self) -> None:
        """Compiles the steps of launches with grammars, unless they are; from any thread, while others run."""
        with self._preparing:
            if not self._is_prepared:
                plans = self._structured_plans()
                self._expect_first_runs(plans)
                self.add_steps(compile_steps(plans, progress=self.config.progress))
                self._is_prepared = True

    def add_steps(self, steps: CompiledSteps) -> None:
        """Takes more steps, from any thread."""
        with self._merging:
            self.compiled_steps = self.compiled_steps | steps

    def memory_use(self) -> MemoryUse:
        """What the engine has of the device's memory, with the steps that there are by now."""
        assert self.pool is not None
        return memory_use(self.weights, self.pool, self.state, self.compiled_steps)

    def submit(self, plan: Plan) -> None:
        """Enqueues a launch, or its forward pass."""
        self.idle_time.look()
        if plan.chunks:
            self._submit_prefill(plan)
        else:
            self._submit_decode(plan.decoding)

    def sample(self) -> list[Request]:
        """Enqueues the choice of tokens behind each forward pass, under the masks that the grammars give now.

        Returns:
            The requests with a grammar among them; one whose grammar has ended is given a token of no meaning.
        """
        requests = []
        while self._forwards:
            forward = self._forwards[0]
            masks = masks_of(forward.requests, forward.sample_key.size, self._vocab_size)
            self._run_first((forward.sample_key,))
            self.idle_time.look()
            self.state, output = self._enqueue(forward.sample_key, self.weights, self.state, forward.output, masks)
            self.idle_time.enqueued(output.tokens)
            self._enqueued(forward.sampled(output))
            self._forwards.popleft()
            requests += [request for request in forward.requests if request and request.grammar]
        return [request for request in requests if not request.finished]

    def read(self, keep: int) -> Iterator[Launch]:
        """The launches under way, oldest first, but for the `keep` newest: each once it has run.

        Raises:
            RuntimeError: A device waited in vain for another one, in this engine's launches or in another's.
        """
        while len(self.in_flight) > keep:
            start = time.perf_counter()
            launch = self.in_flight[0].read()  # under way until it is read: `restart` waits for it
            self.stats.waited_seconds += time.perf_counter() - start
            self.idle_time.look()
            if self._mailbox is not None and NO_TOKEN in launch.output.tokens:
                self._mailbox.check()
                if self._mailbox.emptied != self._emptied:
                    raise RuntimeError(
                        "A device waited in vain for another one, and another engine on them has begun anew since: "
                        "what this engine's launches computed meanwhile is NaN."
                    )
            self.in_flight.popleft()
            yield launch

    def restart(self) -> None:
        """Forgets all launches, after they have run, and begins with a new pool and state."""
        wait_for_all(self.in_flight, self._forwards)
        self.in_flight.clear()
        self._forwards.clear()
        self.idle_time.no_work()
        self.pool = self.state = None  # their memory is needed for the new ones
        if self._mailbox is not None:
            self._mailbox.empty()  # devices may have got out of step
            self._emptied = self._mailbox.emptied
        self.pool, self.state = self._make_pool(), self._make_state()
        self._on_device = self._nothing_sent()  # what was sent may be what failed

    def _nothing_sent(self) -> LastSent:
        sent = LastSent(held_by_all(self.config.parallel))
        sent.prepare(decode_batch([], size, self.config) for size in self.config.decode_buckets)
        return sent

    def _submit_decode(self, requests: Sequence[Request]) -> None:
        key = self._key("decode", len(requests), requests, requests)
        rows = decode_batch(requests, key.size, self.config)
        if self.config.debug_checks:
            assert self.state is not None
            check_decode(self.state, rows, self.config)
        self._launch(key, Plan(requests), requests, self._on_device(rows))

    def _submit_prefill(self, plan: Plan) -> None:
        for parts in note_launches(plan.chunks, self.config):
            key = note_key(self.config)
            notes = prefill_batch(parts, key.size, self.config, key.variant)
            self.state = self._enqueue(key, self.state, packed((notes,)))
        plan = dataclasses.replace(plan, chunks=behind_notes(plan.chunks, self.config))
        num_tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks) + len(plan.decoding)
        giving = [*plan.decoding, *(chunk.request for chunk in plan.chunks if chunk.is_last)]
        served = [*plan.decoding, *(chunk.request for chunk in plan.chunks)]
        key = self._key("prefill", num_tokens, served, giving)
        rows = decode_batch(plan.decoding, self._mixed_rows, self.config)
        batch = prefill_batch(plan.chunks, key.size, self.config, key.variant)
        if self.config.debug_checks:
            assert self.state is not None
            check_prefill(self.state, rows, batch, self.config)
        by_row = {request.row: request for request in giving}
        requests = [by_row.get(row) for row in range(self.config.max_num_seqs)]
        self._launch(key, plan, requests, packed((rows, batch)))

    def _key(
        self, kind: Literal["decode", "prefill"], size: int, served: Sequence[Request], giving: Sequence[Request]
    ) -> StepKey:
        """The smallest step that is ready and serves requests, or its forward pass if one that is given a token has a
        grammar."""
        buckets = self.config.decode_buckets if kind == "decode" else self.config.prefill_buckets
        while True:
            bucket = smallest_bucket(buckets, size)
            if any(request.grammar for request in giving):
                key = forward_key(kind, bucket, self.config)
            else:
                key = step_key(kind, bucket, served, self.config)
            if not self.background.left and not self.background.failed:
                return key
            if bucket == buckets[-1] or key in self.compiled_steps:
                return key
            size = bucket + 1

    def _launch(self, key: StepKey, plan: Plan, requests: Sequence[Request | None], *arguments: Any) -> None:
        """Enqueues a step.

        It consumes the state and pool that the launch before it gives, so launches run in this order on the device: a
        page freed while a launch still writes to it is safe in the hands of its next owner.
        """
        self._run_first((key,))
        self.stats.launches += 1
        self.stats.found_idle += self.idle_time.look()
        self.state, self.pool, output = self._enqueue(key, self.weights, self.state, self.pool, *arguments)
        score = functools.partial(self._enqueue, score_key(self.config), self.weights, output.prompt_hidden)
        scores = scores_of(plan.chunks, score_key(self.config).size, score)
        output = dataclasses.replace(output, prompt_hidden=None)
        if key.kind in ("forward_decode", "forward_prefill"):
            self.idle_time.enqueued(output.hidden)
            self._forwards.append(Forward(output, sample_key(key, self.config), requests, scores))
        else:
            self.idle_time.enqueued(output.tokens)
            self._enqueued(Launch(output, requests, scores))

    def _enqueue(self, key: StepKey, *arguments: Any) -> Any:
        """Enqueues a step: on all devices before another engine's on any."""
        with self._turn:
            return self.compiled_steps(key, *arguments)

    def _expect_first_runs(self, plans: dict[Any, StepPlan]) -> None:
        if self._first_runs is not None:
            self._first_runs.expect(plans)

    def _run_first(self, keys: Iterable[StepKey]) -> None:
        """Runs steps that have not run yet as a first run is to be."""
        if self._first_runs is not None:
            held = self.weights, self.state, self.pool
            with self._turn:
                self.state, self.pool = self._first_runs.run(keys, self.compiled_steps, *held)

    def _enqueued(self, launch: Launch) -> None:
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), (launch.output, launch.logprobs))
        self.in_flight.append(launch)


def compiles_in_background(config: ResolvedConfig) -> bool:
    """Whether smaller steps are compiled while larger ones serve."""
    if config.compile_in_background is not None:
        return config.compile_in_background
    # On a CPU they would take it from those that serve; so few that none waits for another come as soon as the largest.
    return default_device().platform == "gpu" and len(step_keys(config)) > COMPILING_AT_ONCE


def _num_processes(config: ResolvedConfig, in_background: bool) -> int:
    """How many lower the steps of an engine; half as many beside others that are served."""
    return processes_for(len(step_keys(config)), most=4 if in_background else 8)


def _compiled(
    plans: dict[Any, StepPlan],
    config: ResolvedConfig,
    have: CompiledSteps,
    processes: LoweringProcesses,
    in_background: bool,
) -> tuple[Any, dict[Any, StepPlan]]:
    """The steps without which nobody is served, and those that are on disk; and the plans of the others."""
    only = largest_steps(plans) if in_background else None
    steps = compile_steps(plans, progress=config.progress, only=only, have=have, processes=processes)
    if only is None:
        return steps, {}
    left = in_order_of_need(key for key in plans if key not in steps)
    return steps, {key: plans[key].without_arrays() for key in left}


def _add_steps(executor: "weakref.ref[Executor]", steps: CompiledSteps) -> None:
    found = executor()
    if found is not None:
        found.add_steps(steps)
