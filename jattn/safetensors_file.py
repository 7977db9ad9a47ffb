"""SafetensorsFile: the tensors of one safetensors file, memory-mapped and checked before any is read."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_LENGTH_BYTES = 8  # a file begins with the header's length, little endian
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """What the header says of one tensor; `begin` and `end` are bytes from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """Tensors by name, read when asked for.

    Args:
        path: The file; it must not change while it is open.

    Raises:
        ValueError: The file is truncated or its header is corrupt; the message names the file and, where one is cut
            off, the tensor.
    """

    def __init__(self, path: Path):
        self.path = path
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        data, header = self._header()
        self.entries = {
            name: self._entry(name, value, data) for name, value in header.items() if name != "__metadata__"
        }

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the file; nothing is copied."""
        entry = self.entries[name]
        return self._bytes[entry.begin : entry.end].view(np.ndarray).view(entry.dtype).reshape(entry.shape)

    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the tensors' bytes begin, and the header."""
        if len(self._bytes) < _LENGTH_BYTES:
            raise ValueError(
                f"{self.path} is truncated: it ends at byte {len(self._bytes)}, inside its header's length."
            )
        length = int.from_bytes(self._bytes[:_LENGTH_BYTES].tobytes(), "little")
        end = _LENGTH_BYTES + length
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{self.path} is corrupt or no safetensors file: its header would take {length} bytes.")
        if end > len(self._bytes):
            raise ValueError(
                f"{self.path} is truncated: its header ends at byte {end}, the file at {len(self._bytes)}."
            )
        try:
            header = json.loads(self._bytes[_LENGTH_BYTES:end].tobytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} is corrupt: its header is not JSON ({error}).") from error
        if not isinstance(header, dict):
            raise ValueError(f"{self.path} is corrupt: its header is no JSON object.")
        return end, header

    def _entry(self, name: str, value: Any, data: int) -> TensorEntry:
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise ValueError("a dtype's name and whole numbers are expected")
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{self.path} is corrupt: its header describes tensor {name!r} as {value!r}.") from error
        if dtype not in DTYPES:
            raise NotImplementedError(
                f"{self.path} stores tensor {name!r} as {dtype!r}. Readable: {', '.join(DTYPES)}."
            )
        entry = TensorEntry(np.dtype(DTYPES[dtype]), shape, data + begin, data + end)
        if end - begin != math.prod(shape) * entry.dtype.itemsize:
            raise ValueError(
                f"{self.path} is corrupt: tensor {name!r} has {end - begin} bytes for shape {list(shape)} of {dtype}."
            )
        if entry.end > len(self._bytes):
            raise ValueError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {entry.end}, the file at {len(self._bytes)}."
            )
        return entry
