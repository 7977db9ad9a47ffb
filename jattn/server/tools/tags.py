"""Tags: found in a text that comes in pieces."""


class TagFinder:
    """Passes text on up to one of its tags; what may be the beginning of one is held back until that is decided."""

    def __init__(self, *tags: str):
        self._tags = tags
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """Takes the next piece.

        Returns:
            The text that is certain; the tag behind it, None if there is none yet; and what follows the tag.
        """
        text, self._held = self._held + text, ""
        found = [(place, tag) for tag in self._tags if (place := text.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            return text[:place], tag, text[place + len(tag) :]
        certain = len(text) - self._beginning(text)
        self._held = text[certain:]
        return text[:certain], None, ""

    def finish(self) -> str:
        """The text that was held back: no more comes, so it is no tag."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """How many characters at the end of `text` a tag may begin with."""
        longest = min(len(text), max(len(tag) for tag in self._tags) - 1)
        return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in self._tags)), 0)
