"""Thinking: whether the answer to a prompt begins with reasoning, and what that means for it."""

import dataclasses
from typing import Literal

from jattn.server.service import Service
from jattn.server.tools.parser import Parser
from jattn.server.tools.registry import REASONING_PARSERS
from jattn.server.tools.think import END, ThinkParser, begins_in


@dataclasses.dataclass(frozen=True)
class Thinking:
    """Where reasoning begins in the answer to one prompt.

    Attributes:
        begins: As for `ThinkParser`; None on a server that does not look for reasoning.
        end_token: The token that ends reasoning, after which a grammar begins; None if it begins at once.
    """

    begins: Literal["reasoning", "answer", "tag"] | None = None
    end_token: int | None = None

    @classmethod
    def of(cls, service: Service, prompt: str, *, has_form: bool) -> "Thinking":
        """What `--reasoning-parser` and a rendered prompt come to.

        Args:
            has_form: Whether the answer is to have a form. Where no single token ends reasoning, there is none then,
                unless it is a part of the form.
        """
        name = service.options.reasoning_parser
        always = None if name is None else REASONING_PARSERS[name]
        if always is None:
            return cls()
        begins = begins_in(prompt, always)
        if begins == "answer":
            return cls(begins)
        end = service.llm.tokenizer.encode(END, add_special_tokens=False)
        if len(end) != 1:
            return cls("tag" if has_form else begins)
        return cls(begins, end[0])

    def parser_over(self, answer: Parser) -> Parser:
        """Reads the whole text, whose answer is read by `answer`."""
        return answer if self.begins is None else ThinkParser(answer, self.begins)
