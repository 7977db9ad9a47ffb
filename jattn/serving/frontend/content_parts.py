"""A message's content as the chat template expects it: a text, or a list of parts."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MAY_BE_OBJECTS = ("tool", "ipython")  # roles: what a tool gave


def with_fitting_content(messages: Sequence[Mapping[str, Any]], template: nodes.Template) -> list[dict[str, Any]]:
    """The messages, each content a text, or a list of text parts if the template goes through the parts.

    As in vLLM: texts of several parts are joined by line breaks.

    Raises:
        ValueError: A content is a number, or an object though no tool gave it, or a part is no text.
    """
    takes_parts = _takes_parts(template)
    wraps_texts = takes_parts and not _asks_for_text(template)
    return [_fitting(message, takes_parts, wraps_texts) for message in messages]


def _fitting(message: Mapping[str, Any], takes_parts: bool, wraps_texts: bool) -> dict[str, Any]:
    content = message.get("content")
    takes_objects = message.get("role") in _MAY_BE_OBJECTS
    if isinstance(content, int | float) or (isinstance(content, Mapping) and not takes_objects):
        raise ValueError(f"A message's `content` must be a text or a list of text parts. Got {content!r}.")
    if isinstance(content, str) and wraps_texts:
        content = [content]
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        texts = [_text(part) for part in content]
        content = [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)
        return {**message, "content": content}
    return dict(message)


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = None
    if isinstance(part, Mapping):
        key = _TEXT_KEYS.get(part.get("type", "text"))
        text = part.get(key) if key else None
    if not isinstance(text, str):
        raise ValueError(f"Each part of a `content` must be a text: no model here takes anything else. Got {part!r}.")
    return text


def _takes_parts(template: nodes.Template) -> bool:
    """Whether a loop of the template goes through the content of one of the messages."""
    loops = [(name, loop.iter) for loop in template.find_all(nodes.For) if (name := _name(loop.target))]
    lists = _names_of(template, {"messages"})
    items = {name for name, values in loops if _is_name(values, lists)}
    contents = {name for name, value in _assigned(template) if _is_content(value, items)}
    return any(_is_content(values, items) or _is_name(values, contents) for _, values in loops)


def _assigned(template: nodes.Template) -> list[tuple[str, nodes.Node]]:
    return [(name, assign.node) for assign in template.find_all(nodes.Assign) if (name := _name(assign.target))]


def _name(target: nodes.Node) -> str | None:
    """None where a statement sets several names at once."""
    return target.name if isinstance(target, nodes.Name) else None


def _names_of(template: nodes.Template, names: set[str]) -> set[str]:
    """The names, and those that the template gives to what they hold or to a slice of it."""
    while more := {name for name, value in _assigned(template) if _is_name(value, names)} - names:
        names = names | more
    return names


def _is_name(node: nodes.Node | None, names: set[str]) -> bool:
    node = _bare(node)
    return isinstance(node, nodes.Name) and node.name in names


def _is_content(node: nodes.Node | None, items: set[str]) -> bool:
    """Whether the expression is the content of one of the items."""
    node = _bare(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _is_name(node.node, items)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content" and _is_name(node.node, items)
    return False


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """The expression without its filters and slices."""
    while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    return node


def _asks_for_text(template: nodes.Template) -> bool:
    return any(test.name == "string" for test in template.find_all(nodes.Test))
