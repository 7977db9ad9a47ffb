"""Rows too short for a GPU, for kernels under the interpreter."""

import importlib


def take_short_rows(monkeypatch):
    """Kernels of mxfp4's few tokens take rows of 64 numbers and more; on a GPU of 1,024."""
    importlib.import_module("jattn_kernels.mosaic.entry")  # all others that know the number have it before
    for module in ("experts.few_rows_sizes", "common.row_pieces"):
        monkeypatch.setattr(importlib.import_module(f"jattn_kernels.mosaic.sm90.{module}"), "LEAST", 64)
