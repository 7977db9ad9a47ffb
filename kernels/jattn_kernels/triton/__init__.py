"""Kernels in Triton, called through jax-triton: any NVIDIA GPU from Ampere on, pages of any size."""

from jattn_kernels.triton.implementation import TRITON as TRITON
