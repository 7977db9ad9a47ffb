"""The engine over a simulated device: launches run one after another, and each takes as long as it has tokens."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.kv_pool import KVGroupSpec
from jattn.serving.engine import Engine
from jattn.serving.executor import executor as executor_module
from jattn.serving.steps.plain import StepOutput


class Sizes(nnx.Module):
    """A model that has sizes and computes zeros."""

    vocab_size = 8
    context_len = 2**16
    attention_layers = ()
    kv_groups = (KVGroupSpec(name="all", num_layers=1, num_kv_heads=1, head_dim=1),)

    @classmethod
    def from_checkpoint(cls, checkpoint, *, dtype, parallel):
        raise NotImplementedError

    def __call__(self, forward_batch, metadata, backend, pool):
        return jnp.zeros((forward_batch.input_ids.shape[0], 1)), pool

    def compute_logits(self, hidden):
        return jnp.zeros((hidden.shape[0], self.vocab_size))


class SimulatedDevice:
    """Stands for the compiled steps of `engine`, with a clock of its own; the host takes no time."""

    def __init__(self, config, monkeypatch):
        self._num_rows = config.max_num_seqs
        self._ends = [0]
        self.now = 0
        self.prefills = []  # tokens of each, without and with padding
        monkeypatch.setattr(executor_module, "compile_steps", lambda plans, **options: self)
        monkeypatch.setattr(executor_module, "packed", lambda arrays: arrays)
        self.engine = Engine(Sizes(), config)

    def __call__(self, key, weights, state, pool, *arguments):
        (sent,) = arguments
        plan, *prompts = sent if key.kind == "prefill" else [sent]
        num_tokens = int(np.sum(plan[:, 0] < self._num_rows)) + sum(int(batch.cu_q_lens[-1]) for batch in prompts)
        if prompts:
            assert num_tokens <= key[1]
            self.prefills.append((num_tokens, key[1]))
        self._ends.append(max(self.now, self._ends[-1]) + num_tokens)
        return state, pool, StepOutput(tokens=jnp.ones(self._num_rows if prompts else len(plan), jnp.int32))

    def step(self):
        """The engine's events; `now` is then when the last of the launches that it waited for has ended."""
        events = self.engine.step()
        self.now = max(self.now, self._ends[-1 - len(self.engine.executor.in_flight)])
        return events
