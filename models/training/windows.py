"""Documents cut into windows of one length, so that each file's loss is a sum over rows of one array."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows of `length` inputs and their targets; a document's windows follow one another without overlap.

    Attributes:
        inputs, targets: int32 [rows, length]; 0 where padded.
        weights: float32 [rows, length]; 1 where a target is real, 0 where it is padding.
        names: The document of each row.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    names: tuple[str, ...]


def cut_windows(documents: dict[str, np.ndarray], length: int) -> Windows:
    """Each token of a document but its first is the target of exactly one place."""
    inputs, targets, weights, names = [], [], [], []
    for name, tokens in documents.items():
        for start in range(0, len(tokens) - 1, length):
            piece = tokens[start : start + length + 1]
            padding = (0, length + 1 - len(piece))
            padded = np.pad(piece, padding)
            inputs.append(padded[:-1])
            targets.append(padded[1:])
            weights.append(np.pad(np.ones(len(piece), np.float32), padding)[1:])
            names.append(name)
    return Windows(np.stack(inputs), np.stack(targets), np.stack(weights), tuple(names))


def pad_rows(windows: Windows, multiple: int) -> Windows:
    """The same windows and empty ones after them, the number of rows a multiple of `multiple`."""
    padding = ((0, -len(windows.names) % multiple), (0, 0))
    return Windows(
        np.pad(windows.inputs, padding),
        np.pad(windows.targets, padding),
        np.pad(windows.weights, padding),
        windows.names,
    )
