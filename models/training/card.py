"""The model card: what the checkpoint is, how it was made, and its figures, from one dictionary."""

import pathlib


def model_card(*, figures: dict, config: dict, samples: list[str], parameters: int, **facts) -> str:
    """The card's text in Markdown.

    Args:
        figures: What `evaluation.figures` returns.
        config: The checkpoint's configuration.
        samples: Texts, prompt included.
        parameters: Number of weights.
        **facts: The template's other fields.
    """
    template = pathlib.Path(__file__).with_name("card_template.md").read_text(encoding="utf-8")
    baselines = figures["baselines"]
    return template.format(
        config=config,
        parameters=parameters,
        sizes=figures["sizes"],
        held_out=figures["held_out"],
        bigram=baselines["bigram"],
        unigram=baselines["unigram"],
        lzma=baselines["lzma_after_training_text"],
        bz2=baselines["bz2"],
        samples="".join(f"\n~~~~python\n{sample.rstrip()}\n~~~~\n" for sample in samples).rstrip(),
        **facts,
    )
