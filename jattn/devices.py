"""JAX's devices, started with a sentence where JAX itself would show a traceback."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax

from jattn.no_device import NoDeviceError

_early: list[threading.Thread] = []
_said_early: list[str] = []


def start_early() -> None:
    """Starts the devices, and takes their memory, beside whatever else is imported: a GPU takes seconds for both.

    `started_devices` waits for it, and tells what went wrong.
    """
    _early.append(threading.Thread(target=_take_memory))
    _early[-1].start()


def _take_memory() -> None:
    with _warnings_of_jax() as said, contextlib.suppress(Exception):  # it is raised again for who asks
        jax.block_until_ready(jax.device_put(0.0))
    _said_early.extend(said)


def started_devices() -> tuple[list[Any], list[str]]:
    """JAX's devices, and what it said while it started.

    Raises:
        NoDeviceError: It cannot start; the sentence says why.
    """
    while _early:
        _early.pop().join()
    early, _said_early[:] = _said_early[:], []
    with _warnings_of_jax() as said:
        try:
            return jax.devices(), list(dict.fromkeys([*early, *said]))
        except (RuntimeError, AssertionError) as error:  # it asserts where every platform asked for was passed over
            reasons = dict.fromkeys([" ".join(str(error).split()) or "no such device was found", *early, *said])
            told = f" with `JAX_PLATFORMS`={jax.config.jax_platforms!r}" if jax.config.jax_platforms else ""
            sentence = f"JAX cannot start{told}: {'; '.join(reason.rstrip('.') for reason in reasons)}"
            raise NoDeviceError(sentence if sentence.endswith("?") else f"{sentence}.") from error


@contextlib.contextmanager
def _warnings_of_jax() -> Iterator[list[str]]:
    """Collects what JAX would log, tracebacks as their last lines; a plug-in that fails logs one of 20 lines."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        reason = f": {error}" if error is not None and str(error) not in record.getMessage() else ""
        said.append(" ".join(f"{record.getMessage()}{reason}".split()))
        return False

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(keep)
    try:
        yield said
    finally:
        logger.removeFilter(keep)
