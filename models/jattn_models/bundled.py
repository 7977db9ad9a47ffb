"""The small checkpoint that comes with the package: what runs when no other is named."""

import pathlib


def checkpoint_path() -> pathlib.Path:
    """The folder of a byte-level-BPE Llama trained on Python's standard library; its README.md is the model card."""
    return pathlib.Path(__file__).parent / "checkpoints" / "stdlib-llama"
