"""Attention in portable jnp, flash-style: CPU and any GPU."""

from jattn_kernels.xla.attention import XLA as XLA
