"""The picture is well-formed, has a bar for each figure, and its heights are in proportion."""

import xml.etree.ElementTree

import pytest

from bench.plots import decode_picture, prefill_picture

PLAIN = {"kv": "bf16", "hq": 32, "hkv": 8, "page": 16, "batch": 8, "ctx": 8192}
PAIRS = [
    ({**PLAIN, "GBps": 4000.0}, {"GBps": 2000.0}),
    ({**PLAIN, "batch": "ragged64", "ctx": 0, "GBps": 1000.0}, {"GBps": 3000.0}),
    ({**PLAIN, "page": 64, "GBps": 1.0}, {"GBps": 1.0}),
    ({**PLAIN, "layout": "HND", "GBps": 1.0}, {"GBps": 1.0}),
    ({**PLAIN, "hq": 64, "GBps": 1.0}, {"GBps": 1.0}),
]


SHAPE = {"hq": 32, "hkv": 8, "q": 1024, "kv": 8192}
PREFILLS = [
    ({**SHAPE, "page": 16, "batch": 8, "TFLOPs": 600.0}, {"TFLOPs": 300.0}),
    ({**SHAPE, "page": 64, "batch": 8, "TFLOPs": 1.0}, {"TFLOPs": 1.0}),
]


def bars(name, picture=None):
    root = xml.etree.ElementTree.fromstring(picture or decode_picture(PAIRS))
    rects = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("class") == name]
    return [float(rect.get("height")) for rect in rects[1:]]  # the first is the legend's


def test_picture_draws_the_plain_rows_in_proportion():
    ours, theirs = bars("jattn"), bars("peer")
    assert len(ours) == len(theirs) == 2
    assert ours[0] == pytest.approx(2 * theirs[0], abs=0.2) == pytest.approx(4 * ours[1], abs=0.4)
    assert theirs[1] == pytest.approx(3 * ours[1], abs=0.3)


def test_picture_suits_light_and_dark_pages():
    text = decode_picture(PAIRS)
    assert "prefers-color-scheme: dark" in text
    assert "read bandwidth 4,386 GB/s" in text


def test_picture_needs_a_plain_row():
    with pytest.raises(ValueError, match="bf16, page 16, NHD"):
        decode_picture(PAIRS[2:4])


def test_picture_of_prefill_draws_the_plain_rows_in_proportion():
    text = prefill_picture(PREFILLS)
    (ours,), (theirs,) = bars("jattn", text), bars("peer", text)
    assert ours == pytest.approx(2 * theirs, abs=0.2)
    for words in ("8 x 1,024 tokens", "context 8,192", "740 TFLOP/s", ">600<", "32/8 heads"):
        assert words in text
    with pytest.raises(ValueError, match="prefill row of page 16"):
        prefill_picture(PREFILLS[1:])
