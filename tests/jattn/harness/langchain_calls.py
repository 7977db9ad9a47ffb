"""Run by the interpreter of LangChain's environment: calls a server in all ways, and prints as JSON what came."""

import asyncio
import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

options = {"model": sys.argv[2], "base_url": sys.argv[1], "api_key": "none", "temperature": 0, "max_tokens": 12}
chat = ChatOpenAI(**options, stream_usage=True)
TURNS = [("human", "import os"), ("ai", "import sys"), ("human", "import re")]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 7]


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
long = ChatOpenAI(**options | {"max_tokens": 200})
bound = long.bind_tools([Weather], tool_choice="Weather")
json.dump(
    {
        "invoked": told(invoked),
        "streamed": told(summed(list(chat.stream(TURNS)))),
        "streamed_async": told(summed(asyncio.run(streamed()))),
        "batched": [told(message) for message in chat.batch([TURNS] * 8)],
        "stopped": told(chat.invoke(TURNS, stop=[stop])),
        "scored": [len(place["top_logprobs"]) for place in scored],
        "tool_called": bound.invoke(TURNS).tool_calls,
        "tool_streamed": summed(list(bound.stream(TURNS))).tool_calls,
        "any_tool_called": long.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
        .invoke(TURNS)
        .tool_calls,
        "structured": {
            method: long.with_structured_output(Weather, method=method).invoke(TURNS).model_dump()
            for method in ("json_schema", "function_calling")
        },
        "completed": OpenAI(**options).invoke("import os\n"),
        "completed_streamed": list(OpenAI(**options).stream("import os\n")),
    },
    sys.stdout,
)
