"""The engine's pool, if the memory holds it."""

import os
from typing import Any

import jax

from jattn.kv_pool import KVGroupSpec, KVPool, make_pool
from jattn.serving.config import EngineConfig


def fitting_pool(groups: tuple[KVGroupSpec, ...], config: EngineConfig, dtype: Any) -> KVPool:
    """A zeroed pool of the configured size.

    Raises:
        ValueError: It does not fit the memory.
    """
    size = config.num_pages * sum(group.page_bytes(config.page_size, dtype) for group in groups)
    too_large = (
        f"`num_pages` must be lower or `page_size` smaller: the pool needs {size} bytes, more than there are. "
        f"Got num_pages={config.num_pages}, page_size={config.page_size}."
    )
    if size > _memory_bytes():
        raise ValueError(too_large)
    try:
        pool = make_pool(groups, num_pages=config.num_pages, page_size=config.page_size, dtype=dtype)
        return jax.block_until_ready(pool)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(too_large) from error


def _memory_bytes() -> int:
    """The memory of the device, or of the host where that is the device."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
