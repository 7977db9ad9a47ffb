"""CudaGraphState: the sizes of captured steps, as SGLang's and pymllm's backends return them."""

import dataclasses

from jattn.arguments import whole


@dataclasses.dataclass(frozen=True)
class CudaGraphState:
    """The static sizes that captured steps are compiled for.

    Attributes:
        max_bs: Largest batch, in sequences.
        max_num_tokens: Largest batch, in tokens.
        max_pages: Width of a page table.

    Raises:
        ValueError: There are not as many tokens as sequences, or none.
    """

    max_bs: int
    max_num_tokens: int
    max_pages: int

    def __post_init__(self):
        for name in ("max_bs", "max_num_tokens"):
            whole(name, getattr(self, name), 0)
        if self.max_bs < 1 or self.max_num_tokens < self.max_bs:
            raise ValueError(
                "`max_bs` must be at least 1 and `max_num_tokens` at least `max_bs`. "
                f"Got max_bs={self.max_bs}, max_num_tokens={self.max_num_tokens}."
            )
