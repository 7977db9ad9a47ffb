"""Stop strings: where text that comes in pieces ends, found across the pieces."""


class StopStrings:
    """Passes text on until a stop string ends it; what may be the beginning of one is held back until that is decided.

    The string that is complete first ends the text, of several the longest: so it does not depend on the pieces.

    Args:
        strings: None of them empty.
        include: Whether the text goes to the string's end, not only to its beginning.

    Attributes:
        found: The string that has ended the text; None before.
    """

    def __init__(self, strings: tuple[str, ...], *, include: bool = False):
        self._strings = strings
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Takes the next piece and gives the text that has become certain, maybe none.

        Args:
            text: The piece; after a stop string it is lost.
            armed: Whether a string that becomes complete within this piece ends the text.
        """
        if not self._strings:
            return text
        if self.found is not None:
            return ""
        seen = len(self._held)
        text = self._held + text
        self._held = ""
        ends = [(end, -len(string), string) for string in self._strings if (end := _end(text, string, seen))]
        if armed and ends:
            end, _, self.found = min(ends)
            return text[:end] if self._include else text[: end - len(self.found)]
        certain = len(text) - self._beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text that was held back: no more comes, so it is no stop string."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """How many characters at the end of `text` a stop string may begin with."""
        longest = max((len(string) - 1 for string in self._strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(string) > length and string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0


def _end(text: str, string: str, seen: int) -> int:
    """Where `string` first ends in `text` beyond the `seen` characters; 0 if nowhere."""
    start = text.find(string, max(0, seen + 1 - len(string)))
    return start + len(string) if start >= 0 else 0
