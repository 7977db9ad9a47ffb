"""EngineConfig: the sizes that are fixed when the steps are compiled."""

import dataclasses

from jattn.arguments import instance, whole_number
from jattn.compiled_steps import power_of_two_buckets, token_buckets
from jattn.serving.steps.drafting import Drafter, check_drafter, check_drafter_fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes that are fixed when the steps are compiled.

    Attributes:
        num_pages: Pages of the pool, the reserved page 0 included.
        page_size: Tokens a page.
        max_num_seqs: Requests served at the same time.
        max_context_len: Longest request, prompt and generated tokens together.
        prefill_tokens: Tokens of a prefill launch at most; longer prompts come in chunks. Decodes in the same launch
            count.
        prefill_seqs: Requests of a prefill launch at most.
        max_chunk_tokens: Tokens of one request in a prefill launch at most; None is `prefill_tokens`. A lower number
            leaves room for short prompts behind a long one.
        mixed_steps: Whether a prefill launch decodes the running requests too, each of them one of its tokens, so that
            the weights are read once for both. None does where the kernels of extend go by a work list; with others a
            short sequence costs what a long one does. Where decodes would take more than half of `prefill_tokens`,
            where one of them has more than 16,384 tokens, and where tokens are drafted, they have a launch of their
            own.
        max_stop_ids: Tokens that may end a request, the model's own included.
        full_sampling: Whether requests may ask for penalties, `logit_bias`, `min_tokens` and log-probabilities. They
            run in steps of their own, half as many again to compile, and need 3 bytes a row and token of the vocabulary
            (5 from a context of 32,768 on); requests that ask for none of it pay nothing.
        max_logit_bias: Tokens that a request may give a bias.
        max_logprobs: Likeliest tokens whose log-probabilities a request may ask for.
        smallest_decode_bucket: Rows of the smallest decode step; more are compiled by doubling.
        smallest_prefill_bucket: Tokens of the smallest prefill step, likewise.
        backend: Which surface serves attention; a name of `jattn.backend.BACKENDS`.
        kv_cache_dtype: What the pool stores; auto, or a name of `jattn.dtype_names.DTYPE_NAMES`. An fp8 pool holds
            twice to four times the tokens, each key and value rounded to a few bits.
        implementation: Which kernels to use; None lets dispatch choose.
        speculative: Who drafts tokens that each decode step verifies beside a row's own, so that it gives several; None
            is plain decode. The tokens are the same. A row needs room for its drafted tokens in the pool, which are
            fewer than `max_context_len`.
        debug_checks: Whether each launch waits for those before it, and the page tables, lengths and slots that it
            will use are checked first. Slow.
    """

    num_pages: int
    page_size: int = 16
    max_num_seqs: int = 8
    max_context_len: int = 1024
    prefill_tokens: int = 256
    prefill_seqs: int = 8
    max_chunk_tokens: int | None = None
    mixed_steps: bool | None = None
    max_stop_ids: int = 8
    full_sampling: bool = True
    max_logit_bias: int = 300
    max_logprobs: int = 20
    smallest_decode_bucket: int = 8
    smallest_prefill_bucket: int = 64
    backend: str = "flash_attention"
    kv_cache_dtype: str = "auto"
    implementation: str | None = None
    speculative: Drafter | None = None
    debug_checks: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type not in (int, int | None):
                continue
            value = getattr(self, field.name)
            least = 2 if field.name == "num_pages" else 1
            if value is not None or field.type is int:
                rule = f"`{field.name}` must be a whole number of at least {least}."
                object.__setattr__(self, field.name, whole_number(value, rule, least))
        for name in ("full_sampling", "debug_checks"):
            instance(name, getattr(self, name), bool)
        instance("mixed_steps", self.mixed_steps, bool, type(None))
        check_drafter(self.speculative)
        if self.speculative:
            check_drafter_fits(self.speculative, self.max_context_len)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a decode step verifies beside each row's own."""
        return self.speculative.num_draft_tokens if self.speculative else 0

    @property
    def most_keys(self) -> int:
        """Keys of the longest request, those of drafted tokens past its end included."""
        return self.max_context_len + self.num_draft_tokens

    @property
    def max_pages(self) -> int:
        """Width of a page table."""
        return -(-self.most_keys // self.page_size)

    @property
    def pages_a_step(self) -> int:
        """Pages that a decode step may open for a row."""
        return -(-(1 + self.num_draft_tokens) // self.page_size)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        return power_of_two_buckets(self.max_num_seqs, self.smallest_decode_bucket)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        return token_buckets(self.prefill_tokens, self.smallest_prefill_bucket)
