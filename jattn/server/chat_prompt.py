"""A conversation in a body to the prompt that the chat template makes of it."""

from typing import Any

from jattn.server.bodies import flag, shortened, typed
from jattn.server.service import Service


def chat_tokens(service: Service, body: dict[str, Any]) -> list[int]:
    """The token ids of `messages`.

    Raises:
        ValueError: The checkpoint has no chat template, or it refuses the messages; or tools are asked for, whose
            calls nothing reads from the text.
    """
    tools = typed(body, "tools", list, "a list", [])
    if tools and body.get("tool_choice", "auto") != "none":
        raise ValueError(f"`tools` are served with `tool_choice` none alone. Got {len(tools)} of them.")
    continues = flag(body, "continue_final_message")
    opens = flag(body, "add_generation_prompt", not continues)
    if continues and opens:
        raise ValueError("`continue_final_message` and `add_generation_prompt` must not both be true.")
    messages: Any = body.get("messages")
    text = service.llm.chat_template.render(
        messages,
        add_generation_prompt=opens,
        tools=tools or None,
        chat_template=service.options.chat_template,
        chat_template_kwargs=typed(body, "chat_template_kwargs", dict, "an object"),
    )
    if continues:
        text = _cut(text, messages[-1].get("content"))
    special = flag(body, "add_special_tokens")
    return service.llm.tokenizer.encode(text, add_special_tokens=special)


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
