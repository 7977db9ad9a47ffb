"""The engine's pool, if the memory holds it."""

import functools
import os

import jax

from jattn.device_mesh import made, memory_stats
from jattn.kv_pool import KVGroupSpec, KVPool, make_pool
from jattn.serving.resolved_config import ResolvedConfig, bytes_of_pool


def fitting_pool(groups: tuple[KVGroupSpec, ...], config: ResolvedConfig) -> KVPool:
    """A zeroed pool of the configured size; of several devices each has one, of its share of the heads.

    Raises:
        ValueError: It does not fit the memory.
    """
    too_large = check_pool_fits(groups, config)
    try:
        sizes = {"num_pages": config.num_pages, "page_size": config.page_size, "dtype": config.pool_dtype}
        make = functools.partial(make_pool, groups, windows=config.window_lists, **sizes)
        return jax.block_until_ready(made(make, config.parallel, shares=True))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(too_large) from error


def check_pool_fits(groups: tuple[KVGroupSpec, ...], config: ResolvedConfig) -> str:
    """Compares a device's pool with all of its memory, and gives the sentence for one that the rest of it cannot hold.

    Raises:
        ValueError: It is larger than all of it.
    """
    size = bytes_of_pool(groups, config, config.num_pages)
    too_large = (
        f"`num_pages` must be lower or `page_size` smaller: the pool needs {size} bytes, more than there are. "
        f"Got num_pages={config.num_pages}, page_size={config.page_size}."
    )
    if size > _memory_bytes(config.tensor_parallel):
        raise ValueError(too_large)
    return too_large


def _memory_bytes(num_devices: int) -> int:
    """The memory of a device, or its part of the host's where that is the devices."""
    return memory_stats().get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_devices
