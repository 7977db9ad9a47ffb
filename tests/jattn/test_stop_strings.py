"""Where a text ends at a stop string does not depend on its pieces, and nothing of the string gets out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.serving.frontend.stop_strings import StopStrings

# Few letters, so that strings overlap, nest and recur.
texts = st.text("ab🙂", max_size=24)
stop_strings = st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4).map(tuple)


def ending(text, strings):
    """Start, end and string of what ends `text`: complete first, of several the longest."""
    for end in range(len(text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if text[:end].endswith(string):
                return end - len(string), end, string
    return len(text), len(text), None


@given(text=texts, strings=stop_strings, include=st.booleans(), data=st.data())
def test_text_ends_at_its_first_stop_string_however_it_is_split(text, strings, include, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stop = StopStrings(strings, include=include)
    given_out = ""
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        given_out += stop.push(text[a:b])
        start, _, found = ending(text[:b], strings)
        assert stop.found == found
        if found is None:  # nothing that a string may begin with is out, and nothing else is held back
            beginnings = [k for string in strings for k in range(1, len(string)) if text[:b].endswith(string[:k])]
            assert given_out == text[: b - max(beginnings, default=0)]
    start, end, found = ending(text, strings)
    given_out += stop.finish()
    assert given_out == text[: end if include else start]


@pytest.mark.parametrize(
    ("pieces", "armed_from", "expected", "found"),
    [
        (["a#", "b#"], 1, "a#b", "#"),
        (["aa", "a"], 1, "a", "aa"),  # complete with the third letter, of which two came too early to end the text
        (["a#", "b"], 1, "a#b", None),
        (["STO", "P!"], 1, "", "STOP"),
        (["STOP", "!"], 1, "STOP!", None),
    ],
)
def test_string_complete_in_a_piece_that_is_not_armed_passes(pieces, armed_from, expected, found):
    stop = StopStrings(("#", "aa", "STOP"))
    text = "".join(stop.push(piece, armed=i >= armed_from) for i, piece in enumerate(pieces))
    assert (text + stop.finish(), stop.found) == (expected, found)


def test_nothing_comes_after_a_stop_string():
    stop = StopStrings(("x",))
    assert stop.push("axb") == "a"
    assert (stop.push("c"), stop.finish()) == ("", "")
