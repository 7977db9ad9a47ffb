"""A hash of what a function is lowered to for CUDA, free of names, places in files and the order of independent work.

Operations of XLA are hashed as a graph from arguments to results: a call of a function counts as its body, and what
no result needs does not count. A kernel of Mosaic is hashed as the text of its module, in its own order, before Mosaic
chooses layouts: these follow from that text and JAX's version, and take more time than all the rest.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import core as mosaic
from jaxlib.mlir import ir, passmanager

Hashed = Callable[[], str]  # what hashes a case
_KERNEL_CALL = "mosaic_gpu_v2"


def array(shape: tuple[int, ...], dtype: str) -> Any:
    """In place of an array, of which shape and dtype count."""
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))


def lowered_hash(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The hash of a function of such arguments; arrays count by shape and dtype only."""
    with _kernels_before_layouts():
        lowered = jax.jit(function).trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    return module_hash(lowered.compiler_ir())


@contextlib.contextmanager
def _kernels_before_layouts() -> Iterator[None]:
    """Inside, a kernel is lowered to an empty module that bears the digest of what it would have been made of."""
    lower = mosaic.lower_mgpu_module

    def digest(module: Any, launch: Any, semantics: Any, *, auto_barriers: bool = True) -> None:
        if semantics != mosaic.LoweringSemantics.Warpgroup:
            lower(module, launch, semantics, auto_barriers=auto_barriers)
            return
        with module.context:
            passmanager.PassManager.parse("builtin.module(canonicalize,cse)").run(module.operation)
            text = _text_without_names(module.operation)
            for operation in list(module.body.operations):
                operation.erase()
            module.operation.attributes["jattn.digest"] = ir.StringAttr.get(_digest(text, str(auto_barriers)))

    mosaic.lower_mgpu_module = digest
    try:
        yield
    finally:
        mosaic.lower_mgpu_module = lower


def module_hash(module: Any) -> str:
    """The hash of a StableHLO module."""
    with module.context:
        return _Graph(module).hash()


class _Graph:
    """Hashes of the values of a module, each from its operation and the hashes of what that reads."""

    def __init__(self, module: Any):
        self._functions = {operation.attributes["sym_name"].value: operation for operation in module.body.operations}
        self._called: dict[tuple[str, ...], list[str]] = {}

    def hash(self) -> str:
        main = self._functions["main"]
        arguments = [f"argument {i} {a.type}" for i, a in enumerate(main.regions[0].blocks[0].arguments)]
        return _digest(*self._call("main", arguments))

    def _call(self, name: str, arguments: Sequence[str]) -> list[str]:
        """Of the results of a function."""
        key = (name, *arguments)
        if key not in self._called:
            self._called[key] = self._block(self._functions[name].regions[0].blocks[0], arguments, {}, 0)
        return self._called[key]

    def _block(self, block: Any, arguments: Sequence[str], outside: dict[Any, str], depth: int) -> list[str]:
        """Of what a block returns."""
        values = {**outside, **dict(zip(block.arguments, arguments, strict=True))}
        for operation in block.operations:
            operation = operation.operation
            read = [values[value] for value in operation.operands]
            if operation.name == "func.call":
                results = self._call(operation.attributes["callee"].value, read)
            elif not len(operation.results):
                return read  # the terminator
            else:
                inner = self._regions(operation, values, depth + 1)
                whole = _digest(operation.name, *_attributes(operation), *read, *inner)
                results = [_digest(whole, str(i), str(r.type)) for i, r in enumerate(operation.results)]
            values |= zip(operation.results, results, strict=True)
        return []

    def _regions(self, operation: Any, values: dict[Any, str], depth: int) -> list[str]:
        found = []
        for region in operation.regions:
            for block in region.blocks:
                arguments = [f"argument {depth} {i} {a.type}" for i, a in enumerate(block.arguments)]
                found.append(_digest(*self._block(block, arguments, values, depth)))
        return found


def _attributes(operation: Any) -> list[str]:
    """What an operation does, beside its name; a kernel's module without names."""
    attributes = {name: operation.attributes[name] for name in operation.attributes}
    if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == _KERNEL_CALL:
        config = attributes.pop("mhlo.backend_config")
        attributes |= {entry.name: entry.attr for entry in config if entry.name not in ("kernel_hash", "module")}
        return [*_texts(attributes), kernel_text(config["module"].value_bytes)]
    return _texts(attributes)


def _texts(attributes: dict[str, Any]) -> list[str]:
    return [f"{name} = {attribute}" for name, attribute in sorted(attributes.items())]


def kernel_text(module: bytes) -> str:
    """A kernel's module as text without names and locations; in a context that knows Mosaic's dialects."""
    context: Any = ir.Context.current
    context.allow_unregistered_dialects = True
    operation: Any = ir.Module.parse(module).operation
    del operation.attributes["mosaic_gpu.dump_basename"]
    return _text_without_names(operation)


def _text_without_names(operation: Any) -> str:
    for place in (operation, *operation.regions[0].blocks[0].operations):
        if "sym_name" in place.attributes:
            place.attributes["sym_name"] = ir.StringAttr.get("")
    return operation.get_asm(enable_debug_info=False)


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()
