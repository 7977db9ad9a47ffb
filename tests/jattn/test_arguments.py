"""What a caller may hand over, what the sentence says where it may not be, and errors in the caller's own words."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.arguments import array, check_fields, check_whole, in_words, instance, integers, number, scale_arrays, whole
from jattn.dtype_names import DTYPE_NAMES, named_dtype

pytestmark = pytest.mark.usefixtures("unchecked")


def traced(function):
    """What `function` says of a traced array."""
    return lambda: jax.jit(function)(jnp.ones(2))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: whole("size", 0), r"^`size` must be a whole number of at least 1. Got 0.$"),
        (lambda: whole("size", True), "Got True"),
        (lambda: whole("size", 2.0), "Got 2.0"),
        (lambda: whole("size", 2**31, 0), "`size` must be a whole number of at least 0. Got 2147483648"),
        (lambda: number("scale", "2"), "`scale` must be a finite number, known outside jit. Got '2'"),
        (lambda: number("scale", np.ones(1)), "`scale` must be a finite number"),
        (lambda: number("scale", float("inf")), "Got inf"),
        (traced(lambda x: number("scale", x[0])), "`scale` must be a finite number, known outside jit"),
        (lambda: array("k", [1.0], "S"), r"`k` must be an array \[S\] of JAX or NumPy. Got k: list of 1"),
        (lambda: array("k", np.ones((2, 3)), "S"), r"Got k.shape=\(2, 3\), k.dtype=float64"),
        (lambda: array("k", None), "`k` must be an array of JAX or NumPy. Got k=None"),
        (lambda: integers("n", [1.5], "B"), r"`n` must be integers \[B\]. Got n: list of 1"),
        (lambda: integers("n", jnp.ones(2), "B"), "Got n.shape=.*, n.dtype=float32"),
        (lambda: integers("n", np.array([True]), "B"), "Got n.shape=.*, n.dtype=bool"),
        (lambda: integers("n", [[1], [2, 3]], "B", "n"), r"`n` must be integers \[B, n\]"),
        (lambda: integers("n", np.array([2**31]), "B"), "`n` must fit 32 bits. Got 2147483648 to"),
        (lambda: instance("pool", 5, dict, type(None)), "`pool` must be of type dict or None. Got pool=5"),
        (lambda: check_fields("layer", 5, "real", "x", "y"), "`layer` must have `x`, `y`. Got layer=5"),
        (lambda: scale_arrays(k_scale="x"), "`k_scale` must be None, a number, or an array of one a KV head. Got"),
    ],
)
def test_argument_that_cannot_be_used_is_told_by_its_name(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_arguments_of_any_integer_and_real_type_are_taken():
    @dataclasses.dataclass(frozen=True)
    class Sizes:
        a: int
        b: int | None = None

        def __post_init__(self):
            check_whole(self, "a")
            check_whole(self, "b", optional=True)

    assert type(Sizes(np.int64(3)).a) is int
    with pytest.raises(ValueError, match=r"`b` must be None or a whole number of at least 1. Got 0"):
        Sizes(1, 0)
    assert (number("x", jnp.float32(0.5)), number("x", 2)) == (0.5, 2.0)
    chex.assert_trees_all_equal(integers("n", np.array([1, 2], np.int64), "B"), jnp.array([1, 2], jnp.int32))
    assert integers("n", [], "B").dtype == jnp.int32
    assert array("k", np.ones(2)).dtype == np.float64  # not made another in silence
    assert isinstance(array("k", np.ones(2, np.float32)), jax.Array)
    assert scale_arrays(a=2, b=None)["a"].dtype == jnp.float32


def test_errors_speak_of_arguments_as_the_caller_knows_them():
    words = {"q": "query", "head_dim": "head_size", "k_pages": "cache[0]"}
    with pytest.raises(NotImplementedError) as caught, in_words(**words):
        raise NotImplementedError(
            "`q` ends in [head_dim=8]; v_head_dim=8, `k_pages`. Got q.shape=(1,), x.q=2, q in it."
        )
    expected = "`query` ends in [head_size=8]; v_head_dim=8, `cache[0]`. Got query.shape=(1,), x.q=2, q in it."
    assert str(caught.value) == expected
    with pytest.raises(ValueError, match="`a` must be"), in_words():
        raise ValueError("`a` must be")


def torch_dtype(name):
    """A stand-in for PyTorch's dtypes, which are known by their module and text."""
    return type("dtype", (), {"__module__": "torch", "__repr__": lambda self: f"torch.{name}"})()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *DTYPE_NAMES.items(),
        ("torch.half", "float16"),
        (torch_dtype("bfloat16"), "bfloat16"),
        (torch_dtype("float8_e5m2"), "float8_e5m2"),
        (jnp.bfloat16, "bfloat16"),
        (np.dtype("float32"), "float32"),
    ],
    ids=str,
)
def test_dtype_goes_by_the_names_that_users_know(given, meant):
    assert named_dtype("q_data_type", given) == jnp.dtype(meant)


@pytest.mark.parametrize(
    "given", ["auto", "float64", "int8", "fp16", "", None, 5, np.int32, [1], torch_dtype("int8")], ids=str
)
def test_dtype_that_is_not_taken_is_told_with_those_that_are(given):
    with pytest.raises(ValueError, match=r"`q_data_type` must be a dtype or one of float32, .*, fp8_e5m2. Got"):
        named_dtype("q_data_type", given)
