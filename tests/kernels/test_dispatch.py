"""Which implementation is chosen, and the sentences when none is."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from jattn_kernels import AttentionSpec, make_schedule, paged_decode
from jattn_kernels.call import AttentionCall, Device, default_device
from jattn_kernels.dispatch import choose
from jattn_kernels.implementation import Implementation

SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)
CALL = AttentionCall(
    operation="paged_decode", spec=SPEC, q_dtype="float32", kv_dtype="float32", page_size=4, device=Device("cpu")
)


HOPPER_CALL = AttentionCall(
    operation="paged_decode",
    spec=AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128),
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=16,
    device=Device("gpu", (9, 0)),
)


def needs_hopper(call):
    if call.device.compute_capability != (9, 0):
        return "`hopper` needs compute capability 9.0."
    return None


HOPPER = Implementation(name="hopper", refuses=needs_hopper, run=lambda call, operands: None)
ANY = Implementation(name="any", refuses=lambda call: None, run=lambda call, operands: None)
NEVER = Implementation(name="never", refuses=lambda call: "`never` serves nothing.", run=lambda call, operands: None)


def test_choose_takes_xla_for_a_plain_call():
    choice = choose(CALL)
    assert choice.implementation.name == "xla"
    assert choice.reason == (
        "`xla` is the first choice that serves this call. "
        "`mosaic` has kernels for compute capability 9.0 (Hopper) only; this is cpu. "
        "`triton` has kernels for compute capability 8.0, 8.6, 8.9, 9.0, 10.0, 12.0; this is cpu."
    )


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (Device("gpu", (9, 0)), "mosaic"),
        (Device("gpu", (8, 0)), "triton"),
        (Device("gpu", (10, 0)), "triton"),
        (Device("gpu", (7, 5)), "xla"),
        (Device("gpu"), "xla"),
    ],
    ids=str,
)
def test_choose_takes_mosaic_on_hopper_and_triton_on_others(device, name):
    assert choose(dataclasses.replace(HOPPER_CALL, device=device)).implementation.name == name


def test_choose_follows_the_device():
    hopper_call = dataclasses.replace(CALL, device=Device("gpu", (9, 0)))
    assert choose(hopper_call, among=(HOPPER, ANY)).implementation is HOPPER
    choice = choose(CALL, among=(HOPPER, ANY))
    assert choice.implementation is ANY
    assert choice.reason.endswith("`hopper` needs compute capability 9.0.")


def test_choose_honours_the_one_asked_for():
    choice = choose(CALL, "any", among=(ANY, HOPPER))
    assert choice == (ANY, "`any` was asked for.")


def test_choose_refuses_the_one_asked_for_and_names_one_that_can():
    with pytest.raises(NotImplementedError, match=r"^`hopper` needs .*Use implementation='any'\.$"):
        choose(CALL, "hopper", among=(HOPPER, ANY))


def test_choose_gives_the_sentences_of_all_when_none_serves():
    with pytest.raises(NotImplementedError, match=r"`hopper` needs .*`never` serves nothing.*No implementation"):
        choose(CALL, among=(HOPPER, NEVER))


@pytest.mark.parametrize("name", ["cuda", [], 3], ids=str)
def test_choose_lists_the_choices_for_an_unknown_name(name):
    with pytest.raises(ValueError, match=r"`implementation` must be None or one of: mosaic, triton, xla\. Got imp"):
        inspect.unwrap(choose)(CALL, name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_dtype": "float8_e4m3"}, "`xla` does not do float8_e4m3: it takes float32, "),
        ({"q_dtype": "float64"}, "`xla` does not do float64"),
        ({"spec": dataclasses.replace(SPEC, batch_invariant=True)}, "does not promise `batch_invariant`"),
    ],
)
def test_xla_refuses_by_name(change, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        choose(dataclasses.replace(CALL, **change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"spec": dataclasses.replace(HOPPER_CALL.spec, head_dim=64, rope_theta=1e4)},
            "`mosaic` rotates keys of head_dim 128, 256 in paged_decode, not 64",
        ),
        (
            {"operation": "ragged_extend", "spec": dataclasses.replace(HOPPER_CALL.spec, head_dim=96, rope_theta=1e4)},
            "`mosaic` rotates keys of head_dim 64, 128, 192, 256 in ragged_extend, not 96",
        ),
        (
            {
                "operation": "paged_extend",
                "kv_dtype": "float8_e5m2",
                "spec": dataclasses.replace(HOPPER_CALL.spec, v_head_dim=80),
            },
            "`mosaic` takes fp8 keys of head_dim 64, 128, 192 or 256, not 128 and 80",
        ),
        *[
            ({"operation": "rotate_and_write", "features": frozenset({name})}, f"`mosaic` does not do `{name}`")
            for name in ("k_scale", "v_scale", "partial_rotary")
        ],
        *[
            (
                {
                    "operation": "mla_extend",
                    "spec": dataclasses.replace(HOPPER_CALL.spec, num_kv_heads=1, head_dim=576, v_head_dim=512),
                    "features": frozenset({name}),
                },
                f"`mosaic` does not do `{name}` in mla_extend",
            )
            for name in ("custom_mask", "alibi_slopes")
        ],
        (
            {"operation": "rotate_and_write", "q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"},
            "`mosaic` does not take float8_e4m3fn queries and float8_e4m3fn keys in rotate_and_write",
        ),
        (
            {"operation": "paged_extend", "q_dtype": "float8_e4m3fn"},
            "`mosaic` does not take float8_e4m3fn queries and bfloat16 keys in paged_extend",
        ),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "`mosaic` does not take float32 queries and float32 keys"),
        ({"q_dtype": "float16"}, "`mosaic` does not take float16 queries and bfloat16 keys in paged_decode"),
        (
            {"operation": "paged_extend", "spec": dataclasses.replace(HOPPER_CALL.spec, head_dim=112)},
            "`mosaic` takes head_dim 64, 80, 96, 128, 192, 256 in paged_extend, keys and values each, not 112 and 112",
        ),
        ({"operation": "paged_extend", "page_size": 4}, "takes page_size 8, .*, 256 in paged_extend, not 4"),
        (
            {"features": frozenset({"custom_mask"}), "num_tokens": 33},
            "`mosaic` takes masks of at most 32 query tokens a sequence in paged_decode, not 33",
        ),
    ],
    ids=str,
)
def test_mosaic_refuses_by_name_on_hopper(change, sentence):
    assert choose(HOPPER_CALL).implementation.name == "mosaic"
    with pytest.raises(NotImplementedError, match=sentence):
        choose(dataclasses.replace(HOPPER_CALL, **change), "mosaic")


def decode_arguments():
    pages = jnp.zeros((2, 4, 1, 8))
    return jnp.ones((1, 1, 2, 8)), pages, pages, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)


def test_faces_refuse_what_no_kernel_does():
    with pytest.raises(NotImplementedError, match=r"`xla` does not promise `batch_invariant`.* No implementation"):
        paged_decode(*decode_arguments(), spec=dataclasses.replace(SPEC, batch_invariant=True))


def test_faces_refuse_the_one_asked_for_and_name_one_that_can():
    with pytest.raises(NotImplementedError, match=r"^`mosaic` .* Use implementation='xla'\.$"):
        paged_decode(*decode_arguments(), spec=SPEC, implementation="mosaic")


@pytest.mark.parametrize("kv_dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("operation", [None, "mla_decode"])
def test_make_schedule_asks_about_the_calls_that_it_is_for(monkeypatch, operation, kv_dtype):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: HOPPER_CALL.device)
    facts = {"spec": HOPPER_CALL.spec, "num_tokens": 1, "dtype": jnp.bfloat16, "page_size": 16}
    made = functools.partial(make_schedule, **facts, kv_dtype=kv_dtype, operation=operation)
    schedule = jax.eval_shape(made, jax.ShapeDtypeStruct((2,), jnp.int32))
    by_whom = None if kv_dtype == jnp.float32 else "mosaic" if operation is None else "triton"
    assert (schedule and schedule.implementation) == by_whom


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"operation": "decode"}, r"`operation` must be one of paged_decode, .* Got operation='decode'"),
        ({"num_tokens": 0}, r"`num_tokens` must be a whole number of at least 1\. Got num_tokens=0"),
        ({"page_size": -3}, r"`page_size` must be a whole number of at least 1\. Got page_size=-3"),
        ({"max_seq_len": 0}, r"`max_seq_len` must be a whole number of at least 1\. Got max_seq_len=0"),
        ({"seq_lens": [9]}, r"`seq_lens` must be an array of JAX or NumPy\. Got a list"),
        ({"seq_lens": jnp.zeros(2)}, r"`seq_lens` must be int32 \[2\]"),
        ({"seq_lens": jnp.zeros(0, jnp.int32)}, r"`seq_lens` must be \[B\] with B at least 1"),
        ({"cu_q_lens": jnp.zeros(2, jnp.int32)}, r"`cu_q_lens` must be int32 \[3\]"),
    ],
)
def test_make_schedule_says_what_is_wrong(change, sentence):
    unchecked = inspect.unwrap(make_schedule)  # as users have it, whose types nobody checks
    facts = {"seq_lens": jnp.ones(2, jnp.int32), "spec": SPEC, "num_tokens": 1, "dtype": "float32", "page_size": 16}
    with pytest.raises(ValueError, match=sentence):
        unchecked(**(facts | change))


def test_default_device_follows_the_configuration():
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        assert default_device() == Device("cpu")
