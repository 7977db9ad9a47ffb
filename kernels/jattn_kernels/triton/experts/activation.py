"""An activation of JAX in Triton: its jaxpr as a short program, which the kernel evaluates while it is compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_OPERATIONS = ("add", "sub", "mul", "div", "max", "min", "neg", "exp", "logistic", "erf")
_INLINED = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}
_COPIES = ("copy", "broadcast_in_dim", "convert_element_type")


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on what was computed before: value 0 is the gate's, value 1 the other half's, then a step each.

    Attributes:
        name: Of the operation; "constant" is one.
        first, second: Numbers of the values that it takes.
        constant: Its value, of a constant.
    """

    name: str
    first: int = 0
    second: int = 0
    constant: float = 0.0


class _Unknown(Exception):
    """A primitive that the kernel has not."""


def steps_of(activation: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[Step, ...] | None:
    """The program of a function of two float32 arrays, elementwise; None if it has what the kernel has not."""
    half = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    if jax.eval_shape(activation, half, half) != half:
        return None
    steps: list[Step] = []
    try:
        (result,) = _inlined(jax.make_jaxpr(activation)(half, half), [0, 1], steps)
    except _Unknown:
        return None
    return (*steps, Step("copy", result))


def _inlined(closed: ClosedJaxpr, given: list[int], steps: list[Step]) -> list[int]:
    """The numbers of a jaxpr's results, whose steps are appended."""
    jaxpr: Jaxpr = closed.jaxpr
    numbers: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))

    def do(step: Step) -> int:
        steps.append(step)
        return len(steps) + 1

    def number(atom: Any) -> int:
        return _constant(atom.val) if isinstance(atom, Literal) else numbers[atom]

    def _constant(value: Any) -> int:
        if np.size(value) != 1:
            raise _Unknown
        return do(Step("constant", constant=float(np.asarray(value).reshape(()))))

    numbers |= {var: _constant(value) for var, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [number(atom) for atom in equation.invars]
        if any(getattr(var.aval, "dtype", None) != jnp.float32 for var in equation.outvars):
            raise _Unknown
        if name in _INLINED:
            results = _inlined(equation.params[_INLINED[name]], operands, steps)
        elif name in _COPIES:
            results = operands[:1]
        elif name == "clamp":
            least, value, most = operands
            results = [do(Step("min", do(Step("max", value, least)), most))]
        elif name == "square" or (name == "integer_pow" and equation.params["y"] == 2):
            results = [do(Step("mul", operands[0], operands[0]))]
        elif name in _OPERATIONS:
            results = [do(Step(name, operands[0], operands[-1]))]
        else:
            raise _Unknown
        numbers |= dict(zip(equation.outvars, results, strict=True))
    return [number(atom) for atom in jaxpr.outvars]


@triton.jit
@no_type_check
def evaluate(gate, up, C: tl.constexpr):
    """The result of the program `C.steps`: its last value."""
    values = (gate, up)
    for i in tl.static_range(len(C.steps)):
        values += (_do(values[C.steps[i].first], values[C.steps[i].second], i, C),)
    return values[len(C.steps) + 1]


@triton.jit
@no_type_check
def _do(first, second, STEP: tl.constexpr, C: tl.constexpr):
    NAME: tl.constexpr = C.steps[STEP].name
    result = first
    if NAME == "constant":
        result = tl.full(first.shape, C.steps[STEP].constant, tl.float32)
    elif NAME == "neg":
        result = -first
    elif NAME == "exp":
        result = tl.exp(first)
    elif NAME == "logistic":
        result = tl.sigmoid(first)
    elif NAME == "erf":
        result = tl.erf(first)
    elif NAME == "add":
        result = first + second
    elif NAME == "sub":
        result = first - second
    elif NAME == "mul":
        result = first * second
    elif NAME == "div":
        result = first / second
    elif NAME == "max":
        result = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "min":
        result = tl.minimum(first, second, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(NAME == "copy")
    return result
