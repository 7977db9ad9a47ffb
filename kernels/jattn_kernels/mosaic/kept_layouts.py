"""Layouts of Mosaic's registers, read and brought into their canonical form once each.

JAX 0.11.2 does both with nearly every array of a kernel that it lowers: with a step of Qwen3-30B-A3B for 64 tokens it
asks 2,046 times for canonical forms, of 21 layouts. Both are a sixth of the lowering's time.
"""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array, layouts

_canonical = fragmented_array.TiledLayout.canonicalize
_from_attribute = layouts.from_layout_attr
_by_text: dict[str, fragmented_array.FragmentedLayout] = {}


def install() -> None:
    """Lets JAX look them up from now on, in this process."""
    fragmented_array.TiledLayout.canonicalize = canonicalize
    layouts.from_layout_attr = from_attribute


@functools.cache
def canonicalize(layout: fragmented_array.TiledLayout) -> fragmented_array.TiledLayout:
    """The layout as JAX writes it: without dimensions and tiles that do nothing."""
    return _canonical(layout)


def from_attribute(attribute: Any) -> fragmented_array.FragmentedLayout:
    """The layout that an attribute of MLIR stands for; by its text, as an attribute would keep its kernel in memory."""
    text = str(attribute)
    layout = _by_text.get(text)
    if layout is None:
        layout = _by_text[text] = _from_attribute(attribute)
    return layout
