"""What a caller may ask for, and what the host knows of it."""

import numpy as np
import pytest

from jattn.serving.request import Request, SamplingParams, token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 2.7),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", float("nan")),
        ("max_tokens", True),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 2.7),
    ],
)
def test_sampling_params_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"`{field}` must be .* Got {value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("stop_token_ids", "got"),
    [((5.5,), "5.5"), ((2**40,), str(2**40)), ((-1,), "-1"), (("x",), "'x'"), (5, "5"), (b"ab", "b'ab'")],
)
def test_stop_token_ids_that_are_none_are_refused(stop_token_ids, got):
    with pytest.raises(ValueError, match=rf"`stop_token_ids` must be whole numbers .* Got {got}\.$"):
        SamplingParams(stop_token_ids=stop_token_ids)


def test_integers_of_any_type_become_ints():
    params = SamplingParams(
        max_tokens=np.int64(3), top_k=np.int32(4), seed=np.uint32(5), stop_token_ids=np.array([6, 7])
    )
    assert params == SamplingParams(max_tokens=3, top_k=4, seed=5, stop_token_ids=(6, 7))
    assert {type(params.max_tokens), type(params.top_k), type(params.seed), type(params.stop_token_ids[0])} == {int}
    assert token_ids([np.int64(8)], "Ids") == (8,)


def test_num_tokens_counts_the_prompt_and_what_was_generated():
    request = Request(number=0, prompt=[1, 2], params=SamplingParams(), limit=9, stop_ids=frozenset(), generated=[3])
    assert request.num_tokens == len(request.tokens) == 3
