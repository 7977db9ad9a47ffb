"""Channels: where in harmony's messages the answer to a prompt begins, and what that means for it."""

import dataclasses

from jattn.server.service import Service
from jattn.server.tools.harmony import CALL, RETURN, HarmonyParser, begun_in
from jattn.server.tools.parser import Parser
from jattn.serving.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Channels:
    """What an answer in harmony goes on with.

    Attributes:
        begun: What the prompt has of the message; None on a server that does not look for channels.
        opening: What is put behind the prompt. An answer that is to have a form has no reasoning: the prompt is led up
            to its final channel, and the text is all of it.
        end_tokens: The tokens that end an answer, if the tokenizer has them.
    """

    begun: str | None = None
    opening: str = ""
    end_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, service: Service, prompt: str, *, has_form: bool) -> "Channels":
        """What the server's parsers and a rendered prompt come to.

        Args:
            has_form: Whether the answer is to have a form.
        """
        options = service.options
        if options.tool_call_parser != "openai" and options.reasoning_parser != "openai_gptoss":
            return cls()
        begun = begun_in(prompt)
        if has_form:
            return cls(opening=HarmonyParser(begun).to_answer)
        found = [service.llm.tokenizer.encode(tag, add_special_tokens=False) for tag in (RETURN, CALL)]
        return cls(begun, end_tokens=tuple(ids[0] for ids in found if len(ids) == 1))

    def params_of(self, params: SamplingParams) -> SamplingParams:
        """A request's parameters, with channels in the text, and the ends of answers even if no file names them."""
        if self.begun is None:
            return params
        ends = () if params.ignore_eos else self.end_tokens
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
        return dataclasses.replace(params, skip_special_tokens=False, stop_token_ids=stops)

    def parser_over(self, answer: Parser) -> Parser:
        """Reads the whole text; calls are read if `answer` would read them."""
        if self.begun is None:
            return answer
        return HarmonyParser(self.begun, has_calls=isinstance(answer, HarmonyParser))
