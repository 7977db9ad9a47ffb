"""Runs of a benchmark against a server: its requests at their times, and the figures of what came."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from jattn.load.client import Answer, Client
from jattn.load.figures import Row, figures
from jattn.load.workload import Level, Workload

_WARM_UP_TOKENS = 2


def measured(url: str, workload: Workload, level: Level, *, api_key: str | None = None, warm_up: int = 8) -> Row:
    """Figures of a run, in an event loop of its own.

    Args:
        url: Of a server that speaks OpenAI's API.
        warm_up: Requests before it that do not count, at most as many as `level` has at a time.

    Raises:
        ValueError: Nothing answers there, or not what it should.
    """
    with _runner() as runner:
        return runner.run(_measured(Client(url, api_key), workload, level, warm_up))


def _runner() -> asyncio.Runner:
    """uvloop's, where it is installed: it takes half of the client's time."""
    with contextlib.suppress(ImportError):
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


async def _measured(client: Client, workload: Workload, level: Level, warm_up: int) -> Row:
    async with _closing(client):
        model = await _model(client)
        prompts = workload.prompts(level.num_prompts)
        requests = [client.completion(model, ids, num_tokens) for ids, num_tokens in prompts]
        first = [client.completion(model, ids, _WARM_UP_TOKENS) for ids in warm_up_prompts(workload, level, warm_up)]
        failed = [answer.error for answer in await asyncio.gather(*map(client.stream, first)) if answer.error]
        if failed:
            raise ValueError(f"The server must answer the requests. {failed[0]}")
        start = time.perf_counter()
        if level.concurrency is not None:
            answers = await _closed_loop(client, requests, level.concurrency)
        else:
            answers = await _open_loop(client, requests, level.gaps(workload.seed))
        seconds = time.perf_counter() - start
    return figures(level, answers, [len(ids) for ids, _ in prompts], seconds)


def warm_up_prompts(workload: Workload, level: Level, count: int) -> list[list[int]]:
    """Prompts that are none of the run's."""
    count = min(count, level.num_prompts if level.concurrency is None else level.concurrency)
    shifted = Workload(input_len=workload.input_len, vocab_size=workload.vocab_size, seed=workload.seed + 2**31)
    return [ids for ids, _ in shifted.prompts(count)]


@contextlib.asynccontextmanager
async def _closing(client: Client) -> AsyncIterator[None]:
    try:
        yield
    finally:
        client.close()


async def _model(client: Client) -> str:
    found = await client.get("/v1/models")
    try:
        return found["data"][0]["id"]
    except (LookupError, TypeError):
        raise ValueError(f"/v1/models of the server must list a model. Got {found!r}.") from None


async def _closed_loop(client: Client, requests: Sequence[bytes], concurrency: int) -> list[Answer]:
    answers: dict[int, Answer] = {}
    left = iter(enumerate(requests))

    async def work() -> None:
        for number, request in left:
            answers[number] = await client.stream(request)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answers[number] for number in range(len(requests))]


async def _open_loop(client: Client, requests: Sequence[bytes], gaps: Sequence[float]) -> list[Answer]:
    loop, tasks = asyncio.get_running_loop(), []
    due = loop.time()
    for request, gap in zip(requests, gaps, strict=True):
        due += gap
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        tasks.append(asyncio.create_task(client.stream(request)))
    return list(await asyncio.gather(*tasks))
