"""The engine's pool, if the memory holds it."""

import os

import jax

from jattn.kv_pool import KVGroupSpec, KVPool, make_pool
from jattn.serving.resolved_config import ResolvedConfig


def fitting_pool(groups: tuple[KVGroupSpec, ...], config: ResolvedConfig) -> KVPool:
    """A zeroed pool of the configured size.

    Raises:
        ValueError: It does not fit the memory.
    """
    too_large = check_pool_fits(groups, config)
    try:
        pool = make_pool(groups, num_pages=config.num_pages, page_size=config.page_size, dtype=config.pool_dtype)
        return jax.block_until_ready(pool)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(too_large) from error


def check_pool_fits(groups: tuple[KVGroupSpec, ...], config: ResolvedConfig) -> str:
    """Compares the pool with the whole memory, and gives the sentence for one that is larger than what is left of it.

    Raises:
        ValueError: It is larger than all of it.
    """
    size = config.num_pages * sum(group.page_bytes(config.page_size, config.pool_dtype) for group in groups)
    too_large = (
        f"`num_pages` must be lower or `page_size` smaller: the pool needs {size} bytes, more than there are. "
        f"Got num_pages={config.num_pages}, page_size={config.page_size}."
    )
    if size > _memory_bytes():
        raise ValueError(too_large)
    return too_large


def _memory_bytes() -> int:
    """The memory of the device, or of the host where that is the device."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
