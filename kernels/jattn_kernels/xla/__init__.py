"""Attention in portable jnp, flash-style: CPU and any GPU."""

from jattn_kernels.xla.implementation import XLA as XLA
