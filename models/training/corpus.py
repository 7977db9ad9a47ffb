"""The corpus: the standard library's own sources, split into training, validation and held-out files by name."""

import dataclasses
import hashlib
import pathlib
import sysconfig

EXCLUDED_FOLDERS = {
    "__pycache__",
    "_bundled",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "msilib",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
EXCLUDED_FILES = {"entities.py", "stringprep.py"}
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts by file name, relative to the library's folder, sorted by name.

    Attributes:
        train: What the tokenizer and the model learn from.
        validation: What settings are chosen by.
        held_out: What the stated figures are measured on, once.
    """

    train: dict[str, str]
    validation: dict[str, str]
    held_out: dict[str, str]


def split_of(name: str) -> str:
    """The split of a file: a hash of its name decides, so that every Python version agrees."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 40
    if bucket < 2:
        return "held_out"
    return "validation" if bucket == 2 else "train"


def read_corpus(stdlib: pathlib.Path | None = None) -> Corpus:
    """Sources without tests, generated tables and anything installed.

    Args:
        stdlib: The library's folder; that of the running Python if None.
    """
    root = stdlib or pathlib.Path(sysconfig.get_path("stdlib"))
    splits: dict[str, dict[str, str]] = {"train": {}, "validation": {}, "held_out": {}}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _is_wanted(relative):
            text = path.read_text(encoding="utf-8")
            if text.strip():
                splits[split_of(relative.as_posix())][relative.as_posix()] = text
    return Corpus(**splits)


def _is_wanted(path: pathlib.Path) -> bool:
    return (
        EXCLUDED_FOLDERS.isdisjoint(path.parts)
        and path.name not in EXCLUDED_FILES
        and not any(part.startswith(EXCLUDED_PREFIXES) for part in path.parts)
    )
