"""Work on a request's body that would hold up the event loop: tokenising a long text takes seconds."""

import asyncio
from collections.abc import Callable

LONG = 20_000  # bytes, tokenised in about 10 ms


async def offloaded[**Arguments, Result](
    takes_long: bool, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Calls `work`, in another thread if it takes long."""
    if takes_long:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)
