"""How many events a second the load's client takes: its own limit, against a server that only writes.

python -m bench.client_limit [--concurrency N] [--events N]
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from typing import Any

from jattn.load.run import measured
from jattn.load.workload import Level, Workload

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"data": [{"id": "model"}]}'


def _event(content: Any) -> bytes:
    event = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


_TOKEN = _event(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1700000000,
        "model": "model",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    }
)


async def _serve(listening: socket.socket) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS))
                continue
            writer.write(_HEAD)
            count = json.loads(body)["max_tokens"]
            for _ in range(count):  # a write a token, as a server does
                writer.write(_TOKEN)
                await asyncio.sleep(0)
            writer.write(_event({"choices": [], "usage": {"completion_tokens": count}}))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(quietly, sock=listening)
    await server.serve_forever()


def stub(listening: socket.socket) -> None:
    """Answers as fast as it can; for a process of its own."""
    asyncio.run(_serve(listening))


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.client_limit", description=__doc__)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--events", type=int, default=1000, help="of each stream")
    options = parser.parse_args(arguments)
    workload = Workload(output_len=options.events, input_len=1)
    level = Level(num_prompts=options.concurrency, concurrency=options.concurrency)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        process = multiprocessing.get_context("spawn").Process(target=stub, args=(listening,), daemon=True)
        process.start()
        begun = time.process_time()
        try:
            row = measured(f"http://127.0.0.1:{listening.getsockname()[1]}", workload, level)
        finally:
            process.terminate()
            process.join()
    cpu_us = (time.process_time() - begun) / row["output_tokens"] * 1e6
    print(
        f"{options.concurrency} streams at once: {row['output_tokens_per_s']:,} events a second, "
        f"{cpu_us:.1f} us of the client's CPU each."
    )


if __name__ == "__main__":
    main()
