"""Numbers that a single warp reads (`tiles.by_warps`): JAX's lowering has a rule for them, and the same for both.

JAX 0.11.2 marks the rule of stores of a number as one of warps, and forgets that of loads, which passes a load through.
"""

import jax.experimental.mosaic.gpu.dialect_lowering as dialect_lowering


def install() -> None:
    """Lets warps load from now on, in this process."""
    dialect_lowering._supported_warp_lowerings.add("memref.load")
