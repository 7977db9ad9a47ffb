"""A schedule that is given must be one for the call: its kernel would read what is not there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jattn_kernels
from jattn_kernels import AttentionSpec, make_schedule
from jattn_kernels.call import Device, Schedule
from jattn_kernels.mosaic import MOSAIC
from jattn_kernels.xla import XLA
from tests.kernels.harness.triton_interpreter import interpreted

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
OF_ANOTHER_CALL = {
    "num_seqs": {"batch": 2},
    "num_tokens": {"num_tokens": 64},
    "window_left": {"spec": {"window_left": 5}},
    "num_q_heads": {"spec": {"num_q_heads": 40, "num_kv_heads": 4}},
    "causal": {"spec": {"causal": False}},
    "kv_dtype": {"kv_dtype": "float8_e4m3fn", "spec": {"head_dim": 256}},
    "page_size": {"page_size": 32},
}
FACES = pytest.mark.parametrize("operation", ["paged_decode", "paged_extend"])


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))


def made(operation, *, batch=4, num_tokens=None, spec=None, **facts):
    """The shapes of a schedule, of the calls of `call` unless said."""
    extends = operation == "paged_extend"
    num_tokens = (101 if extends else 3) if num_tokens is None else num_tokens
    lens, offsets = jnp.ones(batch, jnp.int32), jnp.arange(batch + 1, dtype=jnp.int32)
    facts = {"dtype": "bfloat16", "page_size": 16} | facts
    spec = dataclasses.replace(SPEC, **(spec or {}))
    make = functools.partial(make_schedule, spec=spec, num_tokens=num_tokens, **facts)
    return jax.eval_shape(make, lens, offsets if extends else None)


def call(operation, schedule, *, spec=SPEC, num_tokens=3, **options):
    extends = operation == "paged_extend"
    q = jnp.zeros((101, 4, 64) if extends else (4, num_tokens, 4, 64), jnp.bfloat16)
    pages = jnp.zeros((9, 16, 2, 64), jnp.bfloat16)
    places = jnp.zeros((4, 6), jnp.int32), jnp.ones(4, jnp.int32)
    offsets = [jnp.arange(5, dtype=jnp.int32)] if extends else []
    face = functools.partial(getattr(jattn_kernels, operation), spec=spec, **options)
    arrays = q, pages, pages, *places, *offsets
    if isinstance(schedule, Schedule):
        return jax.eval_shape(lambda schedule, *arrays: face(*arrays, schedule=schedule), schedule, *arrays)
    return jax.eval_shape(functools.partial(face, schedule=schedule), *arrays)


@FACES
@pytest.mark.parametrize("fact", OF_ANOTHER_CALL)
def test_a_schedule_of_another_call_is_refused_by_the_fact_that_differs(operation, fact):
    with pytest.raises(ValueError, match=f"`schedule` must be what `make_schedule` makes .* Got one for .*{fact}="):
        call(operation, made(operation, **OF_ANOTHER_CALL[fact]))


@FACES
@pytest.mark.parametrize("other", [3, (1, 2)], ids=str)
def test_what_is_no_schedule_is_refused(operation, other):
    with pytest.raises(ValueError, match=r"`schedule` must be None or what `make_schedule` makes\. Got an? "):
        call(operation, other)


@FACES
def test_a_schedule_serves_layers_that_differ_in_what_it_does_not_depend_on(operation):
    schedule = made(operation, spec={"page_layout": "HND"})
    spec = dataclasses.replace(SPEC, sm_scale=0.5, logits_soft_cap=30.0)
    assert call(operation, schedule, spec=spec) == call(operation, None)


@FACES
def test_a_given_schedule_is_compared_and_not_made_again(monkeypatch, operation):
    schedule = made(operation)
    wanted = call(operation, schedule)

    def fail(*args, **kwargs):
        pytest.fail("a schedule was made or traced")

    silent = dataclasses.replace(MOSAIC, make_schedule=fail)
    monkeypatch.setattr("jattn_kernels.dispatch._registered", [silent, XLA])
    assert call(operation, schedule) == wanted


def test_a_schedule_of_another_implementation_is_refused():
    schedule = made("paged_decode", num_tokens=40)
    mask = {"custom_mask": jnp.ones(1000, bool)}
    with interpreted():  # by triton: of too many tokens
        assert call("paged_decode", None, num_tokens=40, **mask).shape == (4, 40, 4, 64)
    with pytest.raises(ValueError, match=r"must be told their `features`.* Got one of 'mosaic', .* served by 'triton'"):
        call("paged_decode", schedule, num_tokens=40, **mask)


def test_make_schedule_and_the_call_ask_dispatch_alike():
    assert made("paged_decode", num_tokens=40, features=("custom_mask",)).implementation == "triton"
    schedule = made("paged_decode", num_tokens=3, features=("custom_mask",))
    assert call("paged_decode", schedule, custom_mask=jnp.ones(1000, bool)) == call("paged_decode", None)


@pytest.mark.parametrize("features", ["layer_index", ("custom",), ("schedule",)])
def test_features_of_a_schedule_are_names_of_optional_arguments(features):
    with pytest.raises(ValueError, match="`features` must be names out of layer_index, "):
        made("paged_decode", features=features)
