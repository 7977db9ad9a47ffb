"""Dataclasses that are pytrees: arrays are their leaves, and what is static belongs to the tree itself."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax


def static(**options: Any) -> Any:
    """A field that is no leaf: what is compiled for one value serves that value alone.

    Args:
        options: As `dataclasses.field` has them.
    """
    return dataclasses.field(metadata={"static": True}, **options)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree[T](*, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass and a pytree.

    Its annotations are not checked: JAX makes such trees of what are no arrays, too.
    """

    def made(cls: type[T]) -> type[T]:
        of_fields = dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)
        return typing.no_type_check(jax.tree_util.register_dataclass(of_fields))

    return made
