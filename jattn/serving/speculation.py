"""What the host must know of a drafter; apart from drafters, which import jax."""

import typing
from typing import Protocol


@typing.runtime_checkable
class Speculation(Protocol):
    """What a drafter (`jattn.serving.steps.drafting.Drafter`) says of itself."""

    @property
    def num_draft_tokens(self) -> int: ...
