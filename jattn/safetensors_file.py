"""SafetensorsFile: one file of tensors through the format's own library, and a sentence where it cannot be read."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

_LENGTH_BYTES = 8  # a file begins with the header's length, little endian


class SafetensorsFile:
    """Tensors by name, read when asked for.

    Args:
        path: The file; it must not change while it is open.

    Raises:
        ValueError: The file is truncated or corrupt; the message names the file and, where one is cut off, the tensor.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(_fault(path, error)) from error
        self.names = tuple(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's, from the header."""
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str, piece: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor, or a piece of one, in the dtype that it is stored in.

        Args:
            piece: A slice of each axis; None is all.

        Raises:
            NotImplementedError: NumPy has no such dtype.
        """
        try:
            return self._file.get_tensor(name) if piece is None else self._file.get_slice(name)[piece]
        except (SafetensorError, TypeError, AttributeError) as error:
            dtype = self._file.get_slice(name).get_dtype()
            raise NotImplementedError(
                f"{self.path} stores tensor {name!r} as {dtype}, which cannot be read."
            ) from error


def _fault(path: Path, error: Exception) -> str:
    """What is wrong with a file that the library refuses."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < end:
            return f"{path} is truncated or no safetensors file: it ends at byte {size}, inside its header."
        try:
            header = json.loads(file.read(end - _LENGTH_BYTES))
            for name, entry in header.items():
                if name != "__metadata__" and end + entry["data_offsets"][1] > size:
                    cut = end + entry["data_offsets"][1]
                    return f"{path} is truncated: tensor {name!r} ends at byte {cut}, the file at {size}."
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError, MemoryError, OverflowError):
            pass
    return f"{path} is corrupt or no safetensors file: {error}."
