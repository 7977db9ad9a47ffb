"""EngineConfig: the one list of what an engine can be told; `LLM` and the command line take theirs from it."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from jattn.serving.speculation import Speculation

# The command line prints these lines as help, so nothing here imports jax, which takes seconds.


@dataclasses.dataclass(frozen=True)
class Knob:
    """What a field means.

    Attributes:
        help: For whoever sets it.
        flag: Whether the command line has it.
        choices: What it may be, if it is one of a few names.
    """

    help: str
    flag: bool = False
    choices: tuple[str, ...] = ()


@typing.no_type_check  # it checks its values itself, and takes any integer type
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What is fixed when the steps are compiled. A size that is None follows from the model and the device.

    Raises:
        ValueError: A value is out of its range; what the model has a say in is checked once it is known.
    """

    dtype: Annotated[
        str,
        Knob(
            "What the model computes in: auto is float32 on CPU and bfloat16 elsewhere.",
            flag=True,
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Knob(
            "What the weights of projections are rounded to while they load: fp8, which takes half the bytes of "
            "bfloat16, and rounds each token's activations too, or int4, which takes a quarter; by default they are "
            "held as the checkpoint says.",
            flag=True,
            choices=("fp8", "int4"),
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Knob(
            "What the KV pool stores: auto, which is `dtype`, fp8_e4m3 or fp8_e5m2. An fp8 pool holds two to four "
            "times the tokens, each key and value rounded to a few bits. For models of latent rows, as DeepSeek's, "
            "also fp8_ds_mla: 512 numbers in fp8, a scale for each 128 of them, and what turns in bfloat16.",
            flag=True,
        ),
    ] = "auto"
    tensor_parallel: Annotated[
        int,
        Knob(
            "Devices that share the model: each has some of the heads, hidden units and tokens of the vocabulary.",
            flag=True,
        ),
    ] = 1
    expert_parallel: Annotated[
        bool,
        Knob(
            "Whether these devices have some of a mixture's experts each, in place of some of each expert's units.",
            flag=True,
        ),
    ] = False
    page_size: Annotated[int, Knob("Tokens in a page of the KV pool.", flag=True)] = 16
    rope_scaling: Annotated[
        str | Mapping[str, Any] | None,
        Knob(
            "Scaling of rotary embedding in place of config.json's, for longer texts: an object as that has it, or its "
            "JSON.",
            flag=True,
        ),
    ] = None
    num_pages: Annotated[
        int | None,
        Knob(
            "Pages of the KV pool, the reserved one included; by default what the requests can use, or what fits.",
            flag=True,
        ),
    ] = None
    max_num_seqs: Annotated[int, Knob("Requests served at the same time.", flag=True)] = 8
    max_context_len: Annotated[
        int | None, Knob("Longest request in tokens, prompt included; the model's own by default.", flag=True)
    ] = None
    prefill_tokens: Annotated[
        int,
        Knob("Tokens of a launch with prompts at most, decodes among them; longer prompts come in chunks.", flag=True),
    ] = 256
    prefill_seqs: Annotated[int | None, Knob("Prompts of a launch at most; `max_num_seqs` by default.")] = None
    max_chunk_tokens: Annotated[
        int | None,
        Knob(
            "Tokens of one prompt in a launch at most; all of them by default. A lower number lets short prompts pass "
            "a long one.",
            flag=True,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        Knob(
            "Whether requests that begin with the same tokens share the pages of the KV pool that hold their keys, so "
            "that nothing computes them twice; pages that nobody uses are kept for it until they are needed.",
            flag=True,
        ),
    ] = True
    mixed_steps: Annotated[
        bool | None,
        Knob(
            "Whether a launch with prompts decodes the running requests too, so that the weights are read once for "
            "both; by default where the GPU's kernels suit it.",
            flag=True,
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Knob(
            "Whether a request's tokens and log-probabilities are the same, to the bit, whatever is served beside it: "
            "one size and one variant of each step, no mixed steps and no prefix cache, and attention that cuts "
            "sequences at fixed places. Not of a request that is preempted. Slower, where few requests run.",
            flag=True,
        ),
    ] = False
    max_stop_ids: Annotated[
        int | None,
        Knob("Tokens that may end a request, the model's own included; by default 8 more than those."),
    ] = None
    full_sampling: Annotated[
        bool,
        Knob(
            "Whether requests may ask for penalties, `logit_bias`, `min_tokens` and log-probabilities. They run in "
            "steps of their own; without them start-up is a third shorter."
        ),
    ] = True
    greedy_steps: Annotated[
        bool,
        Knob(
            "Whether launches in which nobody draws have steps of their own, a little faster; without them start-up "
            "has fewer to compile, and the text is the same."
        ),
    ] = True
    structured_steps: Annotated[
        bool,
        Knob(
            "Whether the steps for structured output are compiled at start-up; otherwise when the first request for it "
            "comes, which waits for them.",
            flag=True,
        ),
    ] = False
    max_logit_bias: Annotated[int, Knob("Tokens that a request may give a bias.")] = 300
    max_logprobs: Annotated[int, Knob("Likeliest tokens whose log-probabilities a request may ask for.")] = 20
    smallest_decode_bucket: Annotated[int, Knob("Rows of the smallest decode step; more are compiled by doubling.")] = 8
    smallest_prefill_bucket: Annotated[int, Knob("Tokens of the smallest prefill step, likewise.")] = 64
    backend: Annotated[
        str,
        Knob(
            "Which backend serves attention: the engine's own, or one of another engine's names.",
            flag=True,
            choices=("paged", "flash_attention", "flashinfer"),
        ),
    ] = "paged"
    implementation: Annotated[str | None, Knob("Which attention kernels; dispatch chooses by default.", flag=True)] = (
        None
    )
    speculative: Annotated[
        Speculation | None,
        Knob(
            "Who drafts tokens for each decode step to verify, an `NgramDrafting` or a `DraftModel`, so that a step "
            "gives several; None is plain decode. The text is the same. A row needs room in the pool for its drafted "
            "tokens, which are fewer than `max_context_len`."
        ),
    ] = None
    compile_in_background: Annotated[
        bool | None,
        Knob(
            "Whether the engine serves once its largest steps are compiled, and smaller ones follow meanwhile: until "
            "then a launch takes the next larger step, padded. By default in `jattn serve`, and on a GPU for more "
            "steps than are compiled at once.",
            flag=True,
        ),
    ] = None
    debug_checks: Annotated[
        bool,
        Knob("Whether to check page tables, lengths and slots before each launch, and wait for it; slow.", flag=True),
    ] = False
    progress: Annotated[
        bool, Knob("Whether to show on standard error what loads and compiles; off a terminal it is logged.")
    ] = True

    def __post_init__(self):
        from jattn.serving.config_checks import checked

        for name, value in checked(self).items():
            object.__setattr__(self, name, value)


def knobs() -> dict[str, tuple[dataclasses.Field, Knob]]:
    """The fields of EngineConfig, each with its meaning."""
    return {field.name: (field, typing.get_args(field.type)[1]) for field in dataclasses.fields(EngineConfig)}
