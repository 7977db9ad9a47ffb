"""Products with a layer's weights, called as steps call them."""

import jax


def of_last_layer(product, **options):
    """`product` with the number of the last layer traced."""
    return jax.jit(lambda x, kernel, layer: product(x, kernel, layer_index=layer, **options))
