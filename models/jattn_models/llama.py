"""Llama 3.x: the decoder as it is."""

from typing import ClassVar

from jattn_models.decoder import Decoder
from jattn_models.llama_config import LlamaConfig


class LlamaForCausalLM(Decoder):
    """A Llama 3.x language model."""

    config_class: ClassVar = LlamaConfig
