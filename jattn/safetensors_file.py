"""SafetensorsFile: one file of tensors through the format's own library, and a sentence where it cannot be read."""

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_FP8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn}  # the library has no place for these in NumPy
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
_LENGTH_BYTES = 8  # a file begins with the header's length, little endian
_POINTER = b"version "  # what stands in place of a file where a folder was cloned without Git LFS


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

    def dtype(self, name: str) -> str:
        """The name of the dtype that a tensor is stored in, from the header; the format's own for other than floats."""
        stored = str(self._file.get_slice(name).get_dtype())
        return _FLOATS.get(stored, stored)

    def read(self, name: str, piece: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor, or a piece of one, in the dtype that it is stored in.

        Args:
            piece: A slice of each axis; None is all.

        Raises:
            NotImplementedError: NumPy has no such dtype.
        """
        stored = self._file.get_slice(name).get_dtype()
        if stored in _FP8:
            return self._bytes(name, piece).view(_FP8[stored])
        try:
            return self._file.get_tensor(name) if piece is None else self._file.get_slice(name)[piece]
        except (SafetensorError, TypeError, AttributeError) as error:
            raise NotImplementedError(
                f"{self.path} stores tensor {name!r} as {stored}, which cannot be read."
            ) from error

    def _bytes(self, name: str, piece: tuple[slice, ...] | None) -> np.ndarray:
        """A tensor of one byte a number."""
        first, header = self._header
        offset = first + header[name]["data_offsets"][0]
        mapped = np.memmap(self.path, np.uint8, mode="r", offset=offset, shape=self.shape(name))
        return np.array(mapped if piece is None else mapped[piece])

    @functools.cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the numbers begin in the file, and what it says of each tensor."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            return _LENGTH_BYTES + length, json.loads(file.read(length))


def _fault(path: Path, error: Exception) -> str:
    """What is wrong with a file that the library refuses."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_LENGTH_BYTES)
        end = _LENGTH_BYTES + int.from_bytes(first, "little")
        if first == _POINTER:
            return f"{path} is a pointer of Git LFS, without the weights: `git lfs pull` in the folder fetches them."
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
