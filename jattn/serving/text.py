"""Text to tokens and back: a checkpoint's tokenizer, and a decoder for text that is still being generated."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Args:
        folder: Holds `tokenizer.json`.

    Raises:
        FileNotFoundError: It does not.
        ValueError: The file is not a tokenizer's.
    """

    def __init__(self, folder: Path | str):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"The checkpoint has no `tokenizer.json`. Got {str(folder)!r}.")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(
                f"`tokenizer.json` must be a file of the tokenizers library. Got {path}: {error}."
            ) from error
        # What the file says of them is for training batches; a prompt is served whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_ids = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`, with those that the checkpoint puts around a sequence (begin of text, mostly).

        Args:
            add_special_tokens: Whether those come; a chat template writes its own.

        Raises:
            ValueError: `text` has half of a surrogate pair, which no UTF-8 holds.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"`text` must be valid Unicode. Got {text!r}.") from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, and ids out of the vocabulary nothing."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks something (begin, end, ...) and is no text."""
        return token_id in self._special_ids

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None out of the vocabulary."""
        return self._tokenizer.id_to_token(token_id)


_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Decodes tokens as they come: what `push` gives is final, and all of it with `finish` is `decode` of all tokens.

    Only the last tokens are decoded again, so a push costs the same at any length. Half of a character is held back:
    it decodes to a U+FFFD at the end, which the next token may turn into something else. So is a run of byte tokens
    (`<0x0A>`), whose text depends on all of the run.

    Args:
        skip_special_tokens: As for `Tokenizer.decode`.
    """

    # A character has at most 4 bytes and a token at least 1: past its fourth token, a window decodes as the whole does.
    _WINDOW = 8

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out
        self._byte_run: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and gives the text that has become certain, maybe none."""
        for token_id in token_ids:
            token = self._tokenizer.token(token_id)
            if token is None or (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
                continue
            self._byte_run.append(token_id)
            if not _BYTE_TOKEN.fullmatch(token):
                self._window += self._byte_run
                self._byte_run = []
        text = self._decode()
        end = max(len(text) - text.endswith(_INCOMPLETE), self._given)
        new = text[self._given : end]
        self._given = end
        self._shrink(held=len(text) - end)
        return new

    def finish(self) -> str:
        """The text that was held back, as far as it goes; the decoder is then as new."""
        self._window += self._byte_run
        new = self._decode()[self._given :]
        self._window, self._given, self._byte_run = [], 0, []
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)

    def _shrink(self, held: int) -> None:
        if len(self._window) > 2 * self._WINDOW:
            self._window = self._window[-self._WINDOW :]
            self._given = len(self._decode()) - held
