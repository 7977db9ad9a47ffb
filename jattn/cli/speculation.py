"""The drafter that flags ask for."""

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from jattn.cli.inputs import model_folder, nonempty_path


class Speculative(enum.StrEnum):
    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"


SpeculativeFlag = Annotated[
    Speculative | None,
    typer.Option(
        metavar="NAME",
        help="Let each step verify drafted tokens: the same text in fewer steps. `ngram` drafts what followed the "
        "last tokens earlier on; `draft-model` asks a smaller model.",
    ),
]
NumDraftTokensFlag = Annotated[
    int | None, typer.Option(help="Tokens to draft in each step, with --speculative; 4 by default.")
]
DraftModelFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", parser=nonempty_path, help="The draft model's checkpoint folder; the model's own by default."
    ),
]
DraftLayersFlag = Annotated[
    int | None, typer.Option(help="How many of its first layers the draft model has; all by default.")
]


def drafter(
    speculative: Speculative | None, num_draft_tokens: int | None, draft_model: Path | None, layers: int | None
) -> Any:
    """The drafter; None for plain decoding.

    Raises:
        FileNotFoundError, ValueError: There is no such folder; the flags do not go together.
    """
    if draft_model is not None:
        draft_model = model_folder("--draft-model", draft_model)
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
