"""Settings that hold for every test: strict promotion of dtypes and ranks, and threads enough for the interpreter."""

import os

# The interpreter of GPU kernels blocks a thread of XLA's CPU client for each warpgroup that waits: two hang on 2 cores.
os.environ.setdefault("NPROC", "8")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
