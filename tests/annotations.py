"""Annotations are checked by jaxtyping and beartype; those that name no array by beartype alone.

`jaxtyped` binds the arguments, opens a scope of axes and checks what it is given twice: at half a million calls that
name no axis, a good part of the tests' time.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

_check = beartype.beartype(conf=beartype.BeartypeConf(violation_type=TypeError))


def check_without_axes_by_beartype() -> None:
    """From now on, modules that jaxtyping's import hook reads are decorated so."""
    jaxtyping.jaxtyped = functools.partial(_jaxtyped, jaxtyping.jaxtyped)


def _jaxtyped(jaxtyped: Callable[..., Any], function: Any = None, *, typechecker: Any) -> Any:
    if function is None:
        return functools.partial(_jaxtyped, jaxtyped, typechecker=typechecker)
    if isinstance(function, type):
        checks = dataclasses.is_dataclass(function) and not getattr(function, "__no_type_check__", False)
        if checks and "__init__" in vars(function):
            function.__init__ = _jaxtyped(jaxtyped, function.__init__, typechecker=typechecker)
        return function
    annotations = getattr(function, "__annotations__", None)
    if annotations is None or any(map(_may_name_an_array, annotations.values())):
        return jaxtyped(function, typechecker=typechecker)
    if not annotations:
        return function
    checked = _check(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        unchecked = jaxtyping.config.jaxtyping_disable or getattr(wrapper, "__no_type_check__", False)
        return (function if unchecked else checked)(*args, **kwargs)

    return wrapper


def _may_name_an_array(annotation: Any) -> bool:
    """True of strings too, which may stand for anything."""
    if isinstance(annotation, typing.TypeAliasType):
        return _may_name_an_array(annotation.__value__)
    if isinstance(annotation, list):  # a callable's arguments
        return any(map(_may_name_an_array, annotation))
    if isinstance(annotation, str | typing.ForwardRef) or type(annotation).__module__.startswith("jaxtyping"):
        return True
    return any(map(_may_name_an_array, typing.get_args(annotation)))
