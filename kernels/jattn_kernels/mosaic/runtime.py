"""Where the library lies that compiled kernels call, for steps that are loaded from disk and import no Mosaic."""

import importlib.util
import os
from pathlib import Path

_VARIABLE = "MOSAIC_GPU_RUNTIME_LIB_PATH"  # importing Mosaic sets it, a second and a half later
_PACKAGES = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_LIBRARY = "libmosaic_gpu_runtime.so"


def name_runtime() -> None:
    """Tells XLA's loader where the library is, unless it was told; where it is missing, loading a kernel fails."""
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            if (library := Path(folder) / _LIBRARY).is_file():
                os.environ.setdefault(_VARIABLE, str(library))
