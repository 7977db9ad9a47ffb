"""A conversation in a body to the prompt that the chat template makes of it."""

from typing import Any

from jattn.server.bodies import flag, typed
from jattn.server.service import Service
from jattn.server.tools.asked import tools_of
from jattn.server.tools.messages import with_calls_for_templates

_MARK = "THE_LAST_MESSAGE_ENDS_HERE "  # with a space, which a template that trims texts takes away


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
        _marked(messages) if continues else messages,
        add_generation_prompt=opens,
        tools=tools or None,
        chat_template=service.options.chat_template,
        chat_template_kwargs=typed(body, "chat_template_kwargs", dict, "an object"),
        hints={} if effort is None else {"reasoning_effort": effort},
    )
    return _cut(text) if continues else text


def _marked(messages: Any) -> Any:
    """The messages, with a mark behind the last one's text, for `_cut`; what is no list of messages stays as it is.

    Raises:
        ValueError: It has no text.
    """
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return messages
    last = messages[-1]
    content = last.get("content")
    part = content[-1] if isinstance(content, list) and content else content
    words = part.get("text") if isinstance(part, dict) else part
    if not isinstance(words, str) or not words.strip():
        raise _not_continued()
    marked: Any = {**part, "text": words + _MARK} if isinstance(part, dict) else words + _MARK
    return [*messages[:-1], {**last, "content": [*content[:-1], marked] if isinstance(content, list) else marked}]


def _cut(text: str) -> str:
    """The conversation up to the mark, without what the template puts behind; space before it is there if the template
    keeps it, as it then keeps the mark's own."""
    before, mark, behind = text.rpartition(_MARK.strip())
    if not mark:
        raise _not_continued()
    return before if behind.startswith(" ") else before.rstrip()


def _not_continued() -> ValueError:
    return ValueError("`continue_final_message` needs a last message with text that the template repeats.")
