"""Each sentence that a wrong field of an AttentionSpec becomes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec

FIELDS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "causal": False}


def checked(**changes):
    """A spec made past the type checker of the tests, which would be first to speak."""
    spec = AttentionSpec(**FIELDS)
    for name, value in changes.items():
        object.__setattr__(spec, name, value)
    spec.__post_init__()
    return spec


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 16.5, 16.0, True, "16"])
def test_sizes_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be a whole number of at least 1\. Got {name}={value!r}\."):
        checked(**{name: value})


@pytest.mark.parametrize(
    ("name", "least"), [("v_head_dim", 1), ("window_left", 0), ("window_right", 0), ("chunk_size", 1)]
)
def test_optional_sizes_are_whole_numbers_of_32_bits(name, least):
    for value in (least, 2**31 - 1):
        assert getattr(checked(**{name: value}), name) == value
    for value in (least - 1, 2**31, 2.5, True):
        with pytest.raises(
            ValueError, match=rf"`{name}` must be None .*{least} \.\. 2147483647\. Got {name}={value!r}"
        ):
            checked(**{name: value})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_q_heads": 3}, "`num_q_heads` must be a multiple of `num_kv_heads`"),
        ({"causal": None}, r"`causal` must be True or False\. Got causal=None"),
        ({"batch_invariant": "yes"}, r"`batch_invariant` must be True or False\. Got batch_invariant='yes'"),
        ({"sm_scale": "a"}, r"`sm_scale` must be a number known when tracing\. Got sm_scale='a'"),
        ({"sm_scale": jnp.float32(0.5)}, r"`sm_scale` must be a number known when tracing\. Got sm_scale=Array"),
        ({"logits_soft_cap": "5"}, r"`logits_soft_cap` must be a number known when tracing\. Got logits_soft_cap='5'"),
        ({"rope_theta": True}, r"`rope_theta` must be a number known when tracing\. Got rope_theta=True"),
        *(
            ({"logits_soft_cap": cap}, r"`logits_soft_cap` must be None \(off\) or in 1e-30 \.\. 1e\+30")
            for cap in (0.0, 1e-39, 1e39, float("nan"))
        ),
        *(({"sm_scale": scale}, "`sm_scale` must be finite, at most") for scale in (1e39, -1e39, float("nan"))),
        ({"sm_scale": float("inf")}, "`sm_scale` must be finite"),
        ({"rope_theta": 0.0}, r"`rope_theta` must be positive and finite\. Got rope_theta=0\.0"),
        ({"rope_theta": 1e4, "rope_scale": float("inf")}, "`rope_scale` must be positive and finite"),
        ({"rope_scale": 2.0}, r"`rope_scale` needs `rope_theta`, which is None\. Got rope_scale=2\.0"),
        ({"rope_theta": 1e4, "head_dim": 15}, r"`rope_theta` needs an even `head_dim`\. Got head_dim=15"),
        ({"causal": True, "window_right": 1}, "`window_right` needs causal=False"),
        ({"page_layout": "XXX"}, "`page_layout` must be one of NHD, HND"),
        ({"combined_pool": "XXX"}, "`combined_pool` must be None, 'pages_first' or 'kv_first'"),
        ({"combined_pool": "kv_first", "v_head_dim": 8}, "`combined_pool` needs v_head_dim == head_dim"),
    ],
)
def test_fields_that_contradict_a_rule_are_named(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        checked(**fields)


def test_numbers_of_numpy_are_numbers():
    spec = checked(num_q_heads=np.int64(8), window_left=np.int32(3), sm_scale=np.float32(0.5))
    assert spec == AttentionSpec(**(FIELDS | {"num_q_heads": 8}), window_left=3, sm_scale=0.5)
    assert hash(spec) == hash(checked(num_q_heads=8, window_left=3, sm_scale=0.5))
