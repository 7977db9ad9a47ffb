"""How layers of different kinds are cut into scans."""

import pytest

from jattn_models.layer_pattern import LayerKind, Segment, alike, segments

KINDS = {"F": LayerKind(), "W": LayerKind(window_left=7), "S": LayerKind(sparse=True)}


@pytest.mark.parametrize(
    ("layers", "cut"),
    [
        ("F", ["F x 1"]),
        ("FFFF", ["F x 4"]),
        ("FWWW", ["F x 1", "W x 3"]),
        ("FFFWWW", ["F x 3", "W x 3"]),
        ("FWFW", ["FW x 2"]),
        ("FSFSF", ["FS x 2", "F x 1"]),
        ("WWWWWF" * 3 + "WW", ["WWWWWF x 3", "W x 2"]),
        ("FWS", ["F x 1", "W x 1", "S x 1"]),
    ],
)
def test_segments_are_the_longest_repetitions(layers, cut):
    found = segments(len(layers), lambda layer: KINDS[layers[layer]])
    names = {kind: name for name, kind in KINDS.items()}
    assert [
        f"{''.join(names[kind] for kind in segment.period)} x {len(segment.layers) // len(segment.period)}"
        for segment in found
    ] == cut
    stacks = [stack for segment in found for stack in segment.stacks]
    assert sorted(layer for numbers, _ in stacks for layer in numbers) == list(range(len(layers)))
    assert all(KINDS[layers[layer]] == kind for numbers, kind in stacks for layer in numbers)


def test_equal_layers_are_one_segment_however_many():
    assert alike(10**11, KINDS["W"]) == (Segment(range(10**11), (KINDS["W"],)),)


def test_more_layers_than_any_model_has_are_refused():
    with pytest.raises(ValueError, match=r"`num_hidden_layers` must be at most 10000 .* Got 10001"):
        segments(10001, lambda layer: KINDS["F"])
