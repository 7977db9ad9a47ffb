"""Checkpoint: a Hugging Face model folder, read without running anything that it holds."""

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jattn.arguments import whole_number
from jattn.safetensors_file import SafetensorsFile
from jattn.wrapped_text import is_wrapper, text_config, text_names

QUANTIZATIONS = ("fp8", "int4")  # what weights may be held in that are stored in more bits
_BESIDE = "hf_quant_config.json"
_ROPE = ("rope_parameters", "rope_scaling")
_NO_SCALING = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")  # what may stand there beside a scaling
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\.")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json", "*.pt", "*.pth")


class Checkpoint:
    """The configuration and the weights of a folder: config.json and safetensors, in one file or in shards.

    Of a model that sees too, it is the text model inside: its configuration, and its tensors by the names that they
    would have alone.

    Args:
        path: The folder.

    Raises:
        FileNotFoundError: The folder, config.json, the weights or a shard are missing.
        ValueError: `path` is no path, a file is corrupt or truncated, or the weights are only there as pickle.

    Attributes:
        path: The folder.
        config: config.json; of a text model inside another, its `text_config`. What hf_quant_config.json says of
            quantised weights is its `quantization_config`, if it has none.
        architecture: The first of the configuration's architectures; the wrapper's, if there is one.
        generation_config: generation_config.json; empty if absent.
        max_context_len: Tokens of the longest text that is to be served; None for as long as the model was made for.
        quantization: What the weights of projections are to be held in; None for what the checkpoint says.
    """

    def __init__(self, path: str | Path):
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"`path` must be the path of a checkpoint folder. Got {path!r}.")
        self.path = Path(path)
        check_folder(self.path, "path")
        if not (self.path / "config.json").is_file():
            raise FileNotFoundError(f"`path` must be a folder with a `config.json`. Got {str(path)!r}.")
        self.config = self._config()
        self.architecture = self._architecture()
        generation_config = self.path / "generation_config.json"
        self.generation_config = read_json(generation_config) if generation_config.is_file() else {}
        self.max_context_len: int | None = None
        self.quantization: str | None = None
        self._on_read: Callable[[], None] = lambda: None
        self._files, self._listing = self._open_weights()
        self._stored_names = {name: name for name in self._files}
        if is_wrapper(self.config):
            self._stored_names = text_names(self._files)
            self.config = text_config(self.config, self._stored_names)
            self._files = {name: self._files[stored] for name, stored in self._stored_names.items()}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def read(
        self, name: str, shape: tuple[int, ...] | None = None, piece: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """A tensor, or a piece of one, in the dtype that it is stored in.

        Args:
            name: Its name.
            shape: What the caller expects the whole tensor to have; None takes any.
            piece: A slice of each axis; no more than that is read. None is all.

        Raises:
            ValueError: There is no such tensor, or it has another shape.
        """
        if name not in self._files:
            raise ValueError(f"{self._listing} must hold the tensor {name!r}, which is missing.")
        file, stored_name = self._files[name], self._stored_names[name]
        if shape is not None and (stored := file.shape(stored_name)) != shape:
            raise ValueError(
                f"Tensor {stored_name!r} of {file.path} must have shape {list(shape)}. Got {list(stored)}."
            )
        tensor = file.read(stored_name, piece)
        self._on_read()
        return tensor

    def dtype(self, name: str) -> str | None:
        """The name of the dtype that a tensor is stored in, from its file's header; None if there is no such tensor."""
        return self._files[name].dtype(self._stored_names[name]) if name in self._files else None

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's, from its file's header."""
        return self._files[name].shape(self._stored_names[name])

    def watched(self, on_read: Callable[[], None]) -> "Checkpoint":
        """The checkpoint, which calls `on_read` after each tensor that is read of it."""
        watched = copy.copy(self)
        watched._on_read = on_read
        return watched

    def for_context(self, max_context_len: int | None) -> "Checkpoint":
        """The checkpoint as it is to be served: what a model computes may depend on it (LongRoPE).

        Raises:
            ValueError: It is no whole number of at least 1.
        """
        served = copy.copy(self)
        if max_context_len is not None:
            max_context_len = whole_number(
                max_context_len, "`max_context_len` must be a whole number of at least 1.", 1
            )
        served.max_context_len = max_context_len
        return served

    def with_rope_scaling(self, rope_scaling: str | Mapping[str, Any] | None) -> "Checkpoint":
        """The checkpoint with another scaling of rotary embedding than its configuration says.

        Args:
            rope_scaling: What config.json would have under that name, as an object or its JSON; None changes nothing.

        Raises:
            ValueError: It is no such object, or the model has an embedding for each type of layer.
        """
        if rope_scaling is None:
            return self
        config, given = dict(self.config), json.loads(checked_rope_scaling(rope_scaling) or "{}")
        said = [value for name in _ROPE if isinstance(value := config.pop(name, None), Mapping)]
        if any(isinstance(part, Mapping) for value in said for part in value.values()):
            raise ValueError(
                f"`rope_scaling` must be None for {self.architecture}, whose types of layers have rotary embeddings of "
                "their own: change them in config.json."
            )
        kept = {name: value[name] for value in said for name in _NO_SCALING if value.get(name) is not None}
        scaled = copy.copy(self)
        scaled.config = config | {"rope_scaling": kept | given}
        return scaled

    def quantized(self, quantization: str | None) -> "Checkpoint":
        """The checkpoint as it is to be held.

        Raises:
            ValueError: `quantization` is neither None nor one of QUANTIZATIONS.
        """
        check_quantization(quantization)
        held = copy.copy(self)
        held.quantization = quantization
        return held

    def cut_down(self, num_layers: int) -> "Checkpoint":
        """The checkpoint with its first layers alone, as a draft model for itself.

        Raises:
            ValueError: It has fewer layers, or does not say how many.
        """
        total = self.config.get("num_hidden_layers")
        if not isinstance(total, int) or not 1 <= num_layers <= total:
            raise ValueError(
                f"`num_layers` must be at least 1 and at most the checkpoint's `num_hidden_layers`={total}. "
                f"Got {num_layers}."
            )
        cut = copy.copy(self)
        # A list of so many entries has one for each layer, such as `layer_types`.
        by_layer = [name for name, value in self.config.items() if isinstance(value, list) and len(value) == total]
        cut.config = self.config | {name: self.config[name][:num_layers] for name in by_layer}
        cut.config["num_hidden_layers"] = num_layers
        numbers = {name: _LAYER_NUMBER.search(name) for name in self._files}
        cut._files = {
            name: file
            for name, file in self._files.items()
            if not (number := numbers[name]) or int(number[1]) < num_layers
        }
        return cut

    def _config(self) -> dict[str, Any]:
        """config.json, with what modelopt may have written beside it of its weights and not into it."""
        config, beside = read_json(self.path / "config.json"), self.path / _BESIDE
        if config.get("quantization_config") is None and beside.is_file():
            announced = read_json(beside).get("quantization")
            fields = announced if isinstance(announced, dict) else {}
            config["quantization_config"] = {"quant_method": "modelopt", **fields}
        return config

    def _architecture(self) -> str:
        architectures = self.config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise ValueError(
                f"{self.path / 'config.json'} must name the model's class in `architectures`. Got {architectures!r}."
            )
        return architectures[0]

    def _open_weights(self) -> tuple[dict[str, SafetensorsFile], Path]:
        """The file of each tensor, and the path that lists them all."""
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.is_file():
            file = SafetensorsFile(single)
            return dict.fromkeys(file.names, file), single
        if index.is_file():
            return self._open_shards(index), index
        if any(next(self.path.glob(pattern), None) for pattern in _PICKLES):
            raise ValueError(
                f"{self.path} holds its weights only as pickle, which can run code and is refused: "
                f"convert them to safetensors."
            )
        raise FileNotFoundError(f"{self.path} must hold `{_SINGLE}` or `{_INDEX}`.")

    def _open_shards(self, index: Path) -> dict[str, SafetensorsFile]:
        weight_map = read_json(index).get("weight_map")
        well_formed = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
        if not well_formed or not weight_map:
            raise ValueError(f"{index} must map each tensor to its file in `weight_map`.")
        shards = {}
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise ValueError(f"{index} must name shards that lie in the folder itself. Got {shard!r}.")
            if not (self.path / shard).is_file():
                raise FileNotFoundError(f"{self.path / shard} is missing; {_INDEX} names it.")
            shards[shard] = SafetensorsFile(self.path / shard)
        for name, shard in weight_map.items():
            if name not in shards[shard].names:
                raise ValueError(f"{self.path / shard} must hold the tensor {name!r}, which {_INDEX} places there.")
        return {name: shards[shard] for name, shard in weight_map.items()}


def checked_rope_scaling(rope_scaling: Any) -> str | None:
    """A scaling of rotary embedding as JSON; None for none.

    Raises:
        ValueError: It is neither an object with a `rope_type`, nor its JSON.
    """
    if rope_scaling is None:
        return None
    try:
        fields = json.loads(rope_scaling) if isinstance(rope_scaling, str) else rope_scaling
        text = json.dumps(dict(fields), sort_keys=True)
    except (TypeError, ValueError):
        fields = text = None
    known = isinstance(fields, Mapping) and isinstance(fields.get("rope_type", fields.get("type")), str)
    if text is None or not known:
        raise ValueError(
            '`rope_scaling` must be None, or an object such as {"rope_type": "yarn", "factor": 4.0, '
            f'"original_max_position_embeddings": 32768}}, or its JSON. Got {rope_scaling!r}.'
        )
    return text


def check_quantization(quantization: Any) -> None:
    """Checks what the weights of projections are to be held in.

    Raises:
        ValueError: It is neither None nor one of QUANTIZATIONS.
    """
    if quantization is not None and not (isinstance(quantization, str) and quantization in QUANTIZATIONS):
        raise ValueError(f"`quantization` must be None or one of: {', '.join(QUANTIZATIONS)}. Got {quantization!r}.")


def check_folder(path: Path, name: str) -> None:
    """Says where to get the checkpoint whose name stands in place of a folder.

    Args:
        name: What the caller calls the argument.

    Raises:
        FileNotFoundError: There is no folder of this path.
    """
    if path.is_dir():
        return
    sentence = f"`{name}` must be a checkpoint folder. Got {str(path)!r}."
    if not path.exists() and _HUB_NAME.fullmatch(str(path)):
        sentence += f" If that is a model's name, `hf download {path} --local-dir {path.name}` makes a folder of it."
    raise FileNotFoundError(sentence)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: It holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object. Got a {type(content).__name__}.")
    return content
