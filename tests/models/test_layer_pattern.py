"""How layers of different kinds are cut into scans."""

import pytest

from jattn_models.layer_pattern import LayerKind, Segment, alike, places_among, segments

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


@pytest.mark.parametrize("layers", ["F", "FFFF", "FWWW", "FWFW", "FSWSF", "WWWWWF" * 3 + "WW", "WSWF" * 2 + "FWW"])
def test_places_number_the_layers_of_each_span_in_their_order(layers):
    found = segments(len(layers), lambda layer: KINDS[layers[layer]])
    numbers = {}
    for segment, places in zip(found, places_among(found), strict=True):
        for (of_stack, _), place in zip(segment.stacks, places, strict=True):
            numbers |= dict(zip(of_stack, place, strict=True))
    spans = [KINDS[layer].span for layer in layers]
    assert numbers == {layer: spans[:layer].count(span) for layer, span in enumerate(spans)}


def test_equal_layers_are_one_segment_however_many():
    assert alike(10**11, KINDS["W"]) == (Segment(range(10**11), (KINDS["W"],)),)


def test_more_layers_than_any_model_has_are_refused():
    with pytest.raises(ValueError, match=r"`num_hidden_layers` must be at most 10000 .* Got 10001"):
        segments(10001, lambda layer: KINDS["F"])
