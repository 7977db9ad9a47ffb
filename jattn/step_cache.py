"""Compiled steps on disk: a second start neither traces, lowers nor compiles what a first one did."""

import contextlib
import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jattn.jax_setting import JaxSetting
from jattn.progress import logger
from jattn_kernels.mosaic.runtime import name_runtime

_FOLDER = "jattn-steps"  # in the folder where JAX keeps its own
_SUFFIX = ".step"
_MAGIC = b"jattn step\n"
MOST_BYTES = 4 * 2**30


class StepCache:
    """A folder of compiled steps by their names.

    A file is written whole or not at all, so that processes may share the folder. One that cannot be read counts as
    none, and one that cannot be written is not missed. What is there is run: nobody else may write to the folder.

    Args:
        folder: Made when it is first written to.
        most_bytes: Of all files; those that were not used for the longest time make way.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        self._folder = folder
        self._most_bytes = most_bytes

    def load(self, name: str, devices: Sequence[Any]) -> jax.stages.Compiled | None:
        """The step of a name, ready to run; None if there is none that can be read.

        Args:
            devices: Those that it is compiled for, in their order.
        """
        path = self._folder / f"{name}{_SUFFIX}"
        try:
            content = path.read_bytes()
        except OSError:
            return None
        try:
            compiled = deserialize_and_load(*pickle.loads(_checked(content)), execution_devices=devices)
        except Exception as error:  # whatever a file of another make may raise: it is compiled anew
            logger.info("%s is compiled again, as it cannot be loaded: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return compiled

    def store(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Keeps a step that this process compiled; one that JAX's cache had cannot be written again."""
        try:
            payload = pickle.dumps(serialize(compiled))
        except Exception as error:  # a step that cannot be kept is none to fail for
            logger.info("A step is not kept on disk: %s", error)
            return
        content = _MAGIC + hashlib.sha256(payload).digest() + payload
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._folder / f"{name}{_SUFFIX}", content)
            self._make_room()

    def _write(self, path: Path, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            try:
                file.write(content)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    def _make_room(self) -> None:
        """Takes away the files that were used least lately, until the others are few enough."""
        found = sorted(((entry.stat(), entry) for entry in self._folder.iterdir()), key=lambda e: e[0].st_mtime)
        excess = sum(stat.st_size for stat, _ in found) - self._most_bytes
        for stat, entry in found:
            if excess <= 0:
                return
            entry.unlink(missing_ok=True)
            excess -= stat.st_size


def _checked(content: bytes) -> bytes:
    """What a file holds.

    Raises:
        ValueError: It is cut short, changed or no step.
    """
    begin = len(_MAGIC) + hashlib.sha256().digest_size
    payload = content[begin:]
    if content[:begin] != _MAGIC + hashlib.sha256(payload).digest():
        raise ValueError("it is damaged")
    return payload


def use_persistent_cache(folder: Path | None = None) -> None:
    """Keeps compiled steps between runs in a private folder.

    Does nothing where JAX already has a cache folder, nor in one of several processes: XLA may tune what it compiles
    for all of them together, and would wait for one that has found it on disk.

    Args:
        folder: Where; `$XDG_CACHE_HOME/jattn/xla` or `~/.cache/jattn/xla` if None.
    """
    if jax.config.jax_compilation_cache_dir or jax.process_count() > 1:
        return
    try:
        if folder is None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jattn" / "xla"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (OSError, RuntimeError):
        return  # a read-only home or none: compile each time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # dozens of small ones take a second together


def step_cache() -> StepCache | None:
    """The cache in JAX's own folder, ready to load kernels; None where JAX keeps nothing, or keeps it elsewhere."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or not (jax.config.jax_enable_compilation_cache or _without_jax_cache.is_held):
        return None
    name_runtime()
    return StepCache(Path(folder) / _FOLDER)


def jax_cache_keeps() -> bool:
    """Whether JAX's own cache keeps what is compiled now."""
    return bool(jax.config.jax_compilation_cache_dir) and bool(jax.config.jax_enable_compilation_cache)


_without_jax_cache = JaxSetting("jax_enable_compilation_cache", False, compilation_cache.reset_cache)


@contextlib.contextmanager
def without_jax_cache() -> Iterator[None]:
    """Compiles anew what JAX's own cache may have: an executable that came out of it cannot be written again on a CPU.

    (XLA of JAX 0.11.2: a function is "not found" when the second copy runs.)
    """
    if not jax.config.jax_enable_compilation_cache and not _without_jax_cache.is_held:
        yield
        return
    with _without_jax_cache.held():
        yield
