"""Which implementation is chosen, and the sentences when none is."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jattn_kernels import AttentionSpec, paged_decode
from jattn_kernels.call import AttentionCall, Device, Implementation, default_device
from jattn_kernels.dispatch import choose

SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)
CALL = AttentionCall(
    operation="paged_decode", spec=SPEC, q_dtype="float32", kv_dtype="float32", page_size=4, device=Device("cpu")
)


def needs_hopper(call):
    if call.device.compute_capability != (9, 0):
        return "`hopper` needs compute capability 9.0."
    return None


HOPPER = Implementation(name="hopper", refuses=needs_hopper, operations={})
ANY = Implementation(name="any", refuses=lambda call: None, operations={})
NEVER = Implementation(name="never", refuses=lambda call: "`never` serves nothing.", operations={})


def test_choose_takes_xla_for_a_plain_call():
    choice = choose(CALL)
    assert choice.implementation.name == "xla"
    assert choice.reason == (
        "`xla` is the first choice that serves this call. "
        "`mosaic` has kernels for compute capability 9.0 (Hopper) only; this is cpu."
    )


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (Device("gpu", (9, 0)), "mosaic"),
        (Device("gpu", (8, 0)), "xla"),
        (Device("gpu", (10, 0)), "xla"),
        (Device("gpu"), "xla"),
    ],
    ids=str,
)
def test_choose_takes_mosaic_on_hopper_only(device, name):
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    call = AttentionCall(
        operation="paged_decode", spec=spec, q_dtype="bfloat16", kv_dtype="bfloat16", page_size=16, device=device
    )
    assert choose(call).implementation.name == name


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


def test_choose_lists_the_choices_for_an_unknown_name():
    with pytest.raises(ValueError, match=r"one of: mosaic, xla\. Got implementation='cuda'"):
        choose(CALL, "cuda")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *[
            ({"features": frozenset({name})}, f"`xla` does not do `{name}`")
            for name in ("alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale")
        ],
        ({"kv_dtype": "float8_e4m3fn"}, "`xla` does not do float8_e4m3fn"),
        ({"q_dtype": "float8_e5m2"}, "`xla` does not do float8_e5m2"),
        ({"spec": dataclasses.replace(SPEC, batch_invariant=True)}, "does not promise `batch_invariant`"),
    ],
)
def test_xla_refuses_by_name(change, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        choose(dataclasses.replace(CALL, **change))


def decode_arguments():
    pages = jnp.zeros((2, 4, 1, 8))
    return jnp.ones((1, 1, 2, 8)), pages, pages, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)


def test_faces_refuse_what_no_kernel_does():
    with pytest.raises(NotImplementedError, match="`xla` does not do `sinks`"):
        paged_decode(*decode_arguments(), spec=SPEC, sinks=jnp.zeros(2))


def test_faces_list_the_choices_for_an_unknown_name():
    with pytest.raises(ValueError, match=r"one of: mosaic, xla\."):
        paged_decode(*decode_arguments(), spec=SPEC, implementation="cuda")


def test_faces_refuse_the_one_asked_for_and_name_one_that_can():
    with pytest.raises(NotImplementedError, match=r"^`mosaic` .* Use implementation='xla'\.$"):
        paged_decode(*decode_arguments(), spec=SPEC, implementation="mosaic")


def test_faces_ignore_a_schedule_that_xla_does_not_need():
    plain = paged_decode(*decode_arguments(), spec=SPEC)
    assert jnp.array_equal(paged_decode(*decode_arguments(), spec=SPEC, schedule=jnp.arange(3)), plain)


def test_default_device_follows_the_configuration():
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        assert default_device() == Device("cpu")
