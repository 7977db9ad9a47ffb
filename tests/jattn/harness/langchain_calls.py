"""Run by the interpreter of LangChain's environment: calls a server in all ways, and prints as JSON what came."""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

options = {"model": sys.argv[2], "base_url": sys.argv[1], "api_key": "none", "temperature": 0, "max_tokens": 12}
chat = ChatOpenAI(**options, stream_usage=True)
TURNS = [("human", "import os"), ("ai", "import sys"), ("human", "import re")]


async def streamed():
    return [chunk async for chunk in chat.astream(TURNS)]


def summed(chunks):
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def told(message):
    return {
        "text": message.content,
        "usage": [message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]],
        "finish_reason": message.response_metadata["finish_reason"],
    }


invoked = chat.invoke(TURNS)
stop = invoked.content[3:5]
scored = chat.bind(logprobs=True, top_logprobs=2).invoke(TURNS).response_metadata["logprobs"]["content"]
json.dump(
    {
        "invoked": told(invoked),
        "streamed": told(summed(list(chat.stream(TURNS)))),
        "streamed_async": told(summed(asyncio.run(streamed()))),
        "batched": [told(message) for message in chat.batch([TURNS] * 8)],
        "stopped": told(chat.invoke(TURNS, stop=[stop])),
        "scored": [len(place["top_logprobs"]) for place in scored],
        "completed": OpenAI(**options).invoke("import os\n"),
        "completed_streamed": list(OpenAI(**options).stream("import os\n")),
    },
    sys.stdout,
)
