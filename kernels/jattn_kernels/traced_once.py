"""Kernels that are traced and lowered once where a program calls them several times.

A decoder whose layers are of several kinds has the same products and norms in each; lowering one takes up to seconds.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jattn_kernels.call import Call

_traced: contextvars.ContextVar[dict[Any, Callable[..., Any]] | None] = contextvars.ContextVar("traced", default=None)


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """In it equal calls are traced once, for as long as one program is: nothing is kept for another."""
    token = _traced.set({})
    try:
        yield
    finally:
        _traced.reset(token)


def run_once(run: Callable[[Any, Any], Any], call: Call, operands: Any) -> Any:
    """run(call, operands), as one function of the program for all equal calls of operands of the same shapes.

    Args:
        run: A function of a module.
    """
    traced = _traced.get()
    if traced is None:
        return run(call, operands)
    if (run, call) not in traced:
        traced[run, call] = jax.jit(functools.partial(run, call))
    return traced[run, call](operands)
