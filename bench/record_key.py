"""Which device code a GPU record is of: a hash of what is lowered for CUDA, and one of the files that it comes from.

Names and comments leave the first as it is, so that they do not void a record; the second tells at once where no file
has changed. What mixtures of experts, products with weights, latents, norms and decode over fp8 are lowered to voids
the parts that run them, and no others. Of the standard library alone.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

FILE = "lowered.json"
PACKAGE = Path("kernels", "jattn_kernels")
# Cases by what they are of, the first that fits; what none fits is in every part of the record.
_KINDS = {
    "decode with sinks": r"mosaic/(paged|mla)_decode_(.*sinks|.*everything|all$)",
    "experts in few bits": r"(mixture_of_experts|routed_experts)/.*(fp8|float8|int4|blocks|mxfp4)",
    "products in few bits": r"matmul/.*(fp8|float8|int4|blocks)",
    "experts": r"(mixture_of_experts|routed_experts)/",
    "gated products": r"matmul_gated/",
    "products": r"matmul(_splits)?/",
    "decode over fp8": r"mosaic/paged_decode_.*(fp8|float8)",
    "decode of projections": r"projected_decode/",
    "latents": r"(mosaic/mla_(decode|extend)_|mla_write/)",
    "norms": r"(add_)?rms_norm/",
}
# What runs in a part beside that. Of bfloat16 weights steps of mixtures alone have
# products by kernels of ours: their projections are small enough for them.
_IN_PARTS = {
    "decode": {"decode over fp8"},
    "decode_features": {"decode over fp8"},
    "moe_layer": {"experts"},
    "decode_step": {"norms", "gated products"},
    "decode_step_moe": {"experts", "products", "norms", "decode of projections"},
    "decode_step_latent": {"experts", "products", "norms", "latents"},
    "decode_step_quantized": {
        "products in few bits",
        "products",
        "norms",
        "decode over fp8",
        "decode of projections",
    },
    "decode_step_awq": {"products in few bits", "products", "norms", "decode of projections"},
    "decode_step_moe_quantized": {
        "experts in few bits",
        "experts",
        "products in few bits",
        "products",
        "norms",
        "decode with sinks",
    },
    "latent": {"latents"},
}
_NEVER_LOWERED = ("reference", "__pycache__")  # folders of the package
_SECONDS = 1200

Lower = Callable[[Path], dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordKey:
    """What the rows of a record are of.

    Attributes:
        kernels_sha: In every row: of all cases' hashes, but for those that joined after the first row.
        sources_sha: Of the files.
        jax: The version that lowered them.
        cases: By name of a case the hash of what it was lowered to.
        parts: The same as `kernels_sha` in the rows of parts that were recorded anew, as cases of theirs alone changed.
    """

    kernels_sha: str
    sources_sha: str
    jax: str
    cases: Mapping[str, str]
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def sha_of(self, part: str) -> str:
        """What a part's rows bear."""
        return self.parts.get(part, self.kernels_sha)

    @classmethod
    def read(cls, record: Path) -> "RecordKey | None":
        """That of a record's folder, if it has one."""
        file = record / FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def write(self, record: Path) -> None:
        record.mkdir(parents=True, exist_ok=True)
        (record / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=0) + "\n", encoding="utf-8")

    def changed(self, cases: Mapping[str, str]) -> list[str]:
        """The recorded cases that are lowered to something else, or not at all; new ones are nobody's loss."""
        return [name for name, digest in self.cases.items() if cases.get(name) != digest]


def _kind(case: str) -> str | None:
    return next((kind for kind, names in _KINDS.items() if re.match(names, case)), None)


def sources_sha(root: Path) -> str:
    """sha256 over path and content of every file of the kernels' package that may be lowered."""
    package, digest = root / PACKAGE, hashlib.sha256()
    files = [file for file in package.rglob("*.py") if not {*file.relative_to(package).parts} & {*_NEVER_LOWERED}]
    for path, file in sorted((file.relative_to(root).as_posix(), file) for file in files):
        for part in (path.encode(), file.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def lower(root: Path) -> dict[str, str]:
    """Each case's hash, by processes of their own: the one that asks may have a GPU, or no JAX.

    Raises:
        RuntimeError: They failed; the message ends as their output does.
    """
    paths = [str(root / place) for place in (".", "kernels", "models")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, sys.path)])}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, FILE)
        command = [sys.executable, "-m", "bench.lowered_hash", "--out", str(out)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return json.loads(out.read_text(encoding="utf-8"))


def current_key(record: Path, root: Path, lower: Lower = lower) -> RecordKey:
    """The key of the code as it is; the record's own `kernels_sha` if its cases are lowered to the same."""
    recorded, sources, jax = RecordKey.read(record), sources_sha(root), importlib.metadata.version("jax")
    if recorded is not None and (recorded.sources_sha, recorded.jax) == (sources, jax):
        return recorded
    cases = lower(root)
    kernels = hashlib.sha256(json.dumps(cases, sort_keys=True).encode()).hexdigest()
    if recorded is not None and recorded.jax == jax:
        kinds = set(map(_kind, recorded.changed(cases)))
        if None not in kinds:
            parts = {part: kernels for part, runs in _IN_PARTS.items() if runs & kinds}
            return dataclasses.replace(recorded, sources_sha=sources, cases=cases, parts={**recorded.parts, **parts})
    return RecordKey(kernels_sha=kernels, sources_sha=sources, jax=jax, cases=cases)


def difference(recorded: RecordKey, root: Path, lower: Lower = lower) -> str | None:
    """How the code as it is differs from what was recorded, in a sentence, or None.

    At once where no file has changed; else by lowering, which takes minutes.
    """
    if recorded.sources_sha == sources_sha(root):
        return None
    try:
        version = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != recorded.jax:
        return (
            f"Files of the kernels have changed, and only JAX {recorded.jax} can tell whether what they are lowered to "
            f"has: run `uv run python -m bench.gpu_record --check`. Got {version}."
        )
    changed = recorded.changed(lower(root))
    if not changed:
        return None
    return (
        f"The device code has changed since the record: {len(changed)} of {len(recorded.cases)} cases are lowered to "
        f"something else, such as {', '.join(changed[:3])}."
    )
