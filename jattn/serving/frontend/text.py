"""Text to tokens and back: a checkpoint's tokenizer, and a decoder for text that is still being generated."""

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# GPT-2's alphabet: bytes that are visible characters of Latin 1 stand for themselves, the others for those from 256 on.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _VISIBLE]
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Args:
        folder: Holds `tokenizer.json`.

    Raises:
        FileNotFoundError: It does not.
        ValueError: The file is not a tokenizer's.

    Attributes:
        is_byte_level: Whether the text of tokens is their bytes (`bytes_of`), one after the other.
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
        decoder = self._tokenizer.decoder
        self._has_byte_tokens = decoder is not None and decoder.decode(["<0xFF>"]) == _REPLACEMENT
        self.is_byte_level = isinstance(decoder, tokenizers.decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The tokenizer as `tokenizer.json` has it."""
        return self._tokenizer.to_str()

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

    def byte(self, token_id: int) -> int | None:
        """The byte that the token stands for (10 for `<0x0A>`); None if it stands for text."""
        token = self.token(token_id) if self._has_byte_tokens else None
        return int(token[3:5], 16) if token and _BYTE_TOKEN.fullmatch(token) else None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a byte-level token stands for; none out of the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id) or ""
            if all(character in _BYTES for character in token):
                found = bytes(map(_BYTES.__getitem__, token))
            else:  # an added token, which spells itself
                found = token.encode()
            self._bytes[token_id] = found
        return found


class StreamDecoder:
    """Decodes tokens as they come: what `push` gives is final, and all of it with `finish` is `decode` of all tokens.

    Only the last tokens are decoded again, so a push costs the same at any length. Half of a character is held back:
    of tokens that hold text it decodes to a U+FFFD at the end, which the next token may turn into something else.

    A run of byte tokens (`<0x0A>`) goes out character by character. `decode` turns the whole of a run that is no UTF-8
    into one U+FFFD a byte; here the characters before the first wrong byte stand, as they may be out already.

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
        self._begun: list[int] = []  # byte tokens of a character that is not whole yet
        self._utf8 = _Utf8Decoder()  # has the bytes of these
        self._in_wrong_run = False  # of bytes, which are one U+FFFD each till its end

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and gives the text that has become certain, maybe none."""
        before = "".join(map(self._take, token_ids))
        text = self._decode()
        end = max(len(text) - text.endswith(_REPLACEMENT), self._given)
        new = text[self._given : end]
        self._given = end
        self._shrink(held=len(text) - end)
        return before + new

    def finish(self) -> str:
        """The text that was held back, as far as it goes; the decoder is then as new."""
        text = self._decode()[self._given :] + _REPLACEMENT * len(self._begun)
        self._window, self._given, self._begun, self._in_wrong_run = [], 0, [], False
        self._utf8.reset()
        return text

    def _take(self, token_id: int) -> str:
        """Puts the token into its place; gives the text of a run of bytes that turns out wrong, and of all before."""
        token = self._tokenizer.token(token_id)
        if token is None or (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            return ""
        byte = self._tokenizer.byte(token_id)
        if byte is not None:
            return _REPLACEMENT if self._in_wrong_run else self._take_byte(token_id, byte)
        text = self._give_up() if self._begun else ""
        self._window.append(token_id)
        self._in_wrong_run = False
        return text

    def _take_byte(self, token_id: int, byte: int) -> str:
        self._begun.append(token_id)
        try:
            whole = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            text = self._give_up()
            self._in_wrong_run = True
            return text
        if whole:
            self._window += self._begun
            self._begun = []
        return ""

    def _give_up(self) -> str:
        """As `finish`, but one of the bytes that are no character stays as what stands before the next token."""
        wrong = self._begun[:1]
        text = self.finish()
        self._window, self._given = wrong, len(_REPLACEMENT)
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)

    def _shrink(self, held: int) -> None:
        if len(self._window) > 2 * self._WINDOW:
            del self._window[: -self._WINDOW]
            while _continues_character(self._tokenizer.byte(self._window[0])):
                del self._window[0]
            self._given = len(self._decode()) - held


def _continues_character(byte: int | None) -> bool:
    return byte is not None and 0x80 <= byte < 0xC0
