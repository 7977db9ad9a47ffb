"""Hashes of what jattn's cases are lowered to for CUDA, on any machine with JAX, without a GPU.

python -m bench.lowered_hash [--out FILE] [--processes N] [--only PART ...]    a name's hash for each case, as JSON
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def hashes(names: Iterable[str] | None = None, processes: int | None = None) -> dict[str, str]:
    """By name of a case the hash of what it is lowered to.

    Args:
        names: Of the cases; all if None.
        processes: At a time; by default as many as there are processors.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    from bench.lowered_cases import lowered_cases

    known = lowered_cases()
    names = [name for name in (known if names is None else names) if name in known]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=context, initializer=_begin) as pool:
        return dict(zip(names, pool.map(_hash, names), strict=True))


def _begin() -> None:
    from bench import lowered_cases

    del lowered_cases
    gc.freeze()  # what stays until the end need not be looked at again and again


def _hash(name: str) -> str:
    from bench.lowered_cases import lowered_cases

    return lowered_cases()[name]()


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.lowered_hash")
    parser.add_argument("--out", type=Path, help="file to write; else standard output")
    parser.add_argument("--processes", type=int, help="at a time")
    parser.add_argument("--only", action="append", help="part of a case's name; may be repeated")
    options = parser.parse_args()
    names = None
    if options.only:
        from bench.lowered_cases import lowered_cases

        names = [name for name in lowered_cases() if any(part in name for part in options.only)]
    text = json.dumps(hashes(names, options.processes), indent=0)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
