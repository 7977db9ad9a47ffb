"""The record's decode steps: a part's models one after the other, each with its rows."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from bench import decode_step, named_workloads, quantized_step
from bench.step_workload import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3_4_LAYERS,
    GPT_OSS_20B,
    QWEN3_30B_A3B,
    StepWorkload,
)
from jattn_models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from jattn_models.gpt_oss import GptOssForCausalLM
from jattn_models.qwen3_moe import Qwen3MoeForCausalLM

Job = tuple[str, Callable[[], Any]]  # as in gpu_record


class Measures(Protocol):
    """What writes a part's rows; a Recorder does."""

    def measure(self, part: str, jobs: Iterator[Job]) -> None: ...


def record_steps(recorder: Measures, part: str, *, quick: bool) -> None:
    """The decode steps of a part, by what dispatch chooses.

    Args:
        part: `decode_step` of a model without experts, `decode_step_moe` with them, `decode_step_latent` of models
            whose layers read latents, `decode_step_quantized` of one whose projections are held in fewer bits,
            `decode_step_awq` of one in int4 with zero points, `decode_step_moe_quantized` of models whose experts are
            in fewer bits.
    """
    options: dict[str, Any] = {"steps": 50, "repeats": 1} if quick else {}
    recorder.measure(part, _JOBS[part](options))


def _plain(options: dict[str, Any]) -> Iterator[Job]:
    return _of_model(decode_step.random_model, named_workloads.STEPS, options)


def _mixture(options: dict[str, Any]) -> Iterator[Job]:
    make = functools.partial(decode_step.random_model, QWEN3_30B_A3B, Qwen3MoeForCausalLM)
    return _of_model(make, named_workloads.MIXTURE_STEPS, options)


def _latent(options: dict[str, Any]) -> Iterator[Job]:
    models = (DEEPSEEK_V2_LITE, DeepseekV2ForCausalLM), (DEEPSEEK_V3_4_LAYERS, DeepseekV3ForCausalLM)
    for model, table in zip(models, named_workloads.LATENT_STEPS, strict=True):
        yield from _of_model(functools.partial(decode_step.random_model, *model), table, options)


def _quantized(options: dict[str, Any], steps: Any = named_workloads.QUANTIZED_STEPS) -> Iterator[Job]:
    for weights, table in steps:
        model = decode_step.random_model(quantization=weights)
        for workload in table:
            measure = functools.partial(quantized_step.measured, model, weights, workload, **options)
            yield f"{workload.name} {weights}", measure


def _quantized_mixture(options: dict[str, Any]) -> Iterator[Job]:
    models = {"gpt-oss-20b": (GPT_OSS_20B, GptOssForCausalLM), "Qwen3-30B-A3B": (QWEN3_30B_A3B, Qwen3MoeForCausalLM)}
    for name, weights, table in named_workloads.QUANTIZED_MIXTURE_STEPS:
        make = functools.partial(decode_step.random_model, *models[name], quantization=weights)
        yield from _of_model(make, table, options, weights=weights)


def _of_model(
    make: Callable[[], Any], table: tuple[StepWorkload, ...], options: dict[str, Any], *, weights: str | None = None
) -> Iterator[Job]:
    """A model's jobs, whoever still has one of which when the next model is made: the memory has no room for two.

    Args:
        weights: What they are held in, as rows say; None of bf16, of which they say nothing.
    """

    def measured(workload: StepWorkload) -> Any:
        if weights is None:
            return decode_step.measured(held[0], workload, **options)
        return quantized_step.measured(held[0], weights, workload, **options)

    held = [make()]
    for workload in table:
        yield f"{workload.name} {workload.model}", functools.partial(measured, workload)
    held.clear()


_JOBS: dict[str, Callable[[dict[str, Any]], Iterator[Job]]] = {
    "decode_step": _plain,
    "decode_step_moe": _mixture,
    "decode_step_latent": _latent,
    "decode_step_quantized": _quantized,
    "decode_step_awq": functools.partial(_quantized, steps=named_workloads.AWQ_STEPS),
    "decode_step_moe_quantized": _quantized_mixture,
}
