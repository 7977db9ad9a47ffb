"""The rows of the record: named workloads of decode, of extend, of mixtures of experts and of whole steps."""

import dataclasses
import itertools

from bench.latent_workload import ExpandedWorkload, LatentWorkload
from bench.mixture_workload import MixtureShapes, MixtureWorkload
from bench.shared_prefix import SharedPrefixWorkload
from bench.step_workload import StepWorkload
from bench.workloads import AttentionWorkload, Batch
from jattn_kernels.spec import PageLayout

_PAGES: tuple[tuple[int, PageLayout], ...] = ((64, "NHD"), (16, "HND"), (64, "HND"))
_PRECISIONS = (("bf16", None), ("fp8_e4m3", None), ("fp8_e4m3", "fp8_e4m3"))
_DECODE_SHAPES: tuple[tuple[Batch, int], ...] = (
    (1, 8192),
    (1, 131072),
    (8, 8192),
    (32, 4096),
    (64, 8192),
    (128, 2048),
    (256, 1024),
    ("ragged64", 0),
)

# The decode rows of the peers' file, then other pages and layouts.
DECODE: tuple[AttentionWorkload, ...] = (
    *(
        AttentionWorkload(batch=batch, ctx=ctx, hq=hq, kv=kv)
        for kv, hq in itertools.product(("bf16", "fp8_e4m3"), (32, 64))
        for batch, ctx in _DECODE_SHAPES
    ),
    *(
        AttentionWorkload(batch=batch, ctx=ctx, page=page, layout=layout)
        for batch, ctx in ((8, 8192), (64, 8192))
        for page, layout in _PAGES
    ),
)

# What decode does besides, each beside the plain row of as many keys.
DECODE_FEATURES: tuple[AttentionWorkload, ...] = (
    *(AttentionWorkload(batch=batch, ctx=ctx) for batch, ctx in ((1, 1024), (4, 512))),
    AttentionWorkload(batch=32, ctx=32768, window=4095),
    AttentionWorkload(batch=32, ctx=32768, chunk=4096),
    *(AttentionWorkload(batch=batch, ctx=ctx, invariant=True) for batch, ctx in ((1, 8192), (32, 4096), (64, 8192))),
    *(SharedPrefixWorkload(batch=64, ctx=ctx, prefix=prefix) for ctx, prefix in ((2048, 1024), (8192, 7680))),
    *(AttentionWorkload(batch=64, ctx=8192, verify=tokens) for tokens in (4, 8, 16)),
    AttentionWorkload(batch=32, ctx=4096, rope=True),
    *(AttentionWorkload(batch=64, ctx=8192, page=page) for page in (8, 128)),
    *(AttentionWorkload(batch=64, ctx=8192, d=d) for d in (64, 256)),
    AttentionWorkload(batch=32, ctx=4096, hkv=32),
    AttentionWorkload(batch=64, ctx=32768, hkv=1),
    *(AttentionWorkload(batch=64, ctx=8192, kv="fp8_e4m3", page=64, layout=layout) for layout in ("NHD", "HND")),
)

EXTEND: tuple[AttentionWorkload, ...] = tuple(
    AttentionWorkload(batch=batch, ctx=ctx, q_tokens=q, page=page)
    for page in (16, 64)
    for batch, q, ctx in ((1, 8192, 8192), (4, 4096, 4096), (1, 32768, 32768), (8, 1024, 8192))
)

# What extend does besides: short prompts, other widths, hidden keys, decodes beside prompts and the two launches apart,
# fp8 pages with bf16 and with fp8 queries, rotation in the kernel, a prompt's own keys in a pass of their own, and
# results that do not depend on chunks or neighbours.
EXTEND_FEATURES: tuple[AttentionWorkload, ...] = (
    *(AttentionWorkload(batch=batch, ctx=ctx, q_tokens=ctx) for batch, ctx in ((16, 512), (64, 128))),
    *(AttentionWorkload(batch=1, ctx=8192, q_tokens=8192, d=d) for d in (64, 256)),
    AttentionWorkload(batch=1, ctx=32768, q_tokens=32768, window=4095),
    AttentionWorkload(batch=1, ctx=131072, q_tokens=131072, chunk=8192),
    AttentionWorkload(batch=16, ctx=8192, q_tokens=8192),
    AttentionWorkload(batch="mixed", ctx=0, q_tokens=0),
    AttentionWorkload(batch=60, ctx=4096),
    AttentionWorkload(batch=4, ctx=2048, q_tokens=2048),
    *(AttentionWorkload(batch=1, ctx=32768, q_tokens=32768, kv="fp8_e4m3", q=q) for q in (None, "fp8_e4m3")),
    AttentionWorkload(batch=1, ctx=8192, q_tokens=8192, rope=True),
    AttentionWorkload(batch=8, ctx=8192, q_tokens=1024, two_passes=True),
    AttentionWorkload(batch=1, ctx=8192, q_tokens=8192, invariant=True),
)

# The rows of the peers' file, some over fp8; short extends behind a prefix; a prompt of heads made of latent rows.
LATENT: tuple[LatentWorkload | ExpandedWorkload, ...] = (
    *(
        LatentWorkload(batch=batch, ctx=ctx, hq=hq)
        for hq in (16, 128)
        for batch, ctx in ((1, 8192), (8, 8192), (32, 8192), (128, 2048))
    ),
    *(
        LatentWorkload(batch=batch, ctx=ctx, hq=hq, kv=kv)
        for kv in ("fp8_e4m3", "fp8_ds_mla")
        for hq in (16, 128)
        for batch, ctx in ((1, 8192), (32, 8192), (128, 2048))
    ),
    *(
        LatentWorkload(batch=1, ctx=8192 + tokens, hq=hq, q_tokens=tokens, page=64)
        for hq in (16, 128)
        for tokens in (32, 128, 512)
    ),
    ExpandedWorkload(tokens=8192, hq=128),
)

# Of these the record says how far the results are from exact ones.
ACCURACY: tuple[AttentionWorkload, ...] = (
    *(AttentionWorkload(batch=8, ctx=8192, kv=kv, q=q) for kv, q in _PRECISIONS),
    *(AttentionWorkload(batch=1, ctx=32768, q_tokens=32768, kv=kv, q=q) for kv, q in _PRECISIONS),
)

STEPS: tuple[StepWorkload, ...] = tuple(
    StepWorkload(batch=batch, ctx=ctx) for batch, ctx in ((1, 1024), (8, 8192), (64, 2048), (256, 1024))
)

MIXTURE_STEPS: tuple[StepWorkload, ...] = tuple(
    StepWorkload(batch=batch, ctx=1024, model="Qwen3-30B-A3B shapes, random bf16") for batch in (1, 8, 64, 256)
)

# Models with experts in fewer bits, what these are held in, and their steps.
QUANTIZED_MIXTURE_STEPS: tuple[tuple[str, str, tuple[StepWorkload, ...]], ...] = (
    (
        "gpt-oss-20b",
        "mxfp4",
        tuple(StepWorkload(batch=batch, ctx=2048, model="gpt-oss-20b shapes, random mxfp4") for batch in (1, 8, 64)),
    ),
    (
        "Qwen3-30B-A3B",
        "fp8",
        (StepWorkload(batch=64, ctx=1024, model="Qwen3-30B-A3B shapes, random fp8"),),
    ),
)

# Of each model that keeps latents.
LATENT_STEPS: tuple[tuple[StepWorkload, ...], ...] = tuple(
    tuple(StepWorkload(batch=batch, ctx=4096, page=64, model=f"{model}, random bf16") for batch in (1, 8, 64))
    for model in ("DeepSeek-V2-Lite shapes", "DeepSeek-V3 shapes cut to 4 layers (1 dense, 3 sparse)")
)

# Also over keys and values in fp8, where these are much of what is read.
_OVER_FP8 = tuple(dataclasses.replace(step, kv="float8_e4m3fn") for step in STEPS if step.batch >= 64)
_QuantizedSteps = tuple[str, tuple[StepWorkload, ...]]  # by what weights are held in


def _quantized(weights: str, steps: tuple[StepWorkload, ...]) -> _QuantizedSteps:
    model = f"Llama-3-8B shapes, random {weights}"
    return weights, tuple(dataclasses.replace(step, model=model) for step in steps)


QUANTIZED_STEPS = tuple(_quantized(weights, (*STEPS, *_OVER_FP8)) for weights in ("fp8", "int4"))
AWQ_STEPS = (_quantized("awq", STEPS),)

_QWEN3 = MixtureShapes(model="Qwen3-30B-A3B", num_experts=128, per_token=8, hidden_size=2048, units=768, layers=4)
_MIXTRAL = MixtureShapes(model="Mixtral-8x7B", num_experts=8, per_token=2, hidden_size=4096, units=14336, layers=2)

# Those of one model stand together: its weights are made once.
MIXTURES: tuple[MixtureWorkload, ...] = (
    *(MixtureWorkload(shapes=_QWEN3, tokens=tokens) for tokens in (1, 8, 64, 256, 2048, 8192)),
    *(
        MixtureWorkload(shapes=_QWEN3, tokens=tokens, draw=draw)
        for tokens, draw in itertools.product((64, 256, 8192), ("same", "zipf"))
    ),
    *(MixtureWorkload(shapes=_MIXTRAL, tokens=tokens) for tokens in (1, 64, 8192)),
)
