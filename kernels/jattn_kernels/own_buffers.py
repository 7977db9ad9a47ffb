"""Operands of kernels that XLA must not hand over as views."""

import dataclasses
from typing import Any

import jax

from jattn_kernels.call import AttentionOptions, Device


def own_buffers[Arrays](arrays: Arrays, device: Device) -> Arrays:
    """The arrays, each in a buffer of its own on a GPU.

    XLA gives a kernel a slice as an address within the array that was sliced, if that is a multiple of 128 bytes; a
    kernel of Mosaic wants multiples of 256, and ends in an error that names a number of a buffer. Behind a barrier a
    slice is copied, and what is no slice stays where it is.
    """
    return jax.tree.map(jax.lax.optimization_barrier, arrays) if device.platform == "gpu" else arrays


def with_own_buffers(options: AttentionOptions, device: Device) -> AttentionOptions:
    """The options that kernels read as they are: slopes, and factors of values, of which each layer may have a row."""
    v_scale: Any = options.v_scale
    if v_scale is not None and v_scale.ndim == 2:
        v_scale = v_scale[options.layer_index]
    slopes, v_scale = own_buffers((options.alibi_slopes, v_scale), device)
    return dataclasses.replace(options, alibi_slopes=slopes, v_scale=v_scale)
