"""The drafter that flags ask for."""

import enum
from pathlib import Path
from typing import Any


class Speculative(enum.StrEnum):
    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"


def drafter(
    speculative: Speculative | None, num_draft_tokens: int | None, draft_model: Path | None, layers: int | None
) -> Any:
    """The drafter; None for plain decoding.

    Raises:
        ValueError: The flags do not go together.
    """
    if speculative is None and num_draft_tokens is not None:
        raise ValueError("`--num-draft-tokens` needs `--speculative`.")
    if speculative is not Speculative.DRAFT_MODEL and (draft_model is not None or layers is not None):
        raise ValueError("`--draft-model` and `--draft-layers` need `--speculative draft-model`.")
    if speculative is None:
        return None
    given = {} if num_draft_tokens is None else {"num_draft_tokens": num_draft_tokens}
    if speculative is Speculative.NGRAM:
        from jattn.serving.steps.drafting import NgramDrafting

        return NgramDrafting(**given)
    from jattn.serving.steps.draft_model import DraftModel

    if draft_model is None and layers is None:
        raise ValueError("`--speculative draft-model` needs `--draft-model`, `--draft-layers` or both.")
    return DraftModel(checkpoint=draft_model, num_layers=layers, **given)
