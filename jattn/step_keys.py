"""What a compiled step depends on, as a name for it: another process finds the step by the same name."""

import dataclasses
import functools
import hashlib
import importlib.util
import io
import os
import pickle
import platform
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from jattn_kernels.dispatch import implementations

_FORMAT = 2  # of the files that are named
_STARTED = time.time()
_BY_VERSION = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")  # packages that nobody edits in place
_ALWAYS = ("jattn", "jattn_kernels")
_STDLIB = sys.stdlib_module_names
_LIBRARIES = ("jax_cuda*", "nvidia*", "jax_triton*", "triton*")  # what a GPU's steps call, and what compiles them
# Settings, by how their names begin, that change no step.
_ONLY_TOLD = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_explain", "jax_dump", "jax_traceback_in")


class NoName(Exception):
    """A step that has none: it depends on what another process cannot be known to have."""


class StepNames:
    """Names of the steps that this process compiles now: on its device, with its settings.

    Raises:
        OSError: A file that they depend on cannot be read.
    """

    def __init__(self):
        self._environment = _digest(*_environment())
        self._codes: dict[frozenset[str], list[str]] = {}

    def name(self, function: Callable[..., Any], arguments: Any, *options: Any) -> str:
        """The name of a step.

        Args:
            function: Static values and functions of modules, nothing that was made by a function.
            arguments: Their shapes, dtypes and places count.
            options: Whatever else it is compiled with.

        Raises:
            NoName: It has none.
            OSError: A source file cannot be read.
        """
        leaves, tree = jax.tree.flatten(arguments)
        pickler = _Pickler(stream := io.BytesIO())
        try:
            pickler.dump((function, tree, [_shape(leaf) for leaf in leaves], options, implementations()))
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise NoName(str(error)) from error
        return _digest(self._environment, stream.getvalue(), *self._code({*_ALWAYS, *pickler.packages}))

    def _code(self, packages: set[str]) -> list[str]:
        """Hashes of the packages' sources, and of those that patch them as things stand."""
        if (known := frozenset(packages)) not in self._codes:
            self._codes[known] = [_sources(package) for package in sorted(packages | _patching(packages))]
        return self._codes[known]


class _Pickler(pickle.Pickler):
    """Writes equal values alike in every process, and notes the packages whose code they are of.

    Attributes:
        packages: Those that are not known by their version.
    """

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, protocol=5)
        self.fast = True  # else what is written depends on which equal strings are one object
        self.packages: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            # Not its `__dict__`: what a property has cached there is no part of the value.
            return type(obj), tuple(_ordered(getattr(obj, field.name)) for field in dataclasses.fields(obj))
        package = (getattr(obj, "__module__", None) or "builtins").partition(".")[0]
        if package == "__main__":
            raise pickle.PicklingError(f"{obj!r} is of a script or a notebook.")
        if package not in _BY_VERSION and package not in _STDLIB:
            self.packages.add(package)
        return NotImplemented


def _ordered(value: Any) -> Any:
    """A set as a tuple: each process has its own order of strings."""
    return tuple(sorted(value, key=repr)) if isinstance(value, set | frozenset) else value


def _shape(leaf: Any) -> tuple[Any, ...]:
    """What a step is compiled for of an argument."""
    sharding = getattr(leaf, "sharding", None)
    committed = getattr(leaf, "committed", sharding is not None)  # a shape's sharding is
    facts = (getattr(leaf, "weak_type", False), _place(sharding) if sharding is not None and committed else None)
    return tuple(leaf.shape), jax.numpy.dtype(leaf.dtype).name, *facts


def _place(sharding: Any) -> tuple[Any, ...]:
    """The devices that an argument is tied to, and how they share it."""
    if not sharding.is_fully_addressable:
        # One process may find on disk what another one does not, and XLA tunes for all of them at once.
        raise NoName("Several processes share an argument.")
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        numbers = [device.id for device in mesh.devices.flat]
        return numbers, str(mesh.shape), str(mesh.axis_types), str(sharding.spec), sharding.memory_kind
    if len(sharding.device_set) > 1:
        raise NoName("Several devices share an argument in a way of their own.")
    return ([device.id for device in sharding.device_set],)


def _environment() -> Iterator[str]:
    """Versions, settings, device and processor."""
    yield f"{_FORMAT} {sys.version}"
    yield from (f"{package} {version(package)}" for package in _BY_VERSION)
    for entry in sys.path:
        for pattern in _LIBRARIES:
            yield from sorted(path.name for path in Path(entry).glob(f"{pattern}.dist-info"))
    for name, value in sorted(jax.config.values.items()):
        if not name.startswith(_ONLY_TOLD):
            yield f"{name} {getattr(jax.config, name, value)}"
    yield f"{jax.sharding.get_abstract_mesh()}"
    for name, value in sorted(os.environ.items()):
        if name == "XLA_FLAGS" or name.startswith("JATTN_"):
            content = Path(value).read_bytes() if os.path.isfile(value) else b""  # flags may be too long for a path
            yield f"{name} {value} {hashlib.sha256(content).hexdigest()}"
    device = jax.local_devices()[0]
    for fact in ("platform", "device_kind", "compute_capability", "core_count"):
        yield f"{fact} {getattr(device, fact, None)}"
    yield device.client.platform_version
    yield _processor()


def _processor() -> str:
    """The host's instruction set: every step has some code for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _patching(packages: set[str]) -> set[str]:
    """Packages that are not installed, and have put functions or classes of theirs into these packages' modules.

    Raises:
        NoName: A script or a notebook has.
    """
    modules = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] in packages]
    values = [value for module in modules for value in vars(module).copy().values()]
    values += [value for each in values if isinstance(each, type) for value in vars(each).copy().values()]
    owners = {getattr(value, "__module__", None) for value in values if isinstance(value, type | types.FunctionType)}
    others = {owner.partition(".")[0] for owner in owners if owner} - packages - {*_BY_VERSION, *_STDLIB}
    if "__main__" in others:
        raise NoName("A script or a notebook has patched what steps are made of.")
    return {package for package in others if not _installed(package)}


@functools.cache
def _installed(package: str) -> bool:
    """Whether nobody edits it in place; what has no file is somebody's binary."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return True
    origin = spec.origin if spec else None
    return origin is None or not {"site-packages", "dist-packages"}.isdisjoint(Path(origin).parts)


@functools.cache
def _sources(package: str) -> str:
    """A hash of a package's files.

    Raises:
        NoName: It has none, or one was changed since this process began, which may run it as it was.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not (spec.submodule_search_locations or spec.origin):
        raise NoName(f"{package} has no files.")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))] or [Path(str(spec.origin))]
    if max(path.stat().st_mtime for path in files) > _STARTED:
        raise NoName(f"{package} was changed since this process began.")
    root = folders[0] if folders else files[0].parent
    return _digest(*(part for path in files for part in (str(path.relative_to(root)), path.read_bytes())))


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()
