"""Compiles what a text must look like to a grammar over a checkpoint's tokens, by llguidance."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from jattn.serving.structured.grammar import Grammar, reason_of
from jattn.serving.structured.params import StructuredOutputsParams

_KEPT = 64  # grammars
# Between the tokens of JSON: as much as who indents wants, and no more, as small models write it to the end of time.
_WHITESPACE = r"( |\n[ \t]{0,20})?"


def llguidance() -> Any:
    """The package, imported when the first request needs it.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            f"Structured output needs the package llguidance: install it with `pip install llguidance`. Got {error}."
        ) from None
    return llguidance


class GrammarCompiler:
    """Makes grammars, from any thread. The latest ones are kept, so that requests alike are compiled once.

    Args:
        tokenizer_json: Gives the checkpoint's tokenizer, as JSON, and the tokens of the vocabulary, those that only the
            model has included; asked when it is needed.
        end_ids: Tokens that end a text.
    """

    def __init__(self, tokenizer_json: Callable[[], tuple[str, int]], end_ids: Iterable[int]):
        self._tokenizer_json = tokenizer_json
        self._end_ids = sorted(end_ids)
        self._tokenizer: Any = None
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar before its first token, which may be forked.

        Raises:
            ValueError: llguidance is not installed, or cannot serve the schema, expression or grammar; it says why.
        """
        with self._lock:  # also around the work: whoever asks for the same waits for it
            if params not in self._kept:
                self._kept[params] = self._compiled(params)
            self._kept.move_to_end(params)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return self._kept[params].fork()

    def _compiled(self, params: StructuredOutputsParams) -> Grammar:
        package = llguidance()
        if self._tokenizer is None:
            self._tokenizer = self._made_tokenizer(package)
        try:
            text = _source(package, params)
        except ValueError as error:
            raise ValueError(_refusal(params, error)) from None
        limits = package.LLParserLimits(verbose_errors=False)
        is_wrong, told = package.LLMatcher.validate_grammar_with_warnings(text, self._tokenizer, limits=limits)
        if is_wrong:
            raise ValueError(_refusal(params, told[0]))
        matcher = package.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        probe.compute_bitmask()  # some grammars turn out to allow nothing
        if probe.is_error():
            raise ValueError(_refusal(params, probe.get_error()))
        return Grammar(matcher, self._tokenizer.vocab_size, frozenset(self._tokenizer.eos_tokens))

    def _made_tokenizer(self, package: Any) -> Any:
        content, num_tokens = self._tokenizer_json()
        try:
            return package.LLTokenizer(content, n_vocab=num_tokens, eos_token=self._end_ids or None)
        except Exception as error:  # the package raises nothing more precise
            raise ValueError(
                f"Structured output needs a tokenizer that llguidance can read. Got {' '.join(str(error).split())}."
            ) from None


def _source(package: Any, params: StructuredOutputsParams) -> str:
    """The grammar as llguidance reads it."""
    if params.regex is not None:
        return package.grammar_from("regex", params.regex)
    if params.grammar is not None:
        return package.grammar_from("grammar", params.grammar)
    if params.choice is not None:
        choices = (json.dumps(choice, ensure_ascii=False) for choice in params.choice)
        return package.grammar_from("lark", f"start: {' | '.join(choices)}")
    if params.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
    schema = json.dumps({"type": "object"}) if params.json is None else params.json
    return package.LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _refusal(params: StructuredOutputsParams, reason: Any) -> str:
    kind = next(name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(params, name))
    return f"`{kind}` of `structured_outputs` cannot be served: {reason_of(str(reason))}."
