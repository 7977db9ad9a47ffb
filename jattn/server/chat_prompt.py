"""A conversation in a body to the prompt that the chat template makes of it."""

from typing import Any

from jattn.server.bodies import flag, shortened, typed
from jattn.server.service import Service
from jattn.server.tools.asked import tools_of
from jattn.server.tools.messages import with_calls_for_templates


def chat_tokens(service: Service, body: dict[str, Any]) -> list[int]:
    """The token ids of `messages`; see `chat_text`."""
    return encoded(service, body, chat_text(service, body))


def encoded(service: Service, body: dict[str, Any], text: str) -> list[int]:
    """The token ids of a rendered conversation."""
    return service.llm.tokenizer.encode(text, add_special_tokens=flag(body, "add_special_tokens"))


def chat_text(service: Service, body: dict[str, Any]) -> str:
    """`messages` as the chat template renders them, with `tools`, and `reasoning_effort` if it knows of that.

    Raises:
        ValueError: There is no chat template, or it refuses the messages.
    """
    if service.options.chat_template is None and not service.llm.chat_template.is_there:
        raise ValueError(
            "The model has no chat template, so that it can continue texts alone: a server is given one by "
            "`--chat-template`."
        )
    tools = tools_of(body)
    continues = flag(body, "continue_final_message")
    opens = flag(body, "add_generation_prompt", not continues)
    if continues and opens:
        raise ValueError("`continue_final_message` and `add_generation_prompt` must not both be true.")
    effort = typed(body, "reasoning_effort", str, "a text")
    messages: Any = with_calls_for_templates(body.get("messages"))
    text = service.llm.chat_template.render(
        messages,
        add_generation_prompt=opens,
        tools=tools or None,
        chat_template=service.options.chat_template,
        chat_template_kwargs=typed(body, "chat_template_kwargs", dict, "an object"),
        hints={} if effort is None else {"reasoning_effort": effort},
    )
    return _cut(text, messages[-1].get("content")) if continues else text


def _cut(text: str, content: Any) -> str:
    """The conversation up to the end of its last message's own words, without what the template puts behind."""
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    words = content.strip() if isinstance(content, str) else ""
    if not words or words not in text:
        raise ValueError(
            "`continue_final_message` needs a last message with text that the template repeats. "
            f"Got {shortened(content)}."
        )
    return text[: text.rindex(words) + len(words)]
