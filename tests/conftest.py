"""Settings that hold for every test: strict promotion of dtypes and ranks, on whatever device there is."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
