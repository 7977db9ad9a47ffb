"""CudaGraphState: the sizes of captured steps, as SGLang's and pymllm's backends return them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CudaGraphState:
    """The static sizes that captured steps are compiled for.

    Attributes:
        max_bs: Largest batch, in sequences.
        max_num_tokens: Largest batch, in tokens.
        max_pages: Width of a page table.
    """

    max_bs: int
    max_num_tokens: int
    max_pages: int
